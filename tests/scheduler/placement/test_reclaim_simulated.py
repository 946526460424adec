"""Queues that lend each other GPUs over some hours, and take them back: all runs end, and each queue gets its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import example, given, strategies as st

from dstackweb.runs.codes import Reclaim
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.hosts import HostPlacement, PlacedRun
from dstackweb.scheduler.placement.limits import QueueLimits, QueueUsage, gpus_requested
from tests.scheduler.placement.test_preemption_simulated import STEP_S, Submitted, World, play
from tests.scheduler.placement.test_reservation import HOLD_S, after, host, spec, waiting
from tests.support import examples


class Cohort(World):
    """Three queues: none preempts within itself, and two or three take back what they have lent."""

    def capacity(self, second: float) -> Capacity:
        made = super().capacity(second)
        made.preempt_points = {}
        return made

    def check(self, by: Submitted, victims: Sequence[PlacedRun]) -> None:
        mine, going = self.limits[by.run.queue_id], [one for one in self.placed() if not one.stopping]
        held = QueueUsage.of(one.counted for one in going).gpus
        assert mine.reclaim != Reclaim.NEVER
        assert held[by.run.queue_id, None] + gpus_requested(by.run.spec) <= (mine.max_gpus or 0), "it takes but its own"
        for victim in victims:
            assert victim.queue_id != by.run.queue_id
            assert victim.may_stop
            assert mine.reclaim == Reclaim.ANY or victim.priority < by.priority
            held[victim.queue_id, None] -= victim.gpus
        for queue in {victim.queue_id for victim in victims}:
            assert held[queue, None] >= (self.limits[queue].max_gpus or 0), "each queue keeps what it owns"


def simulate(seed: int, runs: int = 40) -> tuple[Cohort, list[Submitted]]:
    """Bursts of each queue after the other, so that the first ones borrow."""
    rnd = random.Random(seed)
    hosts = [host(n, cpus=6, gpus=rnd.randint(2, 4)) for n in range(1, rnd.randint(3, 4))]
    limits = {
        number: QueueLimits(
            max_gpus=rnd.randint(1, 4), cohort=(1, "team"), lend_gpus=rnd.choice([None, None, 1]),
            reclaim=rnd.choice([Reclaim.ANY, Reclaim.ANY, Reclaim.LOWER_PRIORITY, Reclaim.NEVER]),
        )
        for number in (1, 2, 3)
    }  # fmt: skip
    world, coming = Cohort(hosts, rnd, limits), []
    for number in range(1, runs + 1):
        limit, queue = rnd.choice([None, 300, 1200, 5000]), rnd.choice([1, 2, 3])
        asked = spec(rnd.choice([1, 1, 1, 2]), rnd.choice([1, 1, 1, 2]), 1, limit, rnd.choice([0, 20, 60]))
        at, priority = float(rnd.randint(0, 2400) + 1200 * queue), rnd.choice([0, 50, 100])
        run = waiting(asked, number, queue, round(at) - priority * STEP_S, at)
        coming.append(Submitted(run, priority, rnd.random() < 0.8, at, (limit or 3000) * rnd.uniform(0.05, 1)))
    play(world, coming)
    return world, coming


def could_ever_start(world: Cohort, one: Submitted) -> bool:
    empty = Capacity(after(0), 300, HOLD_S, world.hosts, world.limits, QueueUsage.of((), world.limits))
    return isinstance(empty.decide(one.run), HostPlacement)


@examples(40, quick=3)
@given(st.integers(0, 10**9))
@example(126)  # a run ahead that borrows took the reservation, and a displaced one what was freed
def test_all_runs_end_and_none_is_displaced_more_often_than_others_take_back_their_own(seed: int) -> None:
    world, coming = simulate(seed)
    assert world.done == {one.run.id for one in coming if could_ever_start(world, one)}
    for run_id, times in world.displacing.items():
        assert times <= world.starts[run_id] + len(coming), "by each run ahead that took what was freed, once"
    by_queue = {one.run.id: one.run.queue_id for one in coming}
    for run_id, times in world.displaced.items():
        others = sum(n for other, n in world.displacing.items() if by_queue[other] != by_queue[run_id])
        assert times <= others


def test_the_simulation_takes_back() -> None:
    """So that the test above can't pass because nothing happens in it."""
    worlds = [simulate(seed)[0] for seed in range(2)]
    assert sum(sum(world.displaced.values()) for world in worlds) > 2
