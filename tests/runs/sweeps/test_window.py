"""Which runs of a sweep are created when."""

from __future__ import annotations

from django.utils import timezone
from hypothesis import given, strategies as st

from dstackweb.runs.models import Sweep, SweepCount
from dstackweb.runs.sweeps.creation import WAITING_AT_ONCE, next_indices, until_taken

PARALLEL = st.none() | st.integers(1, 300)


class Simulation:
    """A sweep beside a plain model: what was created, and where each run is."""

    def __init__(self, size: int, max_parallel: int | None) -> None:
        self.sweep = Sweep(size=size, max_parallel=max_parallel)
        self.sweep.count = SweepCount()
        self.created: list[int] = []
        self.waiting: list[int] = []
        self.placed: list[int] = []
        self.failed: list[int] = []

    def create(self) -> None:
        self.count()
        indices = next_indices(self.sweep, self.failed if self.sweep.retry_before else [])
        again = [index for index in indices if index < self.sweep.next_index]
        assert again == self.failed[: len(again)] if self.sweep.retry_before else again == []
        self.failed = self.failed[len(again) :]
        self.created += indices
        self.waiting += indices
        self.sweep.next_index += len(indices) - len(again)
        if not self.failed:
            self.sweep.retry_before = None

    def count(self) -> None:
        self.sweep.count.submitted, self.sweep.count.running = len(self.waiting), len(self.placed)

    def check(self) -> None:
        active, most = len(self.waiting) + len(self.placed), self.sweep.max_parallel
        assert len(self.waiting) <= WAITING_AT_ONCE
        assert most is None or active <= most


@given(st.integers(1, 700), PARALLEL, st.data())
def test_each_index_is_created_once_in_order_and_never_too_many_wait(
    size: int, max_parallel: int | None, data: st.DataObject
) -> None:
    sweep, steps = Simulation(size, max_parallel), 0
    while not sweep.sweep.is_over:
        sweep.create()
        sweep.check()
        assert sweep.waiting or sweep.placed, "something can always go on"
        if steps < 20:
            start, end = data.draw(st.integers(0, len(sweep.waiting))), data.draw(st.integers(0, len(sweep.placed)))
        else:
            start, end = len(sweep.waiting), len(sweep.placed)
        ended, sweep.placed = sweep.placed[:end], sweep.placed[end:]
        sweep.failed += ended if data.draw(st.booleans()) else []
        sweep.placed += sweep.waiting[:start]
        sweep.waiting = sweep.waiting[start:]
        sweep.count()
        steps += 1
    assert sweep.created == list(range(size))


@given(st.integers(1, 400), PARALLEL, st.integers(0, 400), st.booleans())
def test_failed_runs_are_retried_first_and_nothing_new_after_a_stop(
    size: int, max_parallel: int | None, failed: int, stopped: bool
) -> None:
    created = min(size, failed + 20)
    sweep = Sweep(size=size, next_index=created, max_parallel=max_parallel, retry_before=timezone.now())
    sweep.stopped_at = timezone.now() if stopped else None
    sweep.count = SweepCount()
    again = list(range(min(failed, created)))
    found = next_indices(sweep, again)
    room = min(WAITING_AT_ONCE, max_parallel or WAITING_AT_ONCE)
    everything = again + ([] if stopped else list(range(created, size)))
    assert found == everything[:room]


@given(st.lists(st.integers(0, 50), unique=True), st.frozensets(st.integers(0, 50)))
def test_creation_goes_up_to_the_first_name_that_is_taken(indices: list[int], taken: frozenset[int]) -> None:
    free, blocked = until_taken(indices, taken)
    assert free == indices[: len(free)]
    assert not taken & set(free)
    assert (blocked is None) == (free == indices)
    assert blocked is None or (blocked in taken and blocked == indices[len(free)])
