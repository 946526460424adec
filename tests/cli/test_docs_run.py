"""The commands of the README and of the guides work, in the order in which they are read, on a real deployment.

A block of commands that cannot run here has `<!-- not run: reason -->` above it; the reasons are those of `REASONS`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.conftest import Cli
from tests.server import TOKEN, Server
from tests.support import REPO, eventually

PAGES = [REPO / "README.md", *(REPO / f"docs/guides/{name}.md" for name in ("members", "admins", "operators"))]
PART = re.compile(
    r'^```yaml title="(?P<file>[\w.-]+)"\n(?P<text>.*?)^```|^\n(?P<block>(?:    [^\n]*\n)+)',
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"<!-- not run: (.+) -->\n\Z")
ENDED = {"done", "failed", "terminated"}
ADDRESSES = ("https://gpus.example.org", "http://127.0.0.1:8000")
MANAGE = """
import json, sys
from django.core.management import execute_from_command_line
for words in json.loads(sys.argv[1]):
    execute_from_command_line(words)
"""
REASONS = {
    "ends the jobs of a host", "installs a package", "needs a run with idle GPUs", "needs a second machine",
    "needs a stopped server", "needs systemd", "starts a server",
}  # fmt: skip


class Part(NamedTuple):
    """A file that a page has its reader write, or a block of commands; `reason`: why the block is not run."""

    page: str
    text: str
    file: str = ""
    reason: str = ""

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without comments."""
        return [shlex.split(line, comments=True) for line in self.text.splitlines()]


def parts() -> Iterator[Part]:
    for page in PAGES:
        text = page.read_text()
        for found in PART.finditer(text):
            mark = MARK.search(text, 0, found.start())
            if found["file"]:
                yield Part(page.name, found["text"], file=found["file"])
            else:
                yield Part(page.name, found["block"], reason=mark[1] if mark else "")


def test_each_block_of_commands_can_run_or_says_why_not() -> None:
    blocks = [part for part in parts() if not part.file]
    run = [words for part in blocks if not part.reason for words in part.commands]
    assert len(run) > 50
    assert {words[0] for words in run} == {"dstackweb", "dstackweb-server"}
    assert {part.reason for part in blocks if part.reason} == REASONS


@pytest.mark.nightly
def test_what_the_readme_and_the_guides_show_works_in_their_order(
    open_home: Path, tmp_path: Path, work: Path, record_property: pytest.RecordProperty
) -> None:
    """Admins' programs come at the end, in one process, since each takes long to load."""
    shutil.copytree(REPO / "examples", work / "examples")
    with Server(open_home, DSTACKWEB_HOST_NAME="box") as server:
        cli = Cli(server.url, TOKEN, tmp_path / "config", work)
        cli.ok("queue", "night", "--create", "--pause")
        here = dict.fromkeys(ADDRESSES, server.url) | {"/backups": str(tmp_path)}
        managed = []

        def all_have_ended() -> bool:
            runs = server.api("GET", "runs").json()["items"]
            return all(run["status"] in ENDED for run in runs if run["queue"] != "night")

        for part in parts():
            if part.file:
                cli.file(part.text, part.file)
            elif part.reason:
                record_property("not run", f"{part.page}: {part.text.strip()} ({part.reason})")
            for words in [] if part.file or part.reason else part.commands:
                program, *words = [re.sub("|".join(here), lambda found: here[found[0]], word) for word in words]
                if program == "dstackweb-server":
                    managed.append([program, *words])
                    continue
                result = cli(*words, input=f"{TOKEN}\n" if words[0] == "login" else None)
                assert result.exit_code == 0, (part.page, words, result.output)
                if words[0] == "apply" and "night" not in words:
                    eventually(all_have_ended)
        assert "results" in [path.name for path in work.iterdir()]
        subprocess.run([sys.executable, "-c", MANAGE, json.dumps(managed)], cwd=REPO, env=server.env, check=True)
    assert (tmp_path / "dstackweb.tar").stat().st_size > 10_000
