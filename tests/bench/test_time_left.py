"""The time left of replayed histories: near the truth, and without jumps."""

from __future__ import annotations

import pytest

from bench import time_left
from bench.replay import workloads
from bench.replay.workloads import History


def figures(*histories: History) -> time_left.Figures:
    return time_left.Figures.of([list(time_left.looks(each)) for each in histories], lambda look: look.new, "time")


def test_the_demo_has_no_jumps_once_a_fifth_is_done() -> None:
    measured = figures(workloads.demo(step_s=2.5))
    assert measured.jump < 1.25
    assert measured.held > 0.9
    assert measured.error < 0.25


@pytest.mark.parametrize(
    "make", [workloads.one_stage, workloads.paused, workloads.skipping, workloads.taking_turns, workloads.epochs]
)
def test_estimates_are_near_the_truth_and_ranges_hold_it(make: workloads.Make) -> None:
    measured = figures(make(5))
    assert measured.error < 0.1
    assert measured.held > 0.9
    assert measured.width < 2.5
