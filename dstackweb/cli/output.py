"""What commands print: results on stdout, notes and errors on stderr; tables on terminals, plain columns in pipes.

Expected errors are shown in a few lines: what happened, what is safe, what to do.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import IO, Any

import typer

from dstackweb.cli.language import _
from dstackweb.lib.text import few_accents, in_json

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 1
UNREACHABLE = 3


class ChangeInterrupted(KeyboardInterrupt):
    """Ctrl-C during a request that changes something: the change may have been made."""


class CliError(Exception):
    """An expected error: one sentence, `notes` (what is safe, what to do), and the exit code."""

    code = FAILED

    def __init__(self, message: str, *notes: str) -> None:
        super().__init__(message)
        self.message = message
        self.notes = notes


class UsageError(CliError):
    """The command line, or a setting in the environment, is wrong."""

    code = 2


class Unreachable(CliError):
    """No answer from the server: connection refused, timed out or dropped."""

    code = UNREACHABLE


class ApiError(CliError):
    """The server answered with an error. `status` is the HTTP status, `body` the JSON of the answer."""

    def __init__(self, message: str, *notes: str, status: int, body: dict[str, object] | None = None) -> None:
        super().__init__(message, *notes)
        self.status = status
        self.body = body or {}


class TryLater(ApiError):
    """A 5xx or a 429: the same request may succeed later."""


FOR_PROGRAMS = ("--json", "--csv")
"""Forms that are the same in every language."""
OUTAGE = (Unreachable, TryLater)
"""Temporary errors: commands that follow a run continue after them."""

GIVEN: dict[str, str] = {}
"""Of this call: `server` and `project` where these options were given, and `form` (--json, --csv, --quiet, --watch)."""


ACTIVE = ("pending", "submitted", "provisioning", "running", "terminating")
ENDED = ("done", "failed", "terminated")
"""The statuses of runs."""


DIM, RED, YELLOW = "2", "31;1", "33"


def paint(text: str, code: str, stream: IO[str]) -> str:
    """`text` in colour if `stream` is a terminal that shows colours (https://no-color.org)."""
    coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if coloured else text


def clean(value: object) -> str:
    """Text from the server made safe for a terminal: it can't move the cursor or change colours."""
    text = "" if value is None else str(value)
    if not text.isprintable():
        text = "".join(char if char.isprintable() else "\ufffd" for char in text.replace("\n", " "))
    return text if text.isascii() else few_accents(text)


def clean_lines(text: str) -> str:
    """The same for several lines, which may have tabs."""
    return "".join(part if part in ("\n", "\t") else clean(part) for part in re.split("([\n\t])", text))


class Painted(str):
    """Text with colours of our own. All else in it is clean already."""

    __slots__ = ()


def echo(text: str = "", file: IO[str] | None = None) -> None:
    """Print lines: whatever is in a name or a message, it is only text."""
    typer.echo(clean_lines(text), file=file)


def agreed(question: str) -> bool:
    return typer.confirm(clean_lines(question), err=True)


def confirm(question: str, yes: bool, declined: str) -> None:
    """Ask the user at a terminal, unless `yes`. Raises typer.Exit after the note `declined` where the answer is no."""
    if not yes and sys.stdin.isatty() and not agreed(question):
        note(declined)
        raise typer.Exit(FAILED)


def note(text: str) -> None:
    typer.echo(paint(clean_lines(text), DIM, sys.stderr), err=True)


def warn(text: str) -> None:
    warning = _("warning: ")
    typer.echo(f"{paint(warning, YELLOW, sys.stderr)}{clean_lines(text)}", err=True)


def show_error(error: CliError) -> None:
    """The error on stderr: its message, then a line for each note."""
    title = _("error: ")
    typer.echo(f"{paint(title, RED, sys.stderr)}{clean_lines(error.message)}", err=True)
    for line in error.notes:
        typer.echo(f"  {line if isinstance(line, Painted) else clean_lines(line)}", err=True)


def show_json(data: Any) -> None:
    typer.echo("\n".join(map(in_json, json.dumps(data, indent=2, ensure_ascii=False).split("\n"))))


def show_ids(items: Iterable[Mapping[str, Any]], key: str = "id") -> None:
    for item in items:
        echo(clean(item[key]))


def show_answer(answer: Mapping[str, Any], text: str, as_json: bool, quiet: bool = False) -> None:
    """Print the result of a change: a line of text, the API's answer (`--json`), or the ID (`-q`)."""
    if as_json:
        show_json(answer)
    elif quiet:
        show_ids([answer])
    else:
        echo(text)
