"""The help of the command line, and the pages that describe it, have the same commands and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import dstackweb
from dstackweb.cli.main import app
from dstackweb.cli.manual import EXAMPLES

DOCS = Path(__file__).parents[2] / "docs"
BY_LETTER = {"--file", "--env", "--yes", "--all", "--list"}
"""Options that the pages show by their letter."""
DEFAULTS = {"--start"}
"""The other side of `--no-start`."""


def commands(group: Any, *before: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        inner = hasattr(command, "commands")
        yield from commands(command, *before, name) if inner else [((*before, name), command)]


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_says_what_it_does_and_takes_and_how_to_use_it(name: tuple[str, ...]) -> None:
    text = CliRunner().invoke(app, [*name, "--help"], env={"COLUMNS": "300"}).output
    assert f" {' '.join(name)} [OPTIONS]" in text
    assert "[[" not in text.partition("\n\n")[0]
    assert COMMANDS[name].help.partition("\n")[0].replace("`", "") in text
    for param in COMMANDS[name].params:
        assert param.help.replace("`", "") in text
        assert param.metavar is not None, "else the type is shown"
        assert param.metavar in text
    examples = EXAMPLES.get(" ".join(name), ())
    assert re.findall("^  • (.*?) *$", text, re.MULTILINE) == [
        f"dstackweb {line}: {about}".replace("`", "") for line, about in examples
    ]


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_the_documentation_has_every_command_and_option(name: tuple[str, ...]) -> None:
    text = (DOCS / "cli.md").read_text() + (DOCS / "hosts.md").read_text()
    options = {option for each in COMMANDS[name].params for option in each.opts if option.startswith("--")}
    assert {word for word in {*name, *options} - BY_LETTER - DEFAULTS if word not in text} == set()


def test_the_command_alone_shows_its_help_and_succeeds() -> None:
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    assert shown.output == CliRunner().invoke(app, ["--help"]).output


def test_the_version_is_shown() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"dstackweb {dstackweb.__version__}\n")
