"""Every command that the documentation shows exists with its options, and every run file or part of one is read."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import set_secret
from dstackweb.cli.main import app
from dstackweb.profiles.models import Profile
from dstackweb.runs.services import ensure_queue
from dstackweb.spec.run_fields import RunFields
from dstackweb.spec.run_file import parse_run_file, split
from tests.cli.conftest import Cli
from tests.factories import make_run

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
COMMAND = re.compile(r"(?:^    |`|\| )dstackweb ([a-z-][^`#|>\n]*)", re.MULTILINE)
FENCED = re.compile(r"^```yaml[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAM = typer.main.get_command(app)
NEEDED = {"type": "type: task\n", "commands": "commands: [a]\n"}
"""What parts of run files are shown without."""
INDENTED = re.compile(r"^\n((?:    .*\n|\n(?=    ))+)", re.MULTILINE)


def shown(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for found in pattern.finditer(page.read_text()):
            yield str(page.relative_to(ROOT)), found[1]


def check(words: list[str]) -> None:
    """Raises what the command line would: no such command or option, an option without its value, too many words."""
    command: Any = PROGRAM
    context = command.context_class(command, info_name="dstackweb")
    rest = command.make_parser(context).parse_args(words)[1]
    while rest and hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, rest)
        context = command.context_class(command, info_name=name, parent=context)
        rest = command.make_parser(context).parse_args(words)[1]
    assert rest == []


def test_every_command_in_the_documentation_exists_with_its_options() -> None:
    commands = list(shown(COMMAND))
    assert len(commands) > 100
    refused = []
    for page, text in commands:
        try:
            check(shlex.split(text))
        except Exception as error:
            refused.append((page, text, repr(error)))
    assert refused == []


def test_what_does_not_exist_is_noticed() -> None:
    for text in ("stpo train", "stop train --now", "stop train another"):
        with pytest.raises(Exception, match=r"stpo|--now|another"):
            check(shlex.split(text))


def run_files() -> Iterator[tuple[str, str]]:
    """What the pages show of run files, each completed to a whole one."""
    for page, text in [*shown(FENCED), *shown(INDENTED)]:
        try:
            parts = [(str(part.config), yaml.safe_load(str(part.config))) for part in split(textwrap.dedent(text))]
        except yaml.YAMLError:
            continue  # a shell's lines, mostly
        if parts and all(
            isinstance(found, dict) and found.keys() <= RunFields.model_fields.keys() for _, found in parts
        ):
            yield (
                page,
                "\n---\n".join(
                    "".join(line for key, line in NEEDED.items() if not found.keys() & {key, "init"}) + part
                    for part, found in parts
                ),
            )


def test_every_run_file_in_the_documentation_is_read() -> None:
    files = list(run_files())
    assert len(files) > 15
    for _page, file in files:
        for part in split(file):
            parse_run_file(part.config, client_env={"HF_TOKEN": "x"})


@pytest.mark.django_db
def test_every_run_file_in_the_documentation_and_each_example_is_planned(cli: Cli, project: Project, ada: User) -> None:
    Profile.objects.create(name="nightly", project=project)
    for name in ("train", "clean"):
        make_run(project, ada, name)
    examples = [(path.name, path.read_text()) for path in sorted((ROOT / "examples").glob("*.yaml"))]
    refused = []
    for page, file in [*run_files(), *examples]:
        for secret in re.findall(r"secrets\.(\w+)", file):
            set_secret(project, secret, "wandb_0123456789", ada)
        for queue in re.findall(r"^queue: (\w+)", file, re.MULTILINE):
            ensure_queue(project, queue)
        result = cli("apply", "--dry-run", "--no-code", "-f", cli.file(file), HF_TOKEN="hf_0123456789")
        if result.exit_code:
            refused.append((page, file, result.output))
    assert refused == []
