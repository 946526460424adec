"""Sending the samples of the job's GPUs to the API. The newest are kept while it is unreachable."""

from __future__ import annotations

import json
import os
import random
import time
from collections import deque
from typing import Any

from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.log import say

KEPT = 2000
"""Samples kept at most: five and a half hours of one every 10 s."""
AT_ONCE = 50
PIECE = 1 << 16
BACKOFF_CAP_S = 60.0


class Samples:
    """Forwards samples from `gpus.start`'s pipe to the API. Its errors affect nothing else."""

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
