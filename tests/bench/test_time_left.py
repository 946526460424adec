"""The time left of replayed histories: near the truth, and without jumps."""

from __future__ import annotations

import pytest

from bench import time_left
from bench.replay import workloads
from bench.replay.workloads import History


def figures(*histories: History) -> time_left.Figures:
    return time_left.Figures.of([list(time_left.looks(each)) for each in histories], lambda look: look.new, "time")


def test_the_demo_has_no_jumps_once_a_fifth_is_done() -> None:
    found = figures(workloads.demo(step_s=2.5))
    assert found.jump < 1.5
    assert found.held > 0.9
    assert found.error < 0.25


@pytest.mark.parametrize("make", [workloads.one_stage, workloads.paused, workloads.skipping, workloads.taking_turns])
def test_estimates_are_near_the_truth_and_ranges_hold_it(make: workloads.Make) -> None:
    found = figures(make(5))
    assert found.error < 0.1
    assert found.held > 0.9
    assert found.width < 2.5
