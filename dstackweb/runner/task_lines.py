"""Lines such as `::task key=train-17 state=done` in what the commands write, told to the API.

By a thread of its own, so that neither output nor heartbeats wait for it. Each line's place in the output is its
sequence number: a successor who reads all again tells nothing new.
"""

from __future__ import annotations

import re
import shlex
import threading
import time
from typing import Any

from dstackweb.runner.backoff import backoff
from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.log import say
from dstackweb.runner.shipper import read_masked

LINE = re.compile(rb"^::task(?=[ \t\r\n]|\Z).*", re.MULTILINE)
WORDS = frozenset({"key", "state", "prefix", "group", "message"})
LINE_MAX = 8192
PIECE = 256 * 1024
AT_ONCE = 2000
EVERY_S = 0.5
LAST_S = 10.0
"""How long the job's end waits for what is left to be told."""


class TaskLines:
    """Follows one spool. Trouble with it is nobody else's."""

    def __init__(self, client: Client, spool: str, secrets: list[bytes]) -> None:
        self._client, self._spool, self._secrets = client, spool, secrets
        self._offset = 0
        self._inside_a_line = False
        self._told_any = self._told_bad = False
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._until = float("inf")

    def start(self) -> None:
        """Begin to follow. Not before the last fork: a thread may hold what its copy then waits for."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="task-lines", daemon=True)
            self._thread.start()

    def finish(self, most_s: float = LAST_S) -> None:
        """Tell the rest, now that the output is whole: for so many seconds at most."""
        self._until = time.monotonic() + most_s
        self._ended.set()
        self.start()
        assert self._thread is not None
        self._thread.join(most_s)
        if self._thread.is_alive():
            say(f"task lines from byte {self._offset} of the output on could not be told in {most_s:g} s")

    def _follow(self) -> None:
        try:
            while True:
                final = self._ended.is_set()  # asked first: then all that was written until now is seen
                while self._step(final):
                    continue
                if final:
                    if self._told_any:
                        self._tell({"seq": self._offset + 1, "ended": True})
                    return
                self._ended.wait(EVERY_S)
        except Unreachable as error:
            say(f"the last task lines could not be told: {error}")
        except Refused as refused:
            say(f"the API takes no task lines: {refused}")
        except Exception as error:
            say(f"task lines are not told any more: {type(error).__name__}: {error}")

    def _step(self, final: bool) -> bool:
        """Look through one piece of the output; False when there is nothing more now. Raises as `_tell`."""
        piece = read_masked(self._spool, self._offset, self._secrets, PIECE, final)
        at_the_end = final and len(piece) < PIECE
        whole = len(piece) if at_the_end else piece.rfind(b"\n") + 1
        if not whole and len(piece) < PIECE // 2:
            return False
        lines, length = self._lines(piece, whole or len(piece))
        events = [event for event in (self._event(line, seq) for line, seq in lines) if event]
        if events:
            self._tell({"events": events})
            self._told_any = True
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
            self._say_bad(f"{error}: {line[:200].decode(errors='replace')!r}")
            return None

    def _tell(self, body: dict[str, Any]) -> None:
        """Until the API has it. Raises Refused, and Unreachable when the job's end can't wait for another try."""
        while True:
            try:
                answer = self._client.post("tasks", body)
            except Unreachable as error:
                self._failures += 1
                if not self._pause(max(backoff(self._failures), error.retry_after_s or 0.0)):
                    raise
            else:
                self._failures = 0
                for refused in answer.get("refused", ())[:1]:
                    self._say_bad(f"{refused.get('detail')}: {refused.get('key')!r}")
                return

    def _pause(self, seconds: float) -> bool:
        """Wait before the next try; False when the job's end can't wait for it."""
        again = time.monotonic() + seconds
        self._ended.wait(seconds)
        if again > self._until:
            return False
        time.sleep(max(0.0, again - time.monotonic()))
        return True

    def _say_bad(self, why: str) -> None:
        if not self._told_bad:
            self._told_bad = True
            say(f"a task line is left out, and further ones without a word: {why}")


def parse(line: bytes) -> dict[str, Any]:
    """The event that a line tells. Raises ValueError with what is wrong."""
    if len(line) > LINE_MAX:
        raise ValueError(f"it is longer than {LINE_MAX} bytes")
    event: dict[str, Any] = {}
    for word in shlex.split(line.decode(errors="replace"))[1:]:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is no name=value")
        if name in event or (name == "duration" and "duration_s" in event):
            raise ValueError(f"{name} is there twice")
        if name == "duration":
            event["duration_s"] = _seconds(value)
        elif name in WORDS:
            event[name] = value
        else:
            raise ValueError(f"there is no field {name!r}")
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
        raise ValueError(f"{value!r} is no duration in seconds")
    return seconds
