"""Turns beside sets of hosts: pass after pass, with runs of several nodes, holds that lapse, and runs that outrank."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given, strategies as st

from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.hosts import Wait, WaitingRun
from dstackweb.scheduler.placement.reservation import MOST_RESERVATIONS, HostReservation, JobUsage, Turns
from tests.scheduler.placement.test_reservation import T0, after, spec, waiting, with_held
from tests.scheduler.placement.test_turns import HOUR, model_host, of_model
from tests.support import examples

MODELS = ("A100", "H100", "L40S", "V100", "T4", "B200")
WAIT_S = 900


@dataclass
class World:
    """Hosts of which each has one busy GPU; each waiting run wants whole hosts, so that none starts."""

    rnd: random.Random

    def __post_init__(self) -> None:
        rnd = self.rnd
        boxes = [model_host(n, rnd.choice(MODELS), 2) for n in range(1, rnd.randint(3, 9))]
        self.hosts = [replace(box, held_back=rnd.random() < 0.15) for box in boxes]
        self.ends = {box.id: rnd.choice([None, None, 10**6 + box.id]) for box in self.hosts}
        self.runs = [
            waiting(
                of_model(spec(rnd.choice([1, 1, 2]), gpus=2), *rnd.sample(MODELS, rnd.randint(1, 4))), number,
                rnd.choice([1, 1, 2]), rank=rnd.randint(0, 9), since=rnd.choice([-5000, 0, 2000, 6000]),
            )
            for number in range(1, 10)
        ]  # fmt: skip
        self.runs.sort(key=lambda run: (run.queue_id, run.place))

    def make_an_end_known(self) -> None:
        if self.rnd.random() < 0.15:
            host_id = self.rnd.choice(list(self.ends))
            self.ends[host_id] = self.ends[host_id] or 10**6 + host_id

    def holders(self) -> list[JobUsage]:
        return [
            JobUsage((100 + box.id, 0), box.id, 1, 256, frozenset({box.gpus[0].uuid}), after(-box.id), ends_at)
            for box in self.hosts
            for ends_at in [after(self.ends[box.id]) if self.ends[box.id] else None]
        ]

    def usable(self, run: WaitingRun) -> set[int]:
        names = run.spec.requirements.gpu_names or ()
        return {box.id for box in self.hosts if not box.held_back and box.gpus[0].name.split()[1] in names}

    def planned(self, run: WaitingRun) -> set[int]:
        """The hosts that are free first; without a known end, the one whose holder began first."""
        first = sorted(self.usable(run), key=lambda host_id: (self.ends[host_id] or 10**9, -host_id))
        return set(first[: run.spec.nodes])


@dataclass
class Expected:
    """Hosts, when it was made, and when it ends without a known start: by run, of those with a turn, and lapsed."""

    world: World
    kept: dict[int, tuple[set[int], float, float | None]] = field(default_factory=dict)
    lapsed: dict[int, tuple[set[int], float, float | None]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def do_pass(self, now: float) -> None:
        for number, (hosts, made, expires) in sorted(self.kept.items(), key=lambda item: (item[1][1], item[0])):
            if not self._start_is_known(hosts) and expires is not None and expires <= now:
                self._end(number)
                self.lapsed[number] = hosts, made, expires
                self.seen["lapsed"] += 1
            elif not self._start_is_known(hosts) and expires is None:
                self.kept[number] = hosts, made, now + HOUR
        wanted: set[int] = set()
        for run in self.world.runs:
            if now - (run.queued_at - T0).total_seconds() > WAIT_S and run.id not in self.kept:
                self._consider(run, wanted, now)

    def _consider(self, run: WaitingRun, wanted: set[int], now: float) -> None:
        mine, hosts = self.world.usable(run), self.world.planned(run)
        known, before = self._start_is_known(hosts), self.lapsed.get(run.id)
        if len(hosts) < run.spec.nodes or mine <= wanted or (before and not known):
            return
        others = {other.id: other for other in self.world.runs}
        in_the_way = [number for number, (theirs, *_) in self.kept.items() if theirs & mine]
        behind = all(
            others[n].queue_id == run.queue_id and run.place < others[n].place for n in in_the_way
        )  # fmt: skip
        if mine & wanted or not behind or len(self.kept) - len(in_the_way) >= MOST_RESERVATIONS:
            wanted |= set(self.world.ends) if len(self.kept) >= MOST_RESERVATIONS else mine
            return
        for number in in_the_way:
            self._end(number)
            self.seen["outranked"] += 1
        self.lapsed.pop(run.id, None)
        self.kept[run.id] = hosts, now, before[2] if before else None if known else now + HOUR
        self.seen["again" if before else f"{run.spec.nodes} nodes"] += 1

    def _end(self, number: int) -> None:
        """It is the turn again of those that have lapsed and could have used its hosts."""
        hosts, *_ = self.kept.pop(number)
        runs = {run.id: run for run in self.world.runs}
        for other, (theirs, *_) in list(self.lapsed.items()):
            if hosts & (theirs | self.world.usable(runs[other])):
                del self.lapsed[other]
                self.seen["forgiven"] += 1

    def _start_is_known(self, hosts: set[int]) -> bool:
        return all(self.world.ends[host_id] for host_id in hosts)


def real_pass(world: World, rows: dict[int, HostReservation], now: float) -> dict[int, HostReservation]:
    holders = world.holders()
    capacity = Capacity(
        now=after(now), reserve_after_s=WAIT_S, reserve_for_s=HOUR, hosts=with_held(world.hosts, holders),
        read_job_usage=lambda: holders, turns=Turns.of(rows.values()),
    )  # fmt: skip
    capacity.review_reservations()
    for run in world.runs:
        outcome = capacity.decide(run)
        assert isinstance(outcome, Wait)
        capacity.reserve_for(run, outcome)
    return capacity.turns.rows


def compare(seed: int) -> Counter[str]:
    """Both, pass after pass; returns what has happened."""
    world = World(random.Random(seed))
    expected, rows = Expected(world), dict[int, HostReservation]()
    for step in range(20):
        now = 700.0 * step
        world.make_an_end_known()
        expected.do_pass(now)
        rows = real_pass(world, rows, now)
        found = {number: set(row.host_ids) for number, row in rows.items() if row.lapsed_at is None}
        assert found == {number: hosts for number, (hosts, *_) in expected.kept.items()}, step
        assert {number for number, row in rows.items() if row.lapsed_at} == set(expected.lapsed), step
    return expected.seen


@examples(100, quick=3)
@given(st.integers(0, 10**9))
def test_turns_are_those_of_sets_of_hosts(seed: int) -> None:
    compare(seed)


def test_the_comparison_covers_every_event_of_reservations() -> None:
    assert set(compare(2)) == {"1 nodes", "2 nodes", "lapsed", "forgiven", "outranked", "again"}
