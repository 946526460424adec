from __future__ import annotations

import threading

import pytest
from django.db import connections
from hypothesis import given, strategies as st

from dstackweb.lib.models import Bucket, Busy, spend

NOW_US = 1_800_000_000_000_000


@given(
    rate=st.floats(0.1, 100), burst=st.integers(1, 20), gaps_us=st.lists(st.integers(0, 3_000_000), max_size=60)
)  # fmt: skip
def test_no_interval_exceeds_the_burst_and_the_rate(rate: float, burst: int, gaps_us: list[int]) -> None:
    tokens, at_us, now_us = float(burst), NOW_US, NOW_US
    asked_at: list[float] = []
    for gap_us in gaps_us:
        now_us += gap_us
        tokens, at_us, wait_s = spend(tokens, at_us, rate, burst, now_us)
        asked_at.append(now_us / 1e6 + wait_s)
    assert asked_at == sorted(asked_at)
    for first in range(len(asked_at)):
        for last in range(first, len(asked_at)):
            allowed = burst + (asked_at[last] - asked_at[first]) * rate
            assert last - first + 1 <= allowed + 1 + 1e-3


def test_unused_tokens_are_saved_up_to_the_burst() -> None:
    assert spend(0, NOW_US, 1, 5, NOW_US + 3_600_000_000)[0] == 4


def test_a_clock_that_was_set_back_adds_no_tokens() -> None:
    _, at_us, wait_s = spend(-1, NOW_US + 3_600_000_000, 1, 5, NOW_US)
    assert (at_us, wait_s) == (NOW_US, 2)


def test_a_clock_that_is_a_little_slow_adds_nothing() -> None:
    tokens, at_us, _ = spend(3, NOW_US + 1_000_000, 1, 5, NOW_US)
    assert (tokens, at_us) == (2, NOW_US + 1_000_000)


@pytest.mark.django_db
def test_callers_queue_up_and_one_that_would_wait_too_long_takes_no_token() -> None:
    waits = [Bucket.reserve("api", 2, 3, 1.0, NOW_US) for _ in range(5)]
    assert waits == [0, 0, 0, 0.5, 1.0]
    with pytest.raises(Busy) as busy:
        Bucket.reserve("api", 2, 3, 1.0, NOW_US)
    assert busy.value.wait_s == 1.5
    assert Bucket.reserve("api", 2, 3, 1.0, NOW_US + 500_000) == 1.0
    assert Bucket.reserve("other", 2, 3, 1.0, NOW_US) == 0


@pytest.mark.django_db(transaction=True)
def test_no_token_is_given_twice() -> None:
    waits: list[float] = []

    def ask() -> None:
        for _ in range(5):
            waits.append(Bucket.reserve("api", 1, 1, 1e6, NOW_US))
        connections.close_all()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == list(range(40))
    assert Bucket.objects.get().tokens == -39
