"""A policy that is tried on samples says what a plain reading of its definition says."""

from __future__ import annotations

from itertools import pairwise
from operator import itemgetter
from typing import Literal

import pytest
from hypothesis import given, strategies as st

from dstackweb.gpus.savings import Stop, first_stop
from dstackweb.gpus.window import JITTER, MAX_GAP, VerdictKind, Window, judge, replay

EVERY = 10
"""Milliseconds between samples: small numbers read better."""
Samples = list[tuple[int, int]]


def plain(*used: int | None, start: int = 0) -> Samples:
    return [(start + EVERY * number, value) for number, value in enumerate(used) if value is not None]


def low_stretch(samples: Samples, minimum: int, now: int) -> tuple[int, int] | None:
    """The first and the last of a GPU's samples up to now that were all low, without a gap."""
    seen = [(at, used) for at, used in samples if at <= now]
    if not seen or now - seen[-1][0] > MAX_GAP * EVERY:
        return None
    starts = [
        first
        for first in range(len(seen))
        if all(used < minimum for _at, used in seen[first:])
        and all(after - before <= MAX_GAP * EVERY for (before, _), (after, _) in pairwise(seen[first:]))
    ]
    return (seen[min(starts)][0], seen[-1][0]) if starts else None


def brute(gpus: list[Samples], minimum: int, window: Window) -> Stop | None:
    for now in sorted({at for samples in gpus for at, _used in samples}):
        low = [(*found, place) for place, samples in enumerate(gpus) if (found := low_stretch(samples, minimum, now))]
        if window.scope == "all":
            whole = len(low) == len(gpus)
            low = [(max(first for first, *_ in low), min(last for _, last, _ in low), -1)] if whole else []
        for first, last, place in sorted(low, key=itemgetter(0, 2)):
            end = max(first, window.from_ms) + window.window_ms
            if end <= now and last >= end - JITTER * EVERY:
                return Stop(now, first, None if place < 0 else place)
    return None


SERIES = st.lists(
    st.tuples(st.sampled_from([1, 7, 10, 10, 10, 10, 13, 30, 31, 60]), st.sampled_from([0, 5, 10, 50, 100])),
    max_size=25,
)
SCOPES: list[Literal["any", "all"]] = ["any", "all"]


def as_samples(steps: list[tuple[int, int]]) -> Samples:
    at, made = 0, []
    for step, used in steps:
        at += step
        made.append((at, used))
    return made


@given(
    st.lists(SERIES, min_size=1, max_size=3),
    st.sampled_from([0, 1, 10, 50, 100]),
    st.sampled_from(SCOPES),
    st.integers(10, 120),
    st.integers(0, 100),
)
def test_it_stops_when_and_where_a_plain_reading_of_the_samples_does(
    steps: list[list[tuple[int, int]]], minimum: int, scope: Literal["any", "all"], window_ms: int, from_ms: int
) -> None:
    gpus, window = [as_samples(series) for series in steps], Window(window_ms, scope, from_ms)
    assert first_stop(gpus, minimum, window, EVERY) == brute(gpus, minimum, window)


@given(SERIES, st.sampled_from([10, 50]), st.integers(10, 120))
def test_the_live_verdict_is_stop_at_the_simulated_time_and_not_before(
    steps: list[tuple[int, int]], minimum: int, window_ms: int
) -> None:
    samples, window = as_samples(steps), Window(window_ms, "any", 0)
    verdicts = [
        judge(window, [replay(samples[: seen + 1], minimum, EVERY)], at, EVERY).kind
        for seen, (at, _used) in enumerate(samples)
    ]
    stop = first_stop([samples], minimum, window, EVERY)
    assert (verdicts.index(VerdictKind.STOP) if VerdictKind.STOP in verdicts else None) == (
        None if stop is None else [at for at, _used in samples].index(stop.at_ms)
    )


WINDOW = Window(60, "any", 0)


@pytest.mark.parametrize(
    ("used", "stops_at"),
    [
        ((0, 0, 0, 0, 0, 0, 0), 60),
        ((0, 0, 0, 0, 0, 0), None),
        ((0, 0, 0, 50, 0, 0, 0), None),
        ((0, 0, 0, None, None, 0, 0), 60),
        ((0, 0, 0, None, None, None, 0, 0), None),
        ((50, 50, 50, 50, 50, 50, 50), None),
        ((90, 0, 0, 0, 0, 0, 0, 0), 70),
    ],
)
def test_one_gpu(used: tuple[int | None, ...], stops_at: int | None) -> None:
    stop = first_stop([plain(*used)], 50, Window(60, "any", -10), EVERY)
    assert (stop.at_ms if stop else None) == stops_at


def test_with_the_scope_all_one_busy_gpu_keeps_the_job() -> None:
    gpus = [plain(*[0] * 8), plain(*[90] * 8)]
    assert first_stop(gpus, 50, Window(60, "all", 0), EVERY) is None
    stop = first_stop(gpus, 50, WINDOW, EVERY)
    assert stop is not None
    assert (stop.gpu, stop.low_since_ms) == (0, 0)


def test_samples_before_the_end_of_the_warm_up_do_not_count() -> None:
    stop = first_stop([plain(*[0] * 12)], 50, Window(60, "any", 40), EVERY)
    assert stop is not None
    assert stop.at_ms == 100
