"""Samples of the job's GPUs on cloud instances: read in a process of its own, sent to the API by the runner.

Reading a broken GPU may hang for ever: the runner never waits for it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from dstackweb.runner import nvml, tree
from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.state import say

KEPT = 2000
"""Samples kept at most while the API is unreachable: five and a half hours of one every 10 s."""
AT_ONCE = 50
PIECE = 1 << 16
BACKOFF_CAP_S = 60.0


def start(uuids: Sequence[str], every_s: float) -> int:
    """Start reading these GPUs every so many seconds; returns the end of a pipe, which never blocks.

    Each line is JSON with `at`, by the machine's monotonic clock, and `gpus` without those that can't be read. The
    process ends when the pipe's reader does. Call this before `tree.adopt_orphans`.
    """
    source, sink = os.pipe()
    tree.detach(lambda: _keep_watching(uuids, every_s), sink=sink)
    os.close(sink)
    os.set_blocking(source, False)
    return source


def _keep_watching(uuids: Sequence[str], every_s: float) -> None:
    """Sample them, starting again where that fails: out of memory, or in a library that crashes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    logged = False
    while pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            return
        if not logged:
            logged = True
            say(f"the process that samples the GPUs ended with code {code} and is started again")
        time.sleep(every_s)
        # Its last line may be incomplete.
        try:
            _write(b"\n")
        except OSError:
            return
    try:
        _watch(uuids, every_s)
    except Exception as error:
        if not logged:
            say(f"reading the GPUs: {error!r}")
        os._exit(1)


def _watch(uuids: Sequence[str], every_s: float) -> None:
    logged, due = "", time.monotonic()
    while True:
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + every_s, time.monotonic())
        snapshot = nvml.read()
        at = time.monotonic()
        error = snapshot.error if snapshot.library else "no NVML library"
        if error and error != logged:
            logged = error
            say(f"the GPUs can't be read: {error}")
        gpus = [sample.sent() for sample in snapshot.samples if sample.uuid in uuids]
        try:
            # Also without any GPU: only writing shows whether the reader still exists.
            _write(json.dumps({"at": at, "gpus": gpus}).encode() + b"\n")
        except OSError:
            return


def _write(line: bytes) -> None:
    while line:
        line = line[os.write(1, line) :]


class Samples:
    """Forwards samples from the pipe of `start` to the API. Its errors affect nothing else."""

    def __init__(self, client: Client, source: int) -> None:
        self._client, self._source = client, source
        self._rest = b""
        self._waiting: deque[bytes] = deque(maxlen=KEPT)
        self._failures = 0
        self._next_try = 0.0
        self._was_refused = False

    def send(self) -> None:
        """Send a batch of new samples. Never waits for the GPUs."""
        self._read_pipe()
        if self._waiting and time.monotonic() >= self._next_try:
            self._send_some()

    def send_last(self) -> None:
        """Send the rest, unless the API is unreachable: the job's end must not wait for samples."""
        self._read_pipe()
        while self._waiting and self._send_some():
            continue

    def _send_some(self) -> bool:
        batch = [self._waiting[place] for place in range(min(AT_ONCE, len(self._waiting)))]
        try:
            self._post([json.loads(line) for line in batch])
        except Unreachable:
            self._failures += 1
            self._next_try = time.monotonic() + random.uniform(0.5, 1) * min(BACKOFF_CAP_S, 2.0**self._failures)
            return False
        except Refused as refused:
            # Refused samples don't end the job; a server that has ended it says so in other calls.
            if not self._was_refused:
                self._was_refused = True
                say(f"the API refuses samples: {refused}")
        self._failures = 0
        for _ in batch:
            self._waiting.popleft()
        return True

    def _post(self, samples: list[dict[str, Any]]) -> None:
        """Send times as ages: this machine's clock may be wrong."""
        now = time.monotonic()
        aged = [{"age_s": round(max(0.0, now - one["at"]), 3), "gpus": one["gpus"]} for one in samples if one["gpus"]]
        if aged:
            self._client.post("samples", {"samples": aged})

    def _read_pipe(self) -> None:
        while self._source >= 0:
            try:
                data = os.read(self._source, PIECE)
            except BlockingIOError:
                return
            if not data:
                os.close(self._source)
                self._source = -1
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            # A reader that was killed while writing leaves an incomplete line.
            self._waiting.extend(line for line in lines if _is_json(line))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
