"""Telling the server, in the background: what was told is kept by key, the newest only, and sent in batches.

Whoever reports calls `event`, `count` or `failure`: a lock and a dictionary, no I/O. One daemon thread sends. A server
that is away costs one warning and bounded memory; what is then too much is dropped, and its number told once.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any

from dstackweb.tracking.entries import Entry, written
from dstackweb.tracking.journal import Journal
from dstackweb.tracking.post import TIMEOUT_S, Answer, Post, Verdict

log = logging.getLogger("dstackweb.tracking")

INTERVAL_S = 0.5
"""Between two batches at least."""
SOON_S = 0.1
"""From the first thing told after a pause to its batch: what follows meanwhile goes with it."""
BATCH = 1000
"""Entries of a request; halved when the server finds one too large."""
BODY_MAX = 900_000
"""Bytes of a request: what proxies let through as they come."""
SPLIT_MIN = 16_384
"""A request under so many bytes that is called too large is so by what it says: smaller ones would be, too."""
KEPT_MAX = 100_000
"""Tasks, and beside them groups, that wait to be sent."""
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.5, 30.0
EXIT_S = 5.0
"""What the end of a program waits at most for its last batches."""

Source = Callable[[], bool]
"""Tells what changed since the last call; false when it is not to be asked any more."""


def reporter_name() -> str:
    """A name that no other process has: host, process id, and a random part, since both are used again."""
    return f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(4)}"


class Sender:
    """Sends for one reporter to one URL. All methods may be called from any thread; none of them raises.

    `reporter`: its name, unique per process and start; `journal`: where to keep what is not delivered yet, if this
    process may be ended any time; `beside`: called in the sender's thread after each sending; `post` stands in for HTTP
    in tests. A fork's child must make a sender of its own. Raises ValueError when `url` is none of http or https.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        reporter: str | None = None,
        interval_s: float = INTERVAL_S,
        post: Callable[[bytes, float], Answer] | None = None,
        kept_max: int = KEPT_MAX,
        journal: Journal | None = None,
        beside: Callable[[], None] | None = None,
    ) -> None:
        self.reporter = reporter or reporter_name()
        self.url = url
        self._post = post or Post(url, token)
        self._interval_s, self._kept_max, self._batch = interval_s, kept_max, BATCH
        # Reentrant: a signal's handler, or what the garbage collector ends, may report while its thread reports.
        self.lock = threading.RLock()
        self._seq = 0
        self._events: dict[str, tuple[Any, ...]] = {}
        self._counts: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._failures: dict[str, tuple[Any, ...]] = {}
        self._sources: dict[Source, None] = {}
        self._sending: list[Entry] = []
        self._dropped = 0
        self._told_anything = False
        self._awake = False
        self._calls: SimpleQueue[None] = SimpleQueue()  # an Event is not reentrant
        self._hurry = threading.Event()
        self._delivered = threading.Condition()
        self._asked = self._answered = 0
        self._closing = threading.Event()
        self._deadline = 0.0
        self._over = self._complete = self._refused = False
        self._away = False
        self._complained = False
        self._thread: threading.Thread | None = None
        self.journal = journal
        self._beside = beside

    # What reporters call.

    def event(
        self,
        key: str,
        state: str,
        prefix: str | None = None,
        group: str | None = None,
        duration_s: float | None = None,
        message: str = "",
    ) -> bool:
        """A task entered a state (progress.states names them; `done`, `failed` and `running` will do).

        Prefix and group: the server finds them from the key where they are None. `duration_s`: what its processing
        took. Returns whether it was kept for sending.
        """
        with self.lock:
            seq = self._next_seq()
            if (key not in self._events and len(self._events) >= self._kept_max) or self._over:
                self._dropped += 1
                return False
            self._events[key] = told = (state, seq, prefix, group, duration_s, message)
            if self.journal is not None:
                self.journal.write("events", key, told)
        return self._kept()

    def count(
        self, prefix: str, group: str, states: Mapping[str, int], duration_n: int = 0, duration_s: float = 0.0
    ) -> bool:
        """How many tasks of a group there are in each state now, `forgotten` among them, of all this reporter knows.

        `duration_n`, `duration_s`: how many of its tasks were timed so far, and their seconds in all. Returns whether
        it was kept for sending: if not, tell it again later, since counts are absolute.
        """
        with self.lock:
            seq = self._next_seq()
            if ((prefix, group) not in self._counts and len(self._counts) >= self._kept_max) or self._over:
                return False
            self._counts[prefix, group] = told = (dict(states), seq, duration_n, duration_s)
            if self.journal is not None:
                self.journal.write("counts", (prefix, group), told)
        return self._kept()

    def failure(self, key: str, prefix: str, group: str, message: str) -> bool:
        """A task failed that is counted by `count`. Returns whether it was kept for sending."""
        with self.lock:
            seq = self._next_seq()
            if (key not in self._failures and len(self._failures) >= self._kept_max) or self._over:
                return False
            self._failures[key] = told = (prefix, group, seq, message)
            if self.journal is not None:
                self.journal.write("failures", key, told)
        return self._kept()

    def ask(self, source: Source) -> None:
        """Call `source` before each sending, in the sender's thread, until it returns false."""
        with self.lock:
            self._sources[source] = None
        self._kept()

    @property
    def backlog(self) -> int:
        """Entries that wait to be sent: many while the server is slow or away."""
        return len(self._events) + len(self._counts) + len(self._failures) + len(self._sending)

    @property
    def over(self) -> bool:
        """The attempt is over, or this sender was closed: nothing more is sent."""
        return self._over

    def flush(self, timeout_s: float = EXIT_S) -> bool:
        """Send all now; whether all had been delivered within `timeout_s`."""
        with self._delivered:
            if self._over:
                return self._complete
            if self._thread is None:
                return not self.backlog
            self._asked += 1
            mine = self._asked
            self._hurry.set()
            self._wake()
            return self._delivered.wait_for(lambda: self._answered >= mine, timeout_s) and not self._over

    def close(self, timeout_s: float = EXIT_S) -> bool:
        """Send the rest, and that this reporter has ended: what it told of unfinished tasks means released.

        Whether all was delivered within `timeout_s`; nothing is sent after it.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._over = True
            return self._complete or (thread is None and not self.backlog)
        self._deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._hurry.set()
        self._wake()
        thread.join(timeout_s + 0.1)
        if thread.is_alive() and not self._over:
            log.warning("%d tasks or groups were not reported: no answer in time", self.backlog)
        self._over = True
        return self._complete

    def tell_for(self, entries: Iterable[Entry], timeout_s: float) -> bool:
        """In the name of a process that has died: tell what it had not delivered, and its end, in this thread.

        Whether all was delivered within `timeout_s`.
        """
        self._sending += entries
        self._told_anything = True
        self._deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._deliver()
        self._end()
        return self._complete or self._refused

    # What they need, with the lock held or without.

    def _next_seq(self) -> int:
        self._seq = seq = max(self._seq + 1, time.time_ns() // 1000)
        return seq

    def _kept(self) -> bool:
        self._wake()
        if self._thread is None:
            self._start()
        return True

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._calls.put(None)

    def _start(self) -> None:
        with self.lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="dstackweb-tracking", daemon=True)
            self._thread = thread
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is ending, or the machine has no room for a thread
            log.debug("cannot report: %s", error)
            self._over = True

    # The thread.

    def _run(self) -> None:
        next_at, soon_s = 0.0, min(SOON_S, self._interval_s)
        try:
            while not self._over:
                self._calls.get()
                self._hurry.wait(max(soon_s, next_at - time.monotonic()))
                # First the flags, then what is there: who tells something afterwards sets them again.
                self._awake = False
                self._hurry.clear()
                asked, closing = self._asked, self._closing.is_set()
                self._gather()
                self._deliver()
                if self.journal is not None and not self._sending:
                    self.journal.delivered()
                if self._beside is not None:
                    self._beside()
                if closing:
                    self._end()
                    return
                next_at = time.monotonic() + self._interval_s
                with self._delivered:
                    self._answered = asked
                    self._delivered.notify_all()
                if self._sources:
                    self._wake()
        except Exception:  # a bug here must not reach the program that reports
            log.warning("reporting tasks ended by an error", exc_info=True)
        finally:
            self._over = True
            if self.journal is not None and (self._complete or self._refused):
                self.journal.remove()
            self._forget()
            with self._delivered:
                self._answered = self._asked
                self._delivered.notify_all()

    def _gather(self) -> None:
        """Ask the sources, and take all that is kept."""
        with self.lock:
            sources, self._sources = self._sources, {}
        for source in sources:
            if source():
                with self.lock:
                    self._sources[source] = None
        self._take()

    def _take(self) -> None:
        with self.lock:
            if self.journal is not None:
                self.journal.turn()
            events, self._events = self._events, {}
            groups, self._counts = self._counts, {}
            failures, self._failures = self._failures, {}
        self._sending += [("counts", key, told) for key, told in groups.items()]
        self._sending += [("failures", key, told) for key, told in failures.items()]
        self._sending += [("events", key, told) for key, told in events.items()]

    def _deliver(self) -> None:
        """Send what was gathered, until nothing is left, the attempt is over, or there is no time at the exit."""
        failed = 0
        while self._sending and not self._over:
            size = min(len(self._sending), self._batch)
            body = self._body(self._sending[:size])
            answer = Answer(Verdict.SPLIT) if len(body) > BODY_MAX and size > 1 else self._ask(body)
            if answer.verdict is Verdict.LATER:
                self._complain(answer.detail)
                if not self._pause(answer.wait_s, failed):
                    return
                failed += 1
                continue
            failed = 0
            if answer.verdict is Verdict.SPLIT and size > 1 and len(body) >= SPLIT_MIN:
                self._batch = size // 2
                continue
            self._settle(answer, size)
            del self._sending[:size]

    def _settle(self, answer: Answer, size: int) -> None:
        """What the server said for good of a batch."""
        if answer.verdict is Verdict.OVER:
            log.info("nothing more is reported: %s", answer.detail)
            self._over = self._refused = True
            return
        if answer.verdict is Verdict.TAKEN:
            self._told_anything = True
            self._batch = min(BATCH, self._batch + self._batch // 8 + 1)
            if self._away:
                self._away = False
                log.info("tasks are reported again")
        lost = answer.refused if answer.verdict is Verdict.TAKEN else size
        if lost and not self._complained:
            self._complained = True
            log.warning("%d of the tasks reported were not taken (%s); told once", lost, answer.detail)

    def _complain(self, detail: str) -> None:
        """One warning while the server is away; 429 is not away."""
        if not self._away and not detail.startswith("429"):
            self._away = True
            log.warning("tasks cannot be reported to %s now (%s); the work goes on", self.url, detail)

    def _pause(self, asked_s: float | None, failed: int) -> bool:
        """Wait before the next try, as long as the server asked for; false when the program ends before that."""
        closing = self._closing.is_set()
        wait_s = asked_s
        if wait_s is None:
            cap_s = 1.0 if closing else BACKOFF_CAP_S
            wait_s = random.random() * min(cap_s, BACKOFF_BASE_S * 2.0 ** min(failed, 20))
        until = time.monotonic() + wait_s
        if not closing and (not self._closing.wait(wait_s) or asked_s is None):
            return True
        if until >= self._deadline:
            return False
        time.sleep(max(until - time.monotonic(), 0.0))
        return True

    def _ask(self, body: bytes) -> Answer:
        timeout_s = TIMEOUT_S
        if self._closing.is_set():
            timeout_s = max(0.05, min(TIMEOUT_S, self._deadline - time.monotonic()))
        return self._post(body, timeout_s)

    def _body(self, entries: list[Entry], **more: Any) -> bytes:
        body: dict[str, Any] = {"reporter": self.reporter, **more}
        for kind, key, told in entries:
            body.setdefault(kind, []).append(written(kind, key, told))
        return json.dumps(body, separators=(",", ":")).encode()

    def _end(self) -> None:
        """Say that this reporter has ended, if it ever said anything, and what it could not say."""
        if self._told_anything and not self._over and not self._sending:
            with self.lock:
                seq = self._next_seq()
            body = self._body([], seq=seq, ended=True)
            while (answer := self._ask(body)).verdict is Verdict.LATER:
                if not self._pause(answer.wait_s, 0):
                    return
        lost = self._dropped + self.backlog
        self._complete = not lost and not self._over
        if lost and not self._over:
            log.warning("%d tasks or groups were not reported", lost)

    def _forget(self) -> None:
        with self.lock:
            for kept in (self._events, self._counts, self._failures, self._sources, self._sending):
                kept.clear()
