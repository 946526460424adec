"""The verdict of constant work says what a plain reading of the definition says."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import example, given, strategies as st

from dstackweb.gpus.window import NOTHING, Stretch, VerdictKind, Window, fold, judge, replay
from tests.support import examples

EVERY = 10
"""Milliseconds between samples: small numbers read better."""
GAP = 30
"""Longer than this nothing is known between two samples."""
NEAR = 1
"""So much the newest sample may miss the window's end."""

Samples = list[tuple[int, int]]
Scope = Literal["any", "all"]
MINIMUMS = st.sampled_from([0, 1, 50, 100])
USED = st.sampled_from([0, 0, 0, 0, 0, 1, 49, 49, 50, 51, 99, 100])
WINDOWS = st.builds(
    Window, st.sampled_from([10, 25, 40, 60, 100]), st.sampled_from(["any", "all"]), st.sampled_from([-1000, 0, 20, 45])
)
STEPS = st.lists(st.tuples(st.sampled_from([1, 8, 10, 10, 10, 10, 12, 29, 30, 31, 70]), USED), max_size=22)


def low_stretch(samples: Samples, minimum: int, now: int) -> tuple[int, int] | None:
    """The longest stretch of low samples up to now of one GPU, by a plain reading of all of them, in whatever order
    they came: none is further from the next than three intervals, and the newest not further from now."""
    in_order = sorted(samples)
    for first, (at, _used) in enumerate(in_order):
        stretch = in_order[first:]
        # At one moment there may be several samples; each of them counts.
        whole = first == 0 or in_order[first - 1][0] < at
        if (
            whole
            and all(used < minimum for _at, used in stretch)
            and all(after - before <= GAP for (before, _), (after, _) in pairwise(stretch))
            and abs(now - stretch[-1][0]) <= GAP
        ):
            return at, stretch[-1][0]
    return None


def stops(gpus: list[Samples], minimum: int, window: Window, now: int) -> bool:
    """The definition: low samples, the first of which is as old as the window, reach to its end; and the job is judged
    for all of it."""
    stretches = [low_stretch(samples, minimum, now) for samples in gpus]
    low = [stretch for stretch in stretches if stretch is not None]
    if window.scope == "all":
        complete = bool(gpus) and len(low) == len(gpus)
        low = [(max(first for first, _ in low), min(last for _, last in low))] if complete else []
    ends = [(max(first, window.from_ms) + window.window_ms, last) for first, last in low]
    return any(end <= now and last >= end - NEAR for end, last in ends)


def in_order(steps: Samples) -> Samples:
    at, made = 0, []
    for step, used in steps:
        at += step
        made.append((at, used))
    return made


@examples(400)
@given(st.lists(STEPS, max_size=3), MINIMUMS, WINDOWS, st.integers(0, 40))
def test_samples_in_order_give_the_verdict_of_the_reference_model(
    steps: list[Samples], minimum: int, window: Window, later: int
) -> None:
    gpus = [in_order(one) for one in steps]
    for now in sorted({at for samples in gpus for at, _used in samples}):
        for moment in (now, now + later):
            known = [[sample for sample in samples if sample[0] <= now] for samples in gpus]
            verdict = judge(window, [replay(samples, minimum, EVERY) for samples in known], moment, EVERY)
            assert (verdict.kind == VerdictKind.STOP) == stops(known, minimum, window, moment), (known, verdict)


@examples(400)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-35, 35), USED), max_size=30),
    MINIMUMS,
    WINDOWS,
    st.integers(-35, 60),
    st.data(),
)
def test_a_stop_by_samples_in_any_order_is_a_stop_of_the_reference_model(
    arrivals: list[tuple[int, int, int]], minimum: int, window: Window, later: int, data: st.DataObject
) -> None:
    """Late, doubled, out of order, from clocks that go ahead; GPUs that come and go, and windows that change."""
    came: list[Samples] = [[], [], []]
    stretches = [NOTHING] * 3
    clock = 100
    for gpu, jitter, used in arrivals:
        clock += EVERY // 2
        at = clock + jitter
        came[gpu].append((at, used))
        stretches[gpu] = fold(stretches[gpu], at, used, minimum, EVERY)
        there = data.draw(st.sampled_from([[0], [1, 2], [0, 1, 2], [2, 0]]))
        other = data.draw(WINDOWS)
        for wanted in (window, other):
            for now in (clock, clock + later):
                verdict = judge(wanted, [stretches[place] for place in there], now, EVERY)
                if verdict.kind == VerdictKind.STOP:
                    assert stops([came[place] for place in there], minimum, wanted, now), (came, verdict, now)


