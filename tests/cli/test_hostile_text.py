"""Whatever the server's data has in it, on a terminal it is text: it moves nothing, hides nothing, turns nothing."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import Any

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.cli.client import Api
from dstackweb.cli.logs import ColoursOnly, to_stdout
from dstackweb.cli.output import ApiError, clean_lines, echo, note, show_error, show_json, warn
from dstackweb.cli.tables import Column, Rows, show_view
from dstackweb.lib.text import CONTROLS, FORMATS, MARKS
from dstackweb.runs import attempts
from tests.cli.conftest import Cli
from tests.factories import make_host, make_run, place_all, placed_job, start

HOSTILE = (
    "\x1b[31m\x1b[2J\x1b]0;title\x07\x1b]52;c;aGk=\x1b\\\x1b]8;;http://evil\x1b\\\x9b1A\x00\x08\r"
    "\u202eright\u2066\u2028\u200b\ufeffe" + "\u0301" * 50
)
HIDDEN = re.compile(f"[{CONTROLS}{FORMATS}]|[{MARKS}]{{5}}")
"""Without line ends and tabs."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CHOSEN = {
    "name", "username", "user", "message", "detail", "reason_detail", "status_message", "host", "prefix", "key",
    "group", "text", "error", "labels", "note", "region", "instance_type", "command", "commands", "actor", "value",
}  # fmt: skip
"""Texts in answers of the API that people, programs or clouds chose."""


def spoil(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: spoil(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [spoil(inner, key) for inner in value]
    return value + HOSTILE if isinstance(value, str) and key in CHOSEN else value


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch, project: Project, ada: User) -> None:
    """The server's answers about a run that waits, one that runs and one that failed."""
    make_host("box-1")
    for name in ("running", "failed"):
        run = make_run(project, ada, name)
        place_all()
        job = start(placed_job(run))
        if name == "failed":
            attempts.end_job(job.pk, "container_exited_with_error", exit_code=1, message="no")
    make_run(project, ada, "waiting", resources={"cpu": 500})
    answered = Api.json
    monkeypatch.setattr(Api, "json", lambda self, response: spoil(answered(self, response)))


COMMANDS = (
    "ps", "ps --all", "queue", "queue --history", "progress", "progress running", "metrics running", "offers", "quotas",
    "projects", "host list", "logs running", "hold list", "history", "what-if", "priority waiting 60", "show running",
    "show failed", "diff running failed", "usage", "servers list",
    "move waiting top --yes", "stop waiting", "delete failed",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.django_db
@pytest.mark.usefixtures("hostile")
def test_no_command_prints_what_is_not_text(cli: Cli) -> None:
    for command in COMMANDS:
        for more in ((), ("--json",)):
            result = cli(*command.split(), *more)
            assert HIDDEN.findall((result.stdout + result.stderr).replace("\n", "")) == [], command


def test_all_that_prints_makes_it_text(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (echo, note, warn, clean_lines):
        show(f"a\tb\n{HOSTILE}")
    show_error(ApiError(HOSTILE, HOSTILE, status=409))
    show_view([Rows([Column(HOSTILE)], [[HOSTILE]])])
    show_json({HOSTILE: [HOSTILE, "\U000e0041"]})
    out, err = capsys.readouterr()
    assert HIDDEN.findall(out + err) == []
    assert json.loads(out[out.index("{") :]) == {HOSTILE: [HOSTILE, "\U000e0041"]}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_on_a_terminal_has_no_colours_but_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    title = f"[link=http://evil]{HOSTILE}[/link]"  # two runs that are compared have their names above their columns
    show_view([Rows([Column(title, wide=True)], [[HOSTILE]])], terminal)
    assert HIDDEN.findall(COLOUR.sub("", terminal.getvalue())) == []
    assert "\x1b[31m" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (b"\x1b[31mred\x1b[0m \x1b[38:2:1:2:3mx", "\x1b[31mred\x1b[0m \x1b[38:2:1:2:3mx"),
        (b"10%\r20%\r\n\tend", "10%\r20%\r\n\tend"),
        (b"a\x1b[2Jb\x1b[1;1Hc\x1b[?25ld\x1bce\x1b(0f\x1b[3Ag", "abcdefg"),
        (b"a\x1b]0;title\x07b\x1b]52;c;aGk=\x1b\\c\x1b]8;;http://x\x1b\\d\x1bPq\x1b\\e", "abcde"),
        (b"a\x00b\x08c\xc2\x9b1Ad\x07\xff", "a\ufffdb\ufffdc\ufffd1Ad\ufffd\ufffd"),
        ("\u202ea\u2066b\u200bc 👩\u200d💻 ñ".encode(), "\ufffda\ufffdb\ufffdc 👩\u200d💻 ñ"),
        (("e" + "\u0301" * 50).encode(), "e" + "\u0301" * 4 + "…"),
    ],
)
def test_a_terminal_gets_the_text_and_the_colours_of_a_log(log: bytes, shown: str) -> None:
    assert ColoursOnly()(log + b".") == shown + "."
    if "…" not in shown:
        piece = ColoursOnly()
        assert "".join(piece(bytes([byte])) for byte in log + b".") == shown + "."


def test_a_sequence_that_never_ends_does_not_hold_the_log() -> None:
    shown = ColoursOnly()
    shown(b"\x1b]0;" + b"x" * 10_000)
    assert shown(b"\nand on") == "\nand on"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_pipe_gets_the_very_bytes(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    class Stream(io.TextIOWrapper):
        def isatty(self) -> bool:
            return is_terminal

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", Stream(written, encoding="utf-8"))
    to_stdout()(b"\xff\x1b[2Jx")
    assert written.getvalue() == ("\ufffdx".encode() if is_terminal else b"\xff\x1b[2Jx")
