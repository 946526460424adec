"""`dstackweb logs`: a run's output, as it is or followed until the run ends, through restarts of the server."""

from __future__ import annotations

import codecs
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from dstackweb.cli import config
from dstackweb.cli.language import N_, _, size_text
from dstackweb.cli.options import RunName, flag
from dstackweb.cli.output import DIM, ENDED, INTERRUPTED, UsageError, clean, note, paint
from dstackweb.cli.runs import status_text
from dstackweb.cli.tables import cut
from dstackweb.lib.text import CONTROLS, ESCAPE, FORMATS, few_accents

PAGE_FULL = 1 << 16
"""After an answer of this many bytes the next request follows at once."""

CUTS = {
    "job_limit": N_("The log was over its limit. {lost} after its last line was not kept."),
    "project_quota": N_("The project's logs had reached their quota. {lost} after its last line was not kept."),
}


def logs(
    run: RunName,
    follow: Annotated[bool, flag("--follow", "-f", help=_("Follow until the run ends."))] = False,
    node: Annotated[int, typer.Option(metavar="N", min=0, help=_("Node of a multi-node run."))] = 0,
    attempt: Annotated[int | None, typer.Option(metavar="N", min=1, help=_("Attempt; the newest by default."))] = None,
    tail: Annotated[int | None, typer.Option(min=0, max=100_000, metavar="N", help=_("Only the last N lines."))] = None,
) -> None:
    """Print a run's output: stdout and stderr together, byte for byte; on a terminal only text and colours."""
    api = config.connect()
    found = api.get(api.in_project("runs", run))
    last = found["spec"]["nodes"] - 1
    if node > last:
        several = _("{name} has no node {node}. Its nodes are 0 to {last}.", name=found["name"], node=node, last=last)
        one = _("{name} has no node {node}. Its only node is 0.", name=found["name"], node=node)
        raise UsageError(several if last else one)
    cursor = Cursor(node=node, attempt=attempt, tail=tail)
    if follow:
        try:
            ended = Follower(api, cursor, only=attempt is not None).follow(found)
        except KeyboardInterrupt:
            note(_("\nStopped following; {name} continues.", name=found["name"]))
            raise typer.Exit(INTERRUPTED) from None
        note(status_text(ended))
    elif print_log(api, found["id"], cursor, to_stdout()) or tail == 0:
        note_missing(cursor)
    else:
        note(_("No output yet. {status}", status=status_text(found)) if not cursor.complete else _("No output."))


@dataclass
class Cursor:
    """How far the log has been read. `attempt` None is the newest that was placed; `tail` (lines) is used up first.

    `missing` counts the bytes of output that the log lacks, and `cut` is why it ends early, until that was shown.
    """

    node: int = 0
    attempt: int | None = None
    offset: int = 0
    tail: int | None = None
    complete: bool = False
    missing: int = 0
    cut: str = ""

    def query(self) -> dict[str, Any]:
        place = {"tail": self.tail} if self.tail is not None else {"offset": self.offset}
        return {"node": self.node, **place, **({"attempt": self.attempt} if self.attempt else {})}


def read(api: config.Api, run_id: str, cursor: Cursor, write: Callable[[bytes], object]) -> int:
    """One request: write its bytes, and move the cursor past each byte written. Returns their number."""
    count = 0
    with api.stream(api.in_project("runs", run_id, "logs"), cursor.query()) as response:
        cursor.attempt = cursor.attempt or int(response.headers["X-Attempt"]) or None
        if cursor.tail is not None:
            # The offset after a tail is known only at its end, so it is read completely before it is written.
            data = response.read()
            write(data)
            cursor.tail, cursor.offset, count = None, int(response.headers["X-Next-Offset"]), len(data)
        else:
            for chunk in response.iter_raw():
                write(chunk)
                cursor.offset += len(chunk)
                count += len(chunk)
        if not cursor.complete:
            cursor.missing = int(response.headers.get("X-Log-Missing", "0"))  # older servers send neither
            cursor.cut = response.headers.get("X-Log-Cut", "")
        cursor.complete = response.headers["X-Log-Complete"] == "true"
    return count


def note_missing(cursor: Cursor, say: Callable[[str], object] = note) -> None:
    """Once all was read, show how much the log lacks."""
    if not cursor.complete:
        return
    if cursor.cut:
        lost = size_text(cursor.missing) if cursor.missing else _("Output")
        say(_(CUTS.get(cursor.cut, CUTS["job_limit"]), lost=lost))
    elif cursor.missing:
        lost = size_text(cursor.missing)
        say(_("The log was over its limit: {lost} of output are missing before its last part.", lost=lost))
    cursor.missing, cursor.cut = 0, ""


def print_log(api: config.Api, run_id: str, cursor: Cursor, write: Callable[[bytes], object]) -> int:
    """Write all bytes that the log has now; returns their number."""
    total = 0
    while count := read(api, run_id, cursor, write):
        total += count
        if cursor.complete:
            break
    return total


