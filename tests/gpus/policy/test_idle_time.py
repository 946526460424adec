"""A policy against time as it passes: what a GPU did, seen through samples that a worker judges now and then."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given, strategies as st

from dstackweb.gpus.window import NOTHING, VerdictKind, Window, fold, judge
from tests.support import examples

EVERY = 10_000
TICK = 2_000
"""The worker's, in milliseconds."""
STEP = 500
"""What a GPU did is looked at so finely."""
LOOKS_BACK = 10_000
"""A driver's mean of a GPU's utilization."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that is busy in these spans; a driver without a memory reports its newest moment instead of a mean."""

    busy: list[tuple[int, int]]
    is_mean: bool = True

    def utilization(self, at: int) -> int:
        if not self.is_mean:
            return 100 * any(begin < at <= end for begin, end in self.busy)
        covered = sum(max(0, min(at, end) - max(at - LOOKS_BACK, begin)) for begin, end in self.busy)
        return round(100 * covered / LOOKS_BACK)


@dataclass(frozen=True)
class Stopped:
    """When the run was stopped, and when the newest sample before that was taken."""

    at: int
    sampled_at: int


def watch(gpu: Gpu, minimum: int, window: Window, until: int, offset: int, delays: list[int]) -> Stopped | None:
    """Samples are taken every interval from `offset` on, and dated on arrival: so much later, one after the other."""
    stretch, number = NOTHING, 0
    for now in range(0, until, TICK):
        while (taken := offset + number * EVERY) + (delay := delays[number % len(delays)]) <= now:
            stretch = fold(stretch, taken + delay, gpu.utilization(taken), minimum, EVERY)
            number += 1
        if judge(window, [stretch], now, EVERY).kind == VerdictKind.STOP:
            return Stopped(now, offset + (number - 1) * EVERY)
    return None


OFFSETS = st.integers(0, EVERY - 1)
DELAYS = st.lists(st.integers(0, 900), min_size=1, max_size=8)
MINIMUMS = st.integers(1, 100)
WINDOWS = st.sampled_from([60_000, 90_000, 300_000])


@examples(300)
@given(st.integers(0, 200_000), MINIMUMS, WINDOWS, OFFSETS, DELAYS, st.booleans())
@example(22_500, 50, 60_000, 7_200, [0], True)
@example(22_500, 50, 60_000, 2_500, [900, 0], False)
def test_a_gpu_that_stops_computing_stops_its_run_a_window_later_and_at_most_an_interval_after_that(
    busy_until: int, minimum: int, window_ms: int, offset: int, delays: list[int], is_mean: bool
) -> None:
    gpu, window = Gpu([(-EVERY, busy_until)], is_mean), Window(window_ms, "any", -EVERY)
    stopped = watch(gpu, minimum, window, busy_until + window_ms + 10 * EVERY, offset, delays)
    assert stopped is not None
    assert stopped.at >= busy_until + window_ms
    # A mean falls below the minimum while the time in which it was busy leaves the driver's memory.
    falls_ms = LOOKS_BACK - (minimum - 1) * LOOKS_BACK // 100 if is_mean else 0
    assert stopped.at <= busy_until + falls_ms + EVERY + window_ms + max(delays) + TICK


@examples(300)
@given(
    st.lists(st.tuples(st.integers(2 * EVERY, 80_000), st.integers(0, 200_000)), min_size=1, max_size=6),
    MINIMUMS,
    WINDOWS,
    OFFSETS,
    DELAYS,
    st.booleans(),
)
def test_no_run_stops_before_its_gpu_was_low_for_the_whole_window(
    phases: list[tuple[int, int]], minimum: int, window_ms: int, offset: int, delays: list[int], is_mean: bool
) -> None:
    """Whatever it does between, but for uses so short that no sample shows them."""
    at, busy = 0, []
    for busy_ms, idle_ms in phases:
        busy.append((at, at + busy_ms))
        at += busy_ms + idle_ms
    gpu = Gpu(busy, is_mean)
    stopped = watch(gpu, minimum, Window(window_ms, "any", 0), at + 2 * window_ms, offset, delays)
    if stopped is None:
        return
    late = max(delays) - min(delays)
    low_from = stopped.sampled_at - window_ms + late
    assert all(gpu.utilization(moment) < minimum for moment in range(low_from, stopped.sampled_at, STEP))


@pytest.mark.parametrize(("offset", "stops_at"), [(7_200, 88_000), (2_500, 94_000), (5_000, 86_000)])
def test_the_reported_case_stops_a_minute_after_the_gpu_became_idle(offset: int, stops_at: int) -> None:
    """Busy until 22.5 s: it was stopped after 54.7 s of idleness."""
    stopped = watch(Gpu([(-EVERY, 22_500)], is_mean=False), 50, Window(60_000, "any", -EVERY), 200_000, offset, [0])
    assert stopped is not None
    assert stopped.at == stops_at
