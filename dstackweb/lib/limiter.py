"""Rate limits shared by all processes: token buckets as rows.

A bucket holds up to `burst` tokens and gains `rate` per second. A caller takes a token at once, into debt if the bucket
is empty, and waits until the debt is paid: callers proceed one by one in the order of their requests.
"""

from __future__ import annotations

import time

from django.db import transaction

from dstackweb.lib.models import Bucket

SKEW_US = 60_000_000
"""Clocks differ by less than this. A bucket further in the future was written before a clock was set back."""


class Busy(Exception):
    """The wait of `wait_s` seconds exceeds the caller's limit. No token was taken."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"rate limit: {wait_s:.1f} s to wait")
        self.wait_s = wait_s


def spend(tokens: float, at_us: int, rate: float, burst: float, now_us: int) -> tuple[float, int, float]:
    """Take a token from a bucket that had `tokens` at `at_us`: its new tokens, their time, and the seconds to wait.

    `rate` is per second. A clock that was set back adds no tokens.
    """
    left = room(tokens, at_us, rate, burst, now_us) - 1
    return left, now_us if at_us - now_us > SKEW_US else max(now_us, at_us), max(0.0, -left / rate)


def room(tokens: float, at_us: int, rate: float, burst: float, now_us: int) -> float:
    """The current tokens of a bucket that had `tokens` at `at_us`; a negative number is how many callers wait."""
    since_us = now_us if at_us - now_us > SKEW_US else at_us
    return min(burst, tokens + (max(now_us, since_us) - since_us) * rate / 1e6)


def reserve(name: str, rate: float, burst: float, most_s: float, now_us: int | None = None) -> float:
    """Take a token of `name`; returns the seconds to wait. Raises Busy if they exceed `most_s`."""
    with transaction.atomic():
        now_us = time.time_ns() // 1000 if now_us is None else now_us
        Bucket.objects.get_or_create(pk=name, defaults={"tokens": burst, "at_us": now_us})
        bucket = Bucket.objects.select_for_update().get(pk=name)
        tokens, at_us, wait_s = spend(bucket.tokens, bucket.at_us, rate, burst, now_us)
        if wait_s > most_s:
            raise Busy(wait_s)
        Bucket.objects.filter(pk=name).update(tokens=tokens, at_us=at_us)
    return wait_s