@given(STEPS, st.permutations(range(22)), MINIMUMS, WINDOWS)
def test_samples_out_of_order_stop_no_run_that_samples_in_order_would_not(
    steps: Samples, order: list[int], minimum: int, window: Window
) -> None:
    samples = in_order(steps)
    mixed = [samples[place] for place in order if place < len(samples)]
    now = samples[-1][0] if samples else 0
    if judge(window, [replay(mixed, minimum, EVERY)], now, EVERY).kind == VerdictKind.STOP:
        assert judge(window, [replay(samples, minimum, EVERY)], now, EVERY).kind == VerdictKind.STOP


@given(STEPS, MINIMUMS)
def test_doubled_samples_change_nothing(steps: Samples, minimum: int) -> None:
    samples = in_order(steps)
    doubled = [sample for sample in samples for _ in range(2)]
    assert replay(doubled, minimum, EVERY) == replay(samples, minimum, EVERY)


@given(STEPS, st.tuples(st.integers(0, 400), USED), MINIMUMS)
@example([(10, 0), (10, 0), (10, 0)], (20, 50), 50)
def test_a_late_sample_never_makes_the_stretch_longer(steps: Samples, late: tuple[int, int], minimum: int) -> None:
    samples = in_order(steps)
    before = replay(samples, minimum, EVERY)
    if before.last_ms is None or late[0] > before.last_ms:
        return
    after = fold(before, *late, minimum, EVERY)
    assert after.last_ms == before.last_ms
    if before.since_ms is None:
        assert after.since_ms is None
    else:
        assert after.since_ms is None or after.since_ms >= before.since_ms
    if late[1] >= minimum and after.since_ms is not None:
        assert after.since_ms > late[0]


@given(STEPS, WINDOWS)
def test_a_minimum_of_0_never_stops_and_one_of_100_accepts_only_full_use(steps: Samples, window: Window) -> None:
    samples = in_order(steps)
    for at, used in samples:
        never = replay([sample for sample in samples if sample[0] <= at], 0, EVERY)
        assert judge(window, [never], at, EVERY).kind != VerdictKind.STOP
        assert (fold(NOTHING, at, used, 100, EVERY).since_ms is None) == (used == 100)


@given(STEPS, MINIMUMS, WINDOWS, st.integers(0, 200))
def test_the_announced_time_of_the_stop_is_kept(steps: Samples, minimum: int, window: Window, later: int) -> None:
    """While samples stay low, it stops at the moment that it named all the time, and not before."""
    samples = in_order(steps)
    if not samples:
        return
    now = samples[-1][0]
    verdict = judge(window, [replay(samples, minimum, EVERY)], now, EVERY)
    if verdict.stops_ms is None or verdict.kind == VerdictKind.STOP or minimum == 0:
        return
    stretch = replay(samples, minimum, EVERY)
    while now < verdict.stops_ms:
        assert judge(window, [stretch], now, EVERY).kind == VerdictKind.KEEP
        now = min(now + EVERY, verdict.stops_ms)
        stretch = fold(stretch, now, 0, minimum, EVERY)
        assert judge(window, [stretch], now, EVERY).stops_ms == verdict.stops_ms
    assert judge(window, [stretch], now, EVERY).kind == VerdictKind.STOP


def of(*used: int | None) -> Stretch:
    """A GPU that was seen each interval from 0 on; None is no sample."""
    return replay([(EVERY * n, value) for n, value in enumerate(used) if value is not None], 50, EVERY)


MINUTE = Window(60, "any", -10)


