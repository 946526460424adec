"""How often something may be asked, by all processes together: token buckets in rows.

A bucket holds `burst` tokens and gains `rate` a second. A caller takes its token at once, into debt if need be, and
then waits as long as the debt lasts: so callers come one after the other, in the order in which they asked.
"""

from __future__ import annotations

import time

from django.db import transaction

from dstackweb.lib.models import Bucket

SKEW_US = 60_000_000
"""Clocks of two machines differ by less. A bucket farther ahead was written before a clock was put back."""


class Busy(Exception):
    """It would take `wait_s` seconds, which is more than the caller would wait. Nothing was taken."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"{wait_s:.1f} s until it may be asked")
        self.wait_s = wait_s


def spend(tokens: float, at_us: int, rate: float, burst: float, now_us: int) -> tuple[float, int, float]:
    """Take a token of a bucket that had `tokens` at `at_us`: what it has then, when that is, and the seconds to wait.

    `rate` is per second. Time that seems to have run back adds nothing.
    """
    left = room(tokens, at_us, rate, burst, now_us) - 1
    return left, now_us if at_us - now_us > SKEW_US else max(now_us, at_us), max(0.0, -left / rate)


def room(tokens: float, at_us: int, rate: float, burst: float, now_us: int) -> float:
    """The tokens now of a bucket that had `tokens` at `at_us`; below zero it is how many callers wait."""
    since_us = now_us if at_us - now_us > SKEW_US else at_us
    return min(burst, tokens + (max(now_us, since_us) - since_us) * rate / 1e6)


def reserve(name: str, rate: float, burst: float, most_s: float, now_us: int | None = None) -> float:
    """The seconds to wait before asking `name`, which are taken with it. Raises Busy where they are over `most_s`."""
    with transaction.atomic():
        now_us = time.time_ns() // 1000 if now_us is None else now_us
        Bucket.objects.get_or_create(pk=name, defaults={"tokens": burst, "at_us": now_us})
        bucket = Bucket.objects.select_for_update().get(pk=name)
        tokens, at_us, wait_s = spend(bucket.tokens, bucket.at_us, rate, burst, now_us)
        if wait_s > most_s:
            raise Busy(wait_s)
        Bucket.objects.filter(pk=name).update(tokens=tokens, at_us=at_us)
    return wait_s
