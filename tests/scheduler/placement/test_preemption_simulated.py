"""Preemption over some hours: runs arrive, displace others that lose all their work, and start again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import example, given, strategies as st

from dstackweb.backends.hosts.fit import HostView
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.displacing import Displacer
from dstackweb.scheduler.placement.hosts import HostPlacement, PlacedRun, WaitingRun
from dstackweb.scheduler.placement.limits import QueueLimits, QueueUsage, gpus_requested
from dstackweb.scheduler.placement.reservation import MARGIN_S, HostReservation, JobUsage, Turns, is_ahead, latest_end
from tests.scheduler.placement.test_reservation import HOLD_S, after, host, spec, waiting, with_held
from tests.support import examples

POINTS, STEP_S = 20, 300
"""A point of priority is worth five minutes of waiting."""


@dataclass
class Submitted:
    """A run and what is true of it: `work_s` is how long it really needs without a break."""

    run: WaitingRun
    priority: int
    preemptible: bool
    at: float
    work_s: float


@dataclass
class Active:
    of: Submitted
    placed: HostPlacement
    since: float
    ends: float
    stopping_since: float | None = None

    def holders(self, second: float) -> list[JobUsage]:
        asked, now = self.of.run.spec, after(second)
        end = latest_end(after(self.since), asked.max_duration_s, asked.stop_duration_s, now)
        if self.stopping_since is not None:
            left = max(0, round(self.stopping_since + asked.stop_duration_s - second))
            stopped = latest_end(now, 0, left, now)
            end = stopped if end is None or stopped is None else min(end, stopped)
        return [
            JobUsage((self.of.run.id, node), made.host_id, made.cpus, made.memory_mib, frozenset(made.gpu_uuids),
                     after(self.since), end, self.stopping_since is not None)
            for node, made in enumerate(self.placed.fits)
        ]  # fmt: skip


@dataclass
class World:
    hosts: list[HostView]
    rnd: random.Random
    limits: dict[int, QueueLimits] = field(default_factory=dict)
    waiting: list[Submitted] = field(default_factory=list)
    active: dict[int, Active] = field(default_factory=dict)
    rows: dict[int, HostReservation] = field(default_factory=dict)
    owed: dict[int, float] = field(default_factory=dict)
    """Of runs that displaced others and have not started yet: by when they must."""
    displaced: Counter[int] = field(default_factory=Counter)
    displacing: Counter[int] = field(default_factory=Counter)
    starts: Counter[int] = field(default_factory=Counter)
    lost_s: float = 0
    done: set[int] = field(default_factory=set)

    def do_pass(self, second: float) -> set[float]:
        """What ends by now ends, then one pass as scheduler.passes does it; returns when to look again."""
        self._end(second)
        capacity = self.capacity(second)
        displacer = Displacer(capacity)
        capacity.review_reservations()
        events = set()
        for one in sorted(self.waiting, key=lambda one: one.run.place):
            outcome = capacity.decide(one.run)
            if isinstance(outcome, HostPlacement):
                events.add(self._start(one, outcome, second))
                capacity.take(one.run, outcome)
            elif victims := displacer.displace_for(one.run, one.priority, outcome):
                events |= self._displace(one, victims, second, capacity)
            elif capacity.reserve_for(one.run, outcome):
                self._go_before_others(one)
        self.rows = capacity.turns.rows
        for run_id, by in self.owed.items():
            assert second <= by, f"run {run_id} displaced others and did not start when they were gone"
        return events

    def capacity(self, second: float) -> Capacity:
        holders = [holder for active in self.active.values() for holder in active.holders(second)]
        placed = self.placed()
        return Capacity(
            now=after(second),
            reserve_after_s=300,
            reserve_for_s=HOLD_S,
            hosts=with_held(self.hosts, holders),
            limits=self.limits,
            queue_usage=QueueUsage.of((one.counted for one in placed), self.limits),
            read_job_usage=lambda: holders,
            preempt_points={1: POINTS},
            placed_runs=lambda queue_id: [one for one in placed if one.queue_id == queue_id],
            turns=Turns.of(self.rows.values()),
        )

    def placed(self) -> list[PlacedRun]:
        return [
            PlacedRun(one.of.run.id, one.of.run.name, 1, "ann", 1, one.of.run.rank, one.of.priority,
                      after(one.since), one.of.run.spec.stop_duration_s, one.of.run.queue_id,
                      gpus=gpus_requested(one.of.run.spec), preemptible=one.of.preemptible,
                      stopping=one.stopping_since is not None)
            for one in self.active.values()
        ]  # fmt: skip

    def check(self, by: Submitted, victims: Sequence[PlacedRun]) -> None:
        """That the run may displace these."""
        for one in (self.active[victim.id].of for victim in victims):
            assert by.priority - one.priority >= POINTS
            assert is_ahead(by.run, one.run), "who is ahead is never displaced"
            assert by.at < one.at + (by.priority - one.priority) * STEP_S, "ageing protects"

    def _end(self, second: float) -> None:
        for run_id, active in list(self.active.items()):
            if active.ends > second:
                continue
            del self.active[run_id]
            if active.stopping_since is None:
                self.done.add(run_id)
            else:
                self.lost_s += active.ends - active.since
                self.waiting.append(active.of)

    def _start(self, one: Submitted, outcome: HostPlacement, second: float) -> float:
        self.waiting.remove(one)
        self.starts[one.run.id] += 1
        self.owed.pop(one.run.id, None)
        self._go_before_others(one)
        self.active[one.run.id] = Active(one, outcome, second, second + one.work_s)
        return second + one.work_s

    def _go_before_others(self, one: Submitted) -> None:
        """One that is ahead may take what was freed, also by its reservation: people trust the order that they see."""
        behind = {other.run.id for other in self.waiting if is_ahead(one.run, other.run)}
        self.owed = {run_id: by for run_id, by in self.owed.items() if run_id not in behind}

    def _displace(self, by: Submitted, victims: Sequence[PlacedRun], second: float, capacity: Capacity) -> set[float]:
        assert by.run.id not in self.owed, "nobody displaces again before those it displaced are gone"
        self.check(by, victims)
        self._go_before_others(by)
        self.displacing[by.run.id] += 1
        events = set()
        for victim in victims:
            active = self.active[victim.id]
            self.displaced[victim.id] += 1
            active.stopping_since = second
            active.ends = min(active.ends, second + self.rnd.randint(0, active.of.run.spec.stop_duration_s))
            events.add(active.ends)
        reserved = capacity.turns.kept[by.run.id]
        assert reserved.starts_at is not None
        self.owed[by.run.id] = (reserved.starts_at - after(0)).total_seconds()
        assert self.owed[by.run.id] <= second + 61 + MARGIN_S
        return events


def simulate(seed: int, runs: int = 40) -> tuple[World, list[Submitted]]:
    """Runs arrive within two hours; then passes go on until nothing happens any more."""
    rnd = random.Random(seed)
    world = World([host(n, cpus=6, gpus=rnd.randint(2, 4)) for n in range(1, rnd.randint(3, 4))], rnd)
    coming = []
    for number in range(1, runs + 1):
        limit = rnd.choice([None, 300, 1200, 5000])
        asked = spec(rnd.choice([1, 1, 1, 2]), rnd.choice([1, 1, 2, 3]), 1, limit, rnd.choice([0, 20, 60]))
        at, priority = float(rnd.randint(0, 7200)), rnd.choice([0, 10, 30, 50, 80, 100])
        run = waiting(asked, number, 1, round(at) - priority * STEP_S, at)
        work = (limit or 3000) * rnd.uniform(0.05, 1)
        coming.append(Submitted(run, priority, rnd.random() < 0.8, at, work))
    play(world, coming)
    return world, coming


def play(world: World, coming: Sequence[Submitted]) -> None:
    """These arrive in time; passes go on until nothing happens any more."""
    events = {one.at for one in coming}
    while events:
        second = min(events)
        events = {at for at in events if at > second}
        world.waiting += [one for one in coming if one.at == second]
        events |= {at for at in world.do_pass(second) if at > second}
        events |= {
            (row.until - after(0)).total_seconds()
            for row in world.rows.values()
            if row.lapsed_at is None and row.until is not None and row.until > after(second)
        }
        assert sum(world.starts.values()) < 60 * len(coming), "it goes on and on"


def could_ever_start(world: World, one: Submitted) -> bool:
    return isinstance(Capacity(after(0), 300, HOLD_S, world.hosts).decide(replace(one.run)), HostPlacement)


@examples(15, quick=2)
@given(st.integers(0, 10**9))
@example(1114)  # another host would be free sooner than the one that is being freed
@example(9786288)  # a run ahead comes, and reserves what was freed
def test_all_runs_end_whoever_displaces_starts_and_ageing_bounds_what_is_lost(seed: int) -> None:
    world, coming = simulate(seed)
    assert world.done == {one.run.id for one in coming if could_ever_start(world, one)}
    by_id = {one.run.id: one for one in coming}
    for run_id, times in world.displacing.items():
        assert times <= world.starts[run_id] + sum(
            world.starts[other.run.id] for other in coming if is_ahead(other.run, by_id[run_id].run)
        )
    for run_id, times in world.displaced.items():
        ahead = [one for one in coming if is_ahead(one.run, by_id[run_id].run)]
        assert times <= sum(world.displacing[one.run.id] for one in ahead), "by each start of one ahead, once"
    # What a run loses each time is less than its own work.
    assert world.lost_s <= sum(times * (by_id[run_id].work_s + 60) for run_id, times in world.displaced.items())


def test_the_simulation_displaces() -> None:
    """So that the test above can't pass because nothing happens in it."""
    worlds = [simulate(seed)[0] for seed in range(2)]
    assert sum(sum(world.displaced.values()) for world in worlds) > 10
    assert max(max(world.displaced.values()) for world in worlds) > 1