@pytest.mark.parametrize(
    ("gpus", "now", "kind"),
    [
        ([of(*[0] * 7)], 60, VerdictKind.STOP),
        ([of(*[0] * 6)], 50, VerdictKind.KEEP),
        ([of(*[0] * 6)], 60, VerdictKind.KEEP),
        ([of(90, *[0] * 6)], 60, VerdictKind.KEEP),
        ([of(*[49] * 7)], 60, VerdictKind.STOP),
        ([of(*[50] * 7)], 60, VerdictKind.KEEP),
        ([of(0, 0, None, None, 0, 0, 0)], 60, VerdictKind.STOP),
        ([of(0, 0, None, None, None, 0, 0)], 60, VerdictKind.KEEP),
        ([of(*[0] * 7)], 90, VerdictKind.STOP),
        ([of(*[0] * 7)], 91, VerdictKind.UNKNOWN),
        ([of(*[0] * 7)], 29, VerdictKind.UNKNOWN),
        ([of(*[0] * 7), of(*[90] * 7)], 60, VerdictKind.STOP),
        ([of(*[0] * 7), NOTHING], 60, VerdictKind.STOP),
        ([of(*[90] * 7), NOTHING], 60, VerdictKind.UNKNOWN),
        ([], 60, VerdictKind.UNKNOWN),
    ],
)
def test_some_gpu_of_a_job(gpus: list[Stretch], now: int, kind: VerdictKind) -> None:
    assert judge(MINUTE, gpus, now, EVERY).kind == kind


@pytest.mark.parametrize(
    ("gpus", "kind"),
    [
        ([of(*[0] * 7), of(*[0] * 7)], VerdictKind.STOP),
        ([of(*[0] * 7), of(90, *[0] * 6)], VerdictKind.KEEP),
        ([of(*[0] * 7), of(*[0] * 6, 90)], VerdictKind.KEEP),
        ([of(*[0] * 7), of(*[0] * 6)], VerdictKind.KEEP),
        ([of(*[0] * 7), NOTHING], VerdictKind.UNKNOWN),
        ([of(0, 0), of(*[0] * 7)], VerdictKind.UNKNOWN),
        ([], VerdictKind.UNKNOWN),
    ],
)
def test_all_gpus_of_a_job(gpus: list[Stretch], kind: VerdictKind) -> None:
    assert judge(Window(60, "all", -10), gpus, 60, EVERY).kind == kind


@pytest.mark.parametrize(("newest", "kind"), [(60, VerdictKind.STOP), (59, VerdictKind.STOP), (58, VerdictKind.KEEP)])
def test_a_sample_dated_a_little_early_covers_the_end_of_the_window(newest: int, kind: VerdictKind) -> None:
    stretch = fold(of(*[0] * 6), newest, 0, 50, EVERY)
    assert judge(MINUTE, [stretch], 60, EVERY).kind == kind
    assert judge(MINUTE, [stretch], 59, EVERY).kind == VerdictKind.KEEP


def test_a_gpu_that_did_not_answer_at_the_end_of_its_window_holds_up_no_other() -> None:
    late = of(*[0] * 6, None)
    assert judge(MINUTE, [late], 70, EVERY).kind == VerdictKind.KEEP
    verdict = judge(MINUTE, [late, of(90, *[0] * 7)], 70, EVERY)
    assert (verdict.kind, verdict.gpu, verdict.low_since_ms) == (VerdictKind.STOP, 1, 10)


def test_a_warm_up_moves_the_window_behind_it() -> None:
    window = Window(60, "any", 200)
    assert judge(window, [of(*[0] * 26)], 250, EVERY).kind == VerdictKind.KEEP
    assert judge(window, [of(*[0] * 27)], 260, EVERY).kind == VerdictKind.STOP


@pytest.mark.parametrize("used", [(0, 90), (90, 0)])
@pytest.mark.parametrize("at", [0, 20, 50])
def test_of_two_samples_of_one_time_the_higher_counts(used: tuple[int, int], at: int) -> None:
    samples = [(moment, 0) for moment in range(0, 60, EVERY) if moment != at]
    of_moment = [(at, one) for one in used]
    came = sorted([*samples, *of_moment], key=lambda sample: sample[0]), [*samples, *of_moment]
    for one in came:
        stretch = replay(one, 50, EVERY)
        assert stretch.since_ms is None or stretch.since_ms > at


def test_which_gpu_is_low_and_since_when() -> None:
    verdict = judge(MINUTE, [of(*[90] * 10), of(90, 90, *[0] * 8), of(*[90] * 5, *[0] * 5)], 90, EVERY)
    assert (verdict.gpu, verdict.low_since_ms, verdict.stops_ms) == (1, 20, 80)
