"""Send reports in the background: only the newest entry per key is kept, and entries are sent in batches.

Callers use `event`, `count` or `failure`, which take a lock and write a dictionary, without I/O. One daemon thread
sends. An unreachable server costs one warning and bounded memory; further entries are dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from dstackweb.tracking.client import TIMEOUT_S, Entry, Outcome, Pace, SendResult, TasksClient, reporter_name, to_body
from dstackweb.tracking.spool import Spool

log = logging.getLogger("dstackweb.tracking")

INTERVAL_S = 0.5
"""Shortest time between two batches."""
SOON_S = 0.1
"""Delay from the first report after a pause to its batch, which collects the reports that follow."""
BATCH = 1000
"""Entries per request. Halved when the server answers that a request is too large."""
BODY_MAX = 900_000
"""Bytes per request, below the default limits of proxies."""
SPLIT_MIN = 16_384
"""A smaller request that is too large (413) exceeds another limit, and splitting does not help."""
PENDING_MAX = 100_000
"""Most tasks, and most groups, that wait to be sent."""
BACKOFF_BASE_S, BACKOFF_CAP_S = 0.5, 30.0
START_CAP_S = 10.0
"""Longest pause between two questions whether the run, or its next attempt, has started."""
HEARTBEAT_S = 15
"""Longest time between two requests of a process that has reported: so the server knows that it still runs."""
EXIT_S = 5.0
"""Longest time that the end of a program waits for its last batches."""

CountSource = Callable[[], bool]
"""Reports what changed since the last call. Returns False when it need not be called again."""


class Sender:
    """Sends the reports of one reporter to one URL. All methods are thread-safe, and none raises.

    `reporter`: its name, unique per process and start; `spool`: keeps undelivered entries of a process that may be
    terminated at any time; `after_send`: called in the sender's thread after each sending; `post`: replaces HTTP in
    tests. A forked child must create its own sender. Raises ValueError when `url` is not an http or https URL.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        reporter: str | None = None,
        interval_s: float = INTERVAL_S,
        heartbeat_s: int = HEARTBEAT_S,
        post: Callable[[bytes, float], SendResult] | None = None,
        pending_max: int = PENDING_MAX,
        spool: Spool | None = None,
        after_send: Callable[[], None] | None = None,
    ) -> None:
        self.reporter = reporter or reporter_name()
        self.url = url
        self._post = post or TasksClient(url, token)
        self._pace, self._heartbeat_s = Pace(interval_s), heartbeat_s
        self._pending_max, self._batch = pending_max, BATCH
        # Reentrant: a signal handler or the garbage collector may report while its thread reports.
        self.lock = threading.RLock()
        self._seq = 0
        self._pending: dict[str, dict[Any, tuple[Any, ...]]] = {"counts": {}, "failures": {}, "events": {}}
        self._sources: dict[CountSource, None] = {}
        self._sending: list[Entry] = []
        self._dropped = 0
        self._has_sent = False
        self._sent_at = 0.0
        self._awake = False
        self._calls: SimpleQueue[None] = SimpleQueue()  # an Event is not reentrant
        self._hurry = threading.Event()
        self._delivered = threading.Condition()
        self._flushes_requested = self._flushes_done = 0
        self._closing = threading.Event()
        self._deadline = 0.0
        self.stopped = self._all_sent = self._attempt_ended = False
        """Of the first: nothing more is sent, since the attempt has ended or this sender was closed."""
        self._unreachable, self._waiting = False, ""
        self._attempt: int | None = None
        self.attempt_changes = 0
        """How often the run went on to its next attempt, which starts at zero: counts are to be reported again."""
        self._warned_rejected = False
        self._thread: threading.Thread | None = None
        self.spool = spool
        self._after_send = after_send

    def event(
        self,
        key: str,
        state: str,
        prefix: str | None = None,
        group: str | None = None,
        duration_s: float | None = None,
        message: str = "",
    ) -> bool:
        """Report that a task entered a state (a `TaskState` of progress.states, or `done`, `failed`, `running`).

        When prefix and group are None, the server derives them from the key. `duration_s`: how long the task was
        processed. Returns whether the report was accepted for sending.
        """
        accepted = self._add("events", key, (state, prefix, group, duration_s, message))
        if not accepted:
            self._dropped += 1
        return accepted

    def count(
        self, prefix: str, group: str, states: Mapping[str, int], duration_n: int = 0, duration_s: float = 0.0
    ) -> bool:
        """Report the number of a group's tasks in each state now, including `forgotten`.

        `duration_n`, `duration_s`: number of timed tasks so far, and their total seconds. Returns whether the report
        was accepted for sending; if not, report again later: counts are absolute.
        """
        return self._add("counts", (prefix, group), (dict(states), duration_n, duration_s))

    def failure(self, key: str, prefix: str, group: str, message: str) -> bool:
        """Report the failure of a task that `count` counts. Returns whether it was accepted for sending."""
        return self._add("failures", key, (prefix, group, message))

    def _add(self, kind: str, key: Any, values: tuple[Any, ...]) -> bool:
        with self.lock:
            seq, pending = self._next_seq(), self._pending[kind]
            if (key not in pending and len(pending) >= self._pending_max) or self.stopped:
                return False
            pending[key] = values = (seq, *values)
            if self.spool is not None:
                self.spool.write(kind, key, values)
        self._wake_thread()
        return True

    def add_source(self, source: CountSource) -> None:
        """Call `source` before each sending, in the sender's thread, until it returns False."""
        with self.lock:
            self._sources[source] = None
        self._wake_thread()

    @property
    def backlog(self) -> int:
        return sum(map(len, self._pending.values())) + len(self._sending)

    def flush(self, timeout_s: float = EXIT_S) -> bool:
        """Send everything now. Returns whether all was delivered within `timeout_s`."""
        with self._delivered:
            if self.stopped:
                return self._all_sent
            if self._thread is None:
                return not self.backlog
            self._flushes_requested += 1
            mine = self._flushes_requested
            self._hurry.set()
            self._wake()
            return self._delivered.wait_for(lambda: self._flushes_done >= mine, timeout_s) and not self.stopped

    def close(self, timeout_s: float = EXIT_S) -> bool:
        """Send the remaining entries and the end of this reporter, which releases its unfinished tasks.

        Returns whether all was delivered within `timeout_s`. Nothing is sent afterwards.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            self.stopped = True
            return self._all_sent or (thread is None and not self.backlog)
        self._deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._hurry.set()
        self._wake()
        thread.join(timeout_s + 0.1)
        if thread.is_alive() and not self.stopped:
            log.warning("%d tasks or groups were not reported: no response in time", self.backlog)
        self.stopped = True
        return self._all_sent

    def send_for(self, entries: Iterable[Entry], timeout_s: float) -> bool:
        """Send the undelivered entries of a process that has died, and its end, in this thread.

        Returns whether all was delivered within `timeout_s`.
        """
        self._sending += entries
        self._has_sent = True
        self._deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._deliver()
        self._end()
        return self._all_sent or self._attempt_ended

    def _next_seq(self) -> int:
        self._seq = seq = max(self._seq + 1, time.time_ns() // 1000)
        return seq

    def _wake_thread(self) -> None:
        self._wake()
        if self._thread is None:
            self._start()

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
        except RuntimeError as error:  # the interpreter is shutting down, or no thread can be started
            log.debug("cannot report: %s", error)
            self.stopped = True

    def _run(self) -> None:
        next_at, soon_s = 0.0, min(SOON_S, self._pace.least_s)
        try:
            while not self.stopped:
                with contextlib.suppress(Empty):  # a heartbeat is due
                    self._calls.get(timeout=self._heartbeat_s if self._has_sent else None)
                self._hurry.wait(max(soon_s, next_at - time.monotonic()))
                # Clear the flags before reading entries: later reports set them again.
                self._awake = False
                self._hurry.clear()
                flushes, closing = self._flushes_requested, self._closing.is_set()
                self._gather()
                self._deliver()
                self._send_heartbeat()
                if self.spool is not None and not self._sending:
                    self.spool.clear_sent()
                if self._after_send is not None:
                    self._after_send()
                if closing:
                    self._end()
                    return
                next_at = time.monotonic() + self._pace.s
                with self._delivered:
                    self._flushes_done = flushes
                    self._delivered.notify_all()
                if self._sources:
                    self._wake()
        except Exception:  # a bug here must not reach the program that reports
            log.warning("reporting tasks stopped after an error", exc_info=True)
        finally:
            self.stopped = True
            if self.spool is not None and (self._all_sent or self._attempt_ended):
                self.spool.remove()
            self._forget()
            with self._delivered:
                self._flushes_done = self._flushes_requested
                self._delivered.notify_all()

    def _gather(self) -> None:
        """Call the sources, then take all pending entries."""
        with self.lock:
            sources, self._sources = self._sources, {}
        for source in sources:
            if source():
                with self.lock:
                    self._sources[source] = None
        with self.lock:
            if self.spool is not None:
                self.spool.rotate()
            taken, self._pending = self._pending, {kind: {} for kind in self._pending}
        for kind, entries in taken.items():
            self._sending += [(kind, key, values) for key, values in entries.items()]

    def _deliver(self) -> None:
        """Send the gathered entries until none is left, the attempt has ended, or time is up at exit."""
        failed = 0
        while self._sending and not self.stopped:
            size = min(len(self._sending), self._batch)
            body = self._body(self._sending[:size])
            result = (
                SendResult(Outcome.SPLIT) if len(body) > BODY_MAX and size > 1 else self._send_within_deadline(body)
            )
            if result.outcome in (Outcome.RETRY, Outcome.WAIT):
                self._explain_pause(result)
                cap_s = BACKOFF_CAP_S if result.outcome is Outcome.RETRY else START_CAP_S
                if not self._pause(result.wait_s, failed, cap_s):
                    return
                failed += 1
                continue
            failed = 0
            if result.outcome is Outcome.SPLIT and size > 1 and len(body) >= SPLIT_MIN:
                self._batch = size // 2
                continue
            self._settle(result, size)
            del self._sending[:size]

    def _send_heartbeat(self) -> None:
        """Send an empty request if nothing else was sent for long. If it fails, the next one follows as long after."""
        due = time.monotonic() - self._sent_at >= 0.9 * self._heartbeat_s
        if due and self._has_sent and not self.stopped and not self._closing.is_set():
            self._sent_at = time.monotonic()
            result = self._send_within_deadline(self._body([]))
            if result.outcome in (Outcome.ACCEPTED, Outcome.ENDED):
                self._settle(result, 0)

    def _settle(self, result: SendResult, size: int) -> None:
        """Handle a final response to a batch."""
        if result.outcome is Outcome.ENDED:
            with self.lock:
                left = {(kind, key) for kind, key, _ in self._sending}
                left |= {(kind, key) for kind, entries in self._pending.items() for key in entries}
            log.warning("tasks are no longer reported; %d were not counted: %s", len(left), result.detail)
            self.stopped = self._attempt_ended = True
            return
        self._waiting = ""
        if result.outcome is Outcome.ACCEPTED:
            self._has_sent, self._sent_at = True, time.monotonic()
            self._pace.speed_up()
            if result.attempt is not None:
                self.attempt_changes += self._attempt not in (None, result.attempt)
                self._attempt = result.attempt
            self._batch = min(BATCH, self._batch + self._batch // 8 + 1)
            if self._unreachable:
                self._unreachable = False
                log.info("tasks are reported again")
        lost = result.rejected if result.outcome is Outcome.ACCEPTED else size
        if lost and not self._warned_rejected:
            self._warned_rejected = True
            log.warning("%d reported tasks were rejected (%s); this is logged once", lost, result.detail)

    def _explain_pause(self, result: SendResult) -> None:
        """Log once that the run has not started, or that the server is unreachable. 429 is a response."""
        if result.outcome is Outcome.WAIT:
            if not self._waiting:
                log.info("tasks are reported later: %s", result.detail)
            self._waiting = result.detail
        elif result.detail.startswith("429"):
            self._pace.slow_down()
        elif not self._unreachable:
            self._unreachable = True
            log.warning("cannot report tasks to %s, will retry (%s)", self.url, result.detail)

    def _pause(self, retry_after_s: float | None, failed: int, cap_s: float = BACKOFF_CAP_S) -> bool:
        """Wait before the next try. Returns False when the program ends before that.

        A requested wait is up to doubled, so that many reporters do not return at once.
        """
        closing = self._closing.is_set()
        if retry_after_s is None:
            cap_s = 1.0 if closing else cap_s
            wait_s = random.random() * min(cap_s, BACKOFF_BASE_S * 2.0 ** min(failed, 20))
        else:
            wait_s = retry_after_s * (1 + random.random())
        until = time.monotonic() + wait_s
        if not closing and (not self._closing.wait(wait_s) or retry_after_s is None):
            return True
        if until >= self._deadline:
            return False
        time.sleep(max(until - time.monotonic(), 0.0))
        return True

    def _send_within_deadline(self, body: bytes) -> SendResult:
        timeout_s = TIMEOUT_S
        if self._closing.is_set():
            timeout_s = max(0.05, min(TIMEOUT_S, self._deadline - time.monotonic()))
        return self._post(body, timeout_s)

    def _body(self, entries: list[Entry], **more: Any) -> bytes:
        return to_body(entries, reporter=self.reporter, **(more or {"heartbeat_s": self._heartbeat_s}))

    def _end(self) -> None:
        """Report the end of this reporter, if it reported anything, and warn about lost entries."""
        if self._has_sent and not self.stopped and not self._sending:
            with self.lock:
                seq = self._next_seq()
            body = self._body([], seq=seq, ended=True)
            while (result := self._send_within_deadline(body)).outcome is Outcome.RETRY:
                if not self._pause(result.wait_s, 0):
                    return
        lost = self._dropped + self.backlog
        self._all_sent = not lost and not self.stopped
        if lost and not self.stopped:
            log.warning("%d tasks or groups were not reported%s", lost, f": {self._waiting}" if self._waiting else "")

    def _forget(self) -> None:
        with self.lock:
            for pending in self._pending.values():
                pending.clear()
            self._sources.clear()
            self._sending.clear()