class Follower:
    """Follows one node of a run until the run has ended, through all attempts and through outages of the server.

    With `only` it ends with the cursor's attempt.
    """

    def __init__(
        self, api: config.Api, cursor: Cursor, only: bool = False, write: Callable[[bytes], object] | None = None
    ) -> None:
        self._api, self._cursor, self._only, self._out = api, cursor, only, write or to_stdout()
        self._status = StatusLine()

    def follow(self, run: dict[str, Any]) -> dict[str, Any]:
        """Write the log of `run` (an answer of the API) from the cursor on; returns the run as it ended."""
        self._next_attempt(run)
        idle = 0.5
        while True:
            step = partial(self._step, run)
            count, run, is_over = self._api.until_answered(step, _("The run continues."), self._note)
            if is_over:
                self._status.clear()
                return run
            if count < PAGE_FULL and not self._is_over(run):
                idle = 0.5 if count else min(2.0, idle * 1.25)
                self._api.sleep(idle)

    def _step(self, run: dict[str, Any]) -> tuple[int, dict[str, Any], bool]:
        """How many bytes were read, the run (looked up again where there were none), and whether all was read."""
        if count := self._read(run):
            return count, run, False
        # The run had ended before this read, so nothing can follow.
        if self._is_over(run):
            return 0, run, True
        run = self._api.get(self._api.in_project("runs", run["id"]))
        self._next_attempt(run)
        return 0, run, False

    def _read(self, run: dict[str, Any]) -> int:
        if not self._only and not self._was_placed(run):
            return 0
        count = read(self._api, run["id"], self._cursor, self._write)
        note_missing(self._cursor, self._note)
        return count

    def _write(self, data: bytes) -> None:
        self._status.clear()
        self._out(data)

    def _attempts(self, run: dict[str, Any]) -> list[int]:
        """The attempts in which this node was placed, oldest first."""
        return sorted(job["attempt"] for job in run["jobs"] if job["node"] == self._cursor.node)

    def _was_placed(self, run: dict[str, Any]) -> bool:
        """Whether the cursor's attempt has a log; attempts older than those that a run lists have one."""
        listed, attempt = self._attempts(run), self._cursor.attempt
        return attempt in listed or bool(attempt and listed and attempt < listed[0])

    def _later(self, run: dict[str, Any]) -> list[int]:
        return [] if self._only else [number for number in self._attempts(run) if number > (self._cursor.attempt or 0)]

    def _is_over(self, run: dict[str, Any]) -> bool:
        read_all = self._cursor.complete or not self._was_placed(run)
        return read_all and not self._later(run) and (self._only or run["status"] in ENDED)

    def _next_attempt(self, run: dict[str, Any]) -> None:
        """Show why there is no output yet, and go on to the next attempt once this one's log is complete."""
        if run["status"] not in ("running", *ENDED):
            self._status.show(status_text(run))
        later = self._later(run)
        if later and self._cursor.attempt is None:
            self._cursor.attempt = later[-1]
        elif later and self._cursor.complete:
            self._cursor = Cursor(node=self._cursor.node, attempt=later[0])
            self._note(_("Attempt {number}", number=later[0]))

    def _note(self, text: str) -> None:
        self._status.clear()
        note(text)


class StatusLine:
    """A line on stderr: rewritten on a terminal; elsewhere printed each time that it changes."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        if text == self._shown:
            return
        self._shown = text
        if sys.stderr.isatty():
            fitting = cut(text, shutil.get_terminal_size().columns - 1)
            typer.echo(f"\r\x1b[K{paint(clean(fitting), DIM, sys.stderr)}", nl=False, err=True)
        else:
            note(text)

    def clear(self) -> None:
        if self._shown and sys.stderr.isatty():
            typer.echo("\r\x1b[K", nl=False, err=True)
        self._shown = ""


MOST_HELD = 4096
"""An escape sequence of more characters is none."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_BEGUN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\x9c]*\x1b?|[ -/]*)$")
_OTHER = re.compile(f"(?!\r)[{CONTROLS}{FORMATS}]")


class ColoursOnly:
    """Takes the bytes of a log piece by piece.

    Sequences that move the cursor, set titles, write to the clipboard or link are left out, also where one is split
    between pieces. Other characters that can't be seen, or turn the text around them, become U+FFFD.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""

    def __call__(self, data: bytes) -> str:
        text = self._held + self._decode(data)
        begun = _BEGUN.search(text, max(0, len(text) - MOST_HELD))
        self._held = begun[0] if begun else ""
        text = text[: len(text) - len(self._held)]
        parts, end = [], 0
        for found in ESCAPE.finditer(text):
            parts.append(_plain(text[end : found.start()]))
            parts.append(found[0] if _COLOUR.fullmatch(found[0]) else "")
            end = found.end()
        return "".join([*parts, _plain(text[end:])])


def _plain(text: str) -> str:
    return few_accents(_OTHER.sub("\ufffd", text))


def to_stdout() -> Callable[[bytes], object]:
    """What writes a log to stdout: its very bytes, except on a terminal."""
    shown = ColoursOnly() if sys.stdout.isatty() else None

    def write(data: bytes) -> None:
        if shown is None:
            sys.stdout.buffer.write(data)
        else:
            sys.stdout.write(shown(data))
        sys.stdout.flush()

    return write
