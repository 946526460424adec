"""Log bytes of a run to stdout: what is there, or followed until the run ends, through server restarts."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from dstackweb.cli.client import Api
from dstackweb.cli.errors import TryLater, Unreachable
from dstackweb.cli.output import DIM, clean, clock_text, note, paint

ENDED = ("done", "failed", "terminated")
PAGE_FULL = 1 << 16
"""After this many bytes in one answer more are asked for at once."""


@dataclass
class Cursor:
    """Where reading stands. `attempt` None is the newest that was placed; `tail` counts lines and is used up first."""

    node: int = 0
    attempt: int | None = None
    offset: int = 0
    tail: int | None = None
    complete: bool = False

    def query(self) -> dict[str, Any]:
        """The query of the next request."""
        place = {"tail": self.tail} if self.tail is not None else {"offset": self.offset}
        return {"node": self.node, **place, **({"attempt": self.attempt} if self.attempt else {})}


def read(api: Api, run_id: str, cursor: Cursor, write: Callable[[bytes], object]) -> int:
    """One request: write what it brings and move the cursor past each byte written. Returns how many those were."""
    count = 0
    with api.stream(api.in_project("runs", run_id, "logs"), cursor.query()) as response:
        cursor.attempt = cursor.attempt or int(response.headers["X-Attempt"]) or None
        if cursor.tail is not None:
            # Where a tail begins is known only from where it ends, so it is taken whole or not at all.
            data = response.read()
            write(data)
            cursor.tail, cursor.offset, count = None, int(response.headers["X-Next-Offset"]), len(data)
        else:
            for chunk in response.iter_raw():
                write(chunk)
                cursor.offset += len(chunk)
                count += len(chunk)
        cursor.complete = response.headers["X-Log-Complete"] == "true"
    return count


def print_log(api: Api, run_id: str, cursor: Cursor, write: Callable[[bytes], object]) -> int:
    """All bytes that are there now; returns how many."""
    total = 0
    while count := read(api, run_id, cursor, write):
        total += count
        if cursor.complete:
            break
    return total


def to_stdout(data: bytes) -> None:
    """Bytes as they are, at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


class Follower:
    """Follows one node of a run until the run has ended, attempt after attempt, through any silence of the server.

    With `only` it ends with the attempt that the cursor names.
    """

    def __init__(
        self,
        api: Api,
        cursor: Cursor,
        only: bool = False,
        write: Callable[[bytes], object] = to_stdout,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api, self._cursor, self._only, self._out, self._sleep = api, cursor, only, write, sleep
        self._status = StatusLine()
        self._failures = 0

    def follow(self, run: dict[str, Any]) -> dict[str, Any]:
        """Write the log of `run` (as the API gave it) from the cursor on; returns the run as it was at the end."""
        self._turn(run)
        idle = 0.5
        while True:
            try:
                count = self._read(run)
                if not count:
                    # All was read after the run had been seen ended, so nothing can follow.
                    if self._is_over(run):
                        self._status.clear()
                        return run
                    run = self._api.get(self._api.in_project("runs", run["id"]))
                    self._turn(run)
            except (Unreachable, TryLater) as error:
                self._wait_for_server(error)
                continue
            if self._failures:
                self._failures = 0
                note("connected again")
            if count < PAGE_FULL and not self._is_over(run):
                idle = 0.5 if count else min(2.0, idle * 1.25)
                self._sleep(idle)

    def _read(self, run: dict[str, Any]) -> int:
        if not self._only and not self._was_placed(run):
            return 0
        return read(self._api, run["id"], self._cursor, self._write)

    def _write(self, data: bytes) -> None:
        self._status.clear()
        self._out(data)

    def _attempts(self, run: dict[str, Any]) -> list[int]:
        """The attempts in which this node was placed, oldest first."""
        return sorted(job["attempt"] for job in run["jobs"] if job["node"] == self._cursor.node)

    def _was_placed(self, run: dict[str, Any]) -> bool:
        """Whether the attempt that is read has a log: older attempts than a run lists had theirs."""
        listed, attempt = self._attempts(run), self._cursor.attempt
        return attempt in listed or bool(attempt and listed and attempt < listed[0])

    def _later(self, run: dict[str, Any]) -> list[int]:
        return [] if self._only else [number for number in self._attempts(run) if number > (self._cursor.attempt or 0)]

    def _is_over(self, run: dict[str, Any]) -> bool:
        said_all = self._cursor.complete or not self._was_placed(run)
        return said_all and not self._later(run) and (self._only or run["status"] in ENDED)

    def _turn(self, run: dict[str, Any]) -> None:
        """Show why nothing comes yet, and turn to the next attempt once this one has said all."""
        if run["status"] not in ("running", *ENDED):
            self._status.show(status_text(run))
        later = self._later(run)
        if later and self._cursor.attempt is None:
            self._cursor.attempt = later[-1]
        elif later and self._cursor.complete:
            self._cursor = Cursor(node=self._cursor.node, attempt=later[0])
            self._status.clear()
            note(f"attempt {later[0]}")

    def _wait_for_server(self, error: Unreachable | TryLater) -> None:
        if not self._failures:
            self._status.clear()
            note(f"{error.message} The run goes on; trying again …")
        self._failures += 1
        self._sleep(random.uniform(0.1, min(5.0, 0.5 * 2 ** min(self._failures, 5))))


def remark(run: dict[str, Any]) -> str:
    """What there is to say about how a run stands or ended: its message, and its exit code where that isn't in it."""
    message, code = _standing(run) or str(run["status_message"]), run["exit_code"]
    if code and str(code) not in message:
        return f"{message}, exit code {code}" if message else f"exit code {code}"
    return message


def _standing(run: dict[str, Any]) -> str:
    """What a hold does, and when what waits for its time goes on; nothing for other runs, or from an older server."""
    if run.get("held_until"):
        return f"held until {clock_text(run['held_until'])}"
    if run.get("next_at"):
        at = clock_text(run["next_at"])
        if run["status"] == "pending":
            return f"starts at {at}" if run["attempt"] == 1 else f"{run['status_message']}; again at {at}".lstrip("; ")
        return f"{run['status_message']}; comes round at {at}".lstrip("; ")
    return GIVEN_BACK.get(run["termination_reason"], "")


GIVEN_BACK = {"hold_ended": "held for its time, given back", "given_back": "given back before its time"}


def status_text(run: dict[str, Any]) -> str:
    """A run's status in a line: `swift-otter: submitted, position 3, waiting for a GPU`."""
    told = [clean(run["status"])]
    if run.get("position"):
        told.append(f"position {run['position']}")
    if why := run.get("reason_detail") or remark(run):
        told.append(clean(why))
    return f"{clean(run['name'])}: {', '.join(told)}"


class StatusLine:
    """One line on stderr that is rewritten on a terminal, and printed when it changed elsewhere."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        if text == self._shown:
            return
        self._shown = text
        if sys.stderr.isatty():
            fitting = text[: shutil.get_terminal_size().columns - 1]
            typer.echo(f"\r\x1b[K{paint(fitting, DIM, sys.stderr)}", nl=False, err=True)
        else:
            note(text)

    def clear(self) -> None:
        if self._shown and sys.stderr.isatty():
            typer.echo("\r\x1b[K", nl=False, err=True)
        self._shown = ""
