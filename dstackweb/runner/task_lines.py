"""Sends lines such as `::task key=train-17 state=done` in the job's output to the API as task events.

In its own thread, so that neither output nor heartbeats wait for it. A line's offset in the output is its sequence
number: if a later runner sends all lines again, nothing counts twice.
"""

from __future__ import annotations

import random
import re
import shlex
import threading
import time
from typing import Any

from dstackweb.runner.client import Client, Refused, Unreachable, backoff
from dstackweb.runner.masking import Masker
from dstackweb.runner.spool import read_masked
from dstackweb.runner.state import say

LINE = re.compile(rb"^::task(?=[ \t\r\n]|\Z).*", re.MULTILINE)
WORDS = frozenset({"key", "state", "prefix", "group", "message"})
LINE_MAX = 8192
PIECE = 256 * 1024
AT_ONCE = 2000
EVERY_S = 0.5
LAST_S = 10.0
"""How long the job's end waits for the remaining lines."""


class TaskLines:
    """Follows one spool. Its errors affect nothing else."""

    def __init__(self, client: Client, spool: str, masker: Masker) -> None:
        self._client, self._spool, self._masker = client, spool, masker
        self._offset = 0
        self._inside_a_line = False
        self._sent_any = self._logged_invalid = False
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._until = float("inf")

    def start(self) -> None:
        """Start to follow. Not before the last fork: a thread may hold a lock that a forked copy then waits for."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="task-lines", daemon=True)
            self._thread.start()

    def finish(self, most_s: float = LAST_S) -> None:
        """Send the rest, now that the output is complete, for at most so many seconds."""
        self._until = time.monotonic() + most_s
        self._ended.set()
        self.start()
        assert self._thread is not None
        self._thread.join(most_s)
        if self._thread.is_alive():
            say(f"task lines from byte {self._offset} of the output on could not be sent in {most_s:g} s")

    def _follow(self) -> None:
        try:
            while True:
                final = self._ended.is_set()  # read first: then everything written until now is processed
                while self._step(final):
                    continue
                if final:
                    if self._sent_any:
                        self._post({"seq": self._offset + 1, "ended": True})
                    return
                self._ended.wait(EVERY_S)
        except Unreachable as error:
            say(f"the last task lines could not be sent: {error}")
        except Refused as refused:
            say(f"the API refuses task lines: {refused}")
        except Exception as error:
            say(f"task lines are no longer sent: {type(error).__name__}: {error}")

    def _step(self, final: bool) -> bool:
        """Process one piece of the output; False when there is nothing more now. Raises as `_post`."""
        piece = read_masked(self._spool, self._offset, self._masker, PIECE, final)
        at_the_end = final and len(piece) < PIECE
        whole = len(piece) if at_the_end else piece.rfind(b"\n") + 1
        if not whole and len(piece) < PIECE // 2:
            return False
        lines, length = self._lines(piece, whole or len(piece))
        events = [event for event in (self._event(line, seq) for line, seq in lines) if event]
        if events:
            self._post({"events": events})
            self._sent_any = True
        self._inside_a_line = not piece.endswith(b"\n", 0, length)
        self._offset += length
        return length > 0

    def _lines(self, piece: bytes, length: int) -> tuple[list[tuple[bytes, int]], int]:
        """The task lines in the piece's first `length` bytes, with their sequence numbers, and how far they reach."""
        found: list[tuple[bytes, int]] = []
        if b"::task" not in piece:
            return found, length
        for match in LINE.finditer(piece, 0, length):
            if match.start() == 0 and self._inside_a_line:
                continue
            if len(found) == AT_ONCE:
                return found, match.start()
            found.append((match.group(), self._offset + match.start() + 1))
        return found, length

    def _event(self, line: bytes, seq: int) -> dict[str, Any] | None:
        try:
            return {**parse(line), "seq": seq}
        except ValueError as error:
            self._log_invalid(f"{error}: {line[:200].decode(errors='replace')!r}")
            return None

    def _post(self, body: dict[str, Any]) -> None:
        """Send until the API has it. Raises Refused, and Unreachable if the job's end can't wait for another try."""
        while True:
            try:
                answer = self._client.post("tasks", body)
            except Unreachable as error:
                self._failures += 1
                asked_s = (error.retry_after_s or 0.0) * (1 + random.random())  # not with all others at one moment
                if not self._pause(max(backoff(self._failures), asked_s)):
                    raise
            else:
                self._failures = 0
                for refused in answer.get("refused", ())[:1]:
                    self._log_invalid(f"{refused.get('detail')}: {refused.get('key')!r}")
                return

    def _pause(self, seconds: float) -> bool:
        """Wait before the next try; False if the job's end can't wait for it."""
        again = time.monotonic() + seconds
        self._ended.wait(seconds)
        if again > self._until:
            return False
        time.sleep(max(0.0, again - time.monotonic()))
        return True

    def _log_invalid(self, why: str) -> None:
        if not self._logged_invalid:
            self._logged_invalid = True
            say(f"ignoring an invalid task line (later ones are not logged): {why}")


def parse(line: bytes) -> dict[str, Any]:
    """The event of a line. Raises ValueError with what is wrong."""
    if len(line) > LINE_MAX:
        raise ValueError(f"longer than {LINE_MAX} bytes")
    event: dict[str, Any] = {}
    for word in shlex.split(line.decode(errors="replace"))[1:]:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is not name=value")
        if name in event or (name == "duration" and "duration_s" in event):
            raise ValueError(f"{name} is given twice")
        if name == "duration":
            event["duration_s"] = _seconds(value)
        elif name in WORDS:
            event[name] = value
        else:
            raise ValueError(f"unknown field {name!r}")
    for name in ("key", "state"):
        if not event.get(name):
            raise ValueError(f"{name} is missing")
    return event


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{value!r} is not a duration in seconds")
    return seconds
