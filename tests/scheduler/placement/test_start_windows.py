"""Windows of starts, beside many simulations with durations drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given, strategies as st

from dstackweb.scheduler.placement.forecast import NEVER, TIERS, StartWindow, part_of, parts, seed_of, simulate, windows
from tests.scheduler.placement.test_forecast import World, box, needs, world
from tests.support import examples

SPREAD = tuple(300 * 2 ** NormalDist().inv_cdf((number + 0.5) / 64) for number in range(64))
"""Durations around five minutes: two thirds of them within half and twice that."""


@given(st.randoms(use_true_random=False))
@examples(200)
def test_windows_are_exact_where_every_duration_is_known(rnd: random.Random) -> None:
    made = world(rnd)
    scenario, starts = made.simulated()
    found = windows(
        scenario,
        [(made.took[run.id],) for run in scenario.runs],
        [(made.took[run.id],) for run, _each in made.placed],
    )
    assert found == [StartWindow(at, at, cause) for at, cause in zip(starts.at, starts.cause, strict=True)]


@pytest.mark.parametrize("samples", [3, 7, 31])
def test_in_the_samples_of_a_tier_each_part_is_drawn_once(samples: int) -> None:
    for run_id in (1, 2, 977, 10**9, -3):
        drawn = [part_of(seed_of(run_id), sample, samples) for sample in range(samples)]
        assert sorted(drawn) == list(range(samples))


@pytest.mark.parametrize("samples", [3, 7, 31])
@pytest.mark.parametrize("count", [1, 2, 40, 64])
def test_parts_of_a_duration_keep_its_order_and_nearly_its_mean(samples: int, count: int) -> None:
    lengths = SPREAD[:count]
    found = parts(lengths, samples)
    assert list(found) == sorted(found)
    assert len(found) == samples
    assert sum(found) / samples == pytest.approx(sum(lengths) / count, rel=0.05)


def queue(waiting: int, gpus: int = 4) -> World:
    made = World([box(1, 64, *[1] * gpus)])
    for _ in range(gpus):
        made.hold(needs(1, 1), 0)
    for _ in range(waiting):
        made.add(needs(1, 1), 0)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "waiting", "worlds", "rounds"),
    [(31, 60, 5, 40), (7, 200, 40, 3), pytest.param(3, 200, 60, 3, marks=pytest.mark.nightly)],
)
def test_half_of_the_starts_are_by_p50_and_nine_tenths_by_p90(
    samples: int, waiting: int, worlds: int, rounds: int
) -> None:
    rnd, counts = random.Random(1), [0, 0, 0]
    for number in range(worlds):
        made = queue(waiting)
        made.waiting = [replace(run, id=run.id + 1000 * number) for run in made.waiting]
        made.took = dict.fromkeys([*made.took, *(run.id for run in made.waiting)], 0.0)
        scenario, _starts = made.simulated()
        lengths, ends = [SPREAD] * len(scenario.runs), [SPREAD] * len(made.placed)
        found = windows(scenario, lengths, ends, tiers=((None, samples),))
        for _ in range(rounds):
            starts = simulate(scenario, [rnd.choice(SPREAD) for _ in lengths], [rnd.choice(SPREAD) for _ in ends])
            counts[0] += len(found)
            counts[1] += sum(at <= window.p50 for at, window in zip(starts.at, found, strict=True))
            counts[2] += sum(at <= window.p90 for at, window in zip(starts.at, found, strict=True))
    assert counts[1] / counts[0] == pytest.approx(0.5, abs=0.07)
    assert counts[2] / counts[0] == pytest.approx(0.9, abs=0.05)


def test_each_run_has_a_window_of_the_most_samples_that_reach_it() -> None:
    made = queue(TIERS[0][0] + 2)
    scenario, _starts = made.simulated()
    found = windows(scenario, [SPREAD] * len(scenario.runs), [SPREAD] * len(made.placed))
    assert len(found) == len(scenario.runs)
    assert all(0 < window.p50 <= window.p90 < NEVER for window in found)


def test_a_run_that_may_wait_for_one_without_an_end_has_no_p90() -> None:
    made = queue(1, gpus=1)
    scenario, _starts = made.simulated()
    (window,) = windows(scenario, [(60.0,)], [(10.0, 20.0, NEVER)])
    assert (window.p50, window.p90) == (20.0, NEVER)
