"""Telling the API what the job's GPUs do. Samples wait while it is away, the newest ones."""

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
"""Samples that wait at most: at one every 10 s, those of five and a half hours."""
AT_ONCE = 50
PIECE = 1 << 16
BACKOFF_CAP_S = 60.0


class Samples:
    """What comes from `gpus.start`'s pipe, on its way to the API. Trouble with it is nobody else's."""

    def __init__(self, client: Client, source: int) -> None:
        self._client, self._source = client, source
        self._rest = b""
        self._waiting: deque[bytes] = deque(maxlen=KEPT)
        self._failures = 0
        self._next_try = 0.0
        self._was_refused = False

    def send(self) -> None:
        """Tell what has come since, a part at a time. Never waits for the GPUs."""
        self._take()
        if self._waiting and time.monotonic() >= self._next_try:
            self._send_some()

    def send_last(self) -> None:
        """Tell the rest, unless the API is away: the job's end must not wait for it."""
        self._take()
        while self._waiting and self._send_some():
            continue

    def _send_some(self) -> bool:
        batch = [self._waiting[place] for place in range(min(AT_ONCE, len(self._waiting)))]
        try:
            self._tell([json.loads(line) for line in batch])
        except Unreachable:
            self._failures += 1
            self._next_try = time.monotonic() + random.uniform(0.5, 1) * min(BACKOFF_CAP_S, 2.0**self._failures)
            return False
        except Refused as refused:
            # A server that doesn't take them is no reason to end the job; one that has ended it says so elsewhere.
            if not self._was_refused:
                self._was_refused = True
                say(f"the API does not take samples: {refused}")
        self._failures = 0
        for _ in batch:
            self._waiting.popleft()
        return True

    def _tell(self, samples: list[dict[str, Any]]) -> None:
        """Moments as ages: this machine's clock may show anything."""
        now = time.monotonic()
        aged = [{"age_s": round(max(0.0, now - one["at"]), 3), "gpus": one["gpus"]} for one in samples if one["gpus"]]
        if aged:
            self._client.post("samples", {"samples": aged})

    def _take(self) -> None:
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
            # Who was killed while it wrote one has left a part of it.
            self._waiting.extend(line for line in lines if _is_json(line))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
