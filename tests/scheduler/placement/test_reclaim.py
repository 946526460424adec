"""What a queue takes back of the GPUs that it has lent in its cohort, beside brute force over all sets of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hypothesis import given, strategies as st

from dstackweb.backends.hosts.fit import HostView
from dstackweb.runs.codes import Reclaim
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.displacing import Displacer, borrowing_runs
from dstackweb.scheduler.placement.hosts import HostPlacement, PlacedRun, WaitingRun, place_on_hosts
from dstackweb.scheduler.placement.limits import QueueLimits, QueueUsage
from dstackweb.scheduler.placement.reservation import JobUsage, Turns
from tests.scheduler.placement.test_limits import feasible
from tests.scheduler.placement.test_reservation import HOLD_S, after, host, spec, waiting, with_held
from tests.support import examples

COHORT = (1, "team")
MINE = 1


@dataclass
class World:
    """Queues of a cohort, hosts, and the runs that hold them."""

    limits: dict[int, QueueLimits]
    hosts: list[HostView]
    holders: list[JobUsage]
    placed: list[PlacedRun]

    def capacity(self, turns: Turns | None = None) -> Capacity:
        return Capacity(
            now=after(0),
            reserve_after_s=300,
            reserve_for_s=HOLD_S,
            hosts=with_held(self.hosts, self.holders),
            limits=self.limits,
            queue_usage=QueueUsage.of((one.counted for one in self.placed), self.limits),
            read_job_usage=lambda: self.holders,
            placed_runs=lambda queue_id: [one for one in self.placed if one.queue_id == queue_id],
            turns=turns or Turns(),
        )

    def reclaims(self, run: WaitingRun, priority: int) -> Sequence[PlacedRun]:
        capacity = self.capacity()
        outcome = capacity.decide(run)
        return () if isinstance(outcome, HostPlacement) else Displacer(capacity).would_displace(run, priority, outcome)

    def without(self, ended: Iterable[PlacedRun]) -> World:
        ids = {one.id for one in ended} | {one.id for one in self.placed if one.stopping}
        holders = [one for one in self.holders if one.job[0] not in ids]
        return replace(self, holders=holders, placed=[one for one in self.placed if one.id not in ids])

    def held(self, queue: int) -> int:
        return sum(one.gpus for one in self.placed if one.queue_id == queue)

    def starts(self, run: WaitingRun) -> bool:
        """Whether it fits on the hosts, and its queue keeps its GPUs, or each that is held then is kept or lent."""
        asked = run.spec.requirements.gpu_count_min * run.spec.nodes
        held = {queue: self.held(queue) + (asked if queue == run.queue_id else 0) for queue in self.limits}
        allowed = held[run.queue_id] <= self.limits[run.queue_id].keeps or feasible(self.limits, held)
        found = place_on_hosts(run.spec, with_held(self.hosts, self.holders))
        return allowed and isinstance(found, HostPlacement)


def queue(most: int, lend: int | None = None, reclaim: Reclaim = Reclaim.ANY) -> QueueLimits:
    return QueueLimits(max_gpus=most, cohort=COHORT, lend_gpus=lend, reclaim=reclaim)


def placed(number: int, queue_id: int, gpus: int, priority: int = 10, since: float = 0, **fields: bool) -> PlacedRun:
    name = f"run-{number}"
    return PlacedRun(number, name, 1, "ann", 1, 0, priority, after(since), 20, queue_id, f"q{queue_id}", gpus, **fields)


def jobs(one: PlacedRun, at: dict[int, list[str]]) -> list[JobUsage]:
    """Its jobs: the GPUs that it holds by host."""
    return [
        JobUsage((one.id, node), box, 1, 256, frozenset(gpus), one.since, None, one.stopping)
        for node, (box, gpus) in enumerate(at.items())
    ]


lends = st.sampled_from([None, None, None, 0, 1])


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Two or three queues whose runs hold GPUs of three hosts, also more than their own, and some of several nodes."""
    limits = {MINE: queue(draw(st.integers(1, 4)), draw(lends), draw(st.sampled_from([*Reclaim, Reclaim.ANY])))}
    for number in range(2, draw(st.integers(2, 3)) + 1):
        limits[number] = queue(draw(st.integers(0, 2)), draw(lends))
    hosts = [host(number, cpus=8, gpus=draw(st.integers(1, 3))) for number in (1, 2, 3)]
    left = {box.id: [gpu.uuid for gpu in box.gpus] for box in hosts}
    world = World(limits, hosts, [], [])
    for number in range(100, 100 + draw(st.integers(3, 7))):
        boxes = draw(st.sets(st.sampled_from([1, 2, 3]), min_size=1, max_size=2))
        at = {box: [left[box].pop() for _ in range(min(draw(st.integers(1, 2)), len(left[box])))] for box in boxes}
        if at := {box: gpus for box, gpus in at.items() if gpus}:
            one = placed(
                number, draw(st.sampled_from([MINE, 2, 2, 2, 2, len(limits)])), sum(map(len, at.values())),
                draw(st.integers(0, 2)), draw(st.integers(-2, 0)), preemptible=draw(st.integers(0, 5)) > 0,
                stopping=draw(st.integers(0, 7)) == 0,
            )  # fmt: skip
            world.placed.append(one)
            world.holders += jobs(one, at)
    return world


def borrowing(world: World) -> set[int]:
    """The runs that hold what their queues borrow, one by one from the definition."""
    found = set()
    for other in world.limits:
        left = world.without(()).held(other) - (world.limits[other].max_gpus or 0)
        for one in sorted(world.placed, key=lambda one: (one.priority, -one.since.timestamp(), -one.id)):
            if one.queue_id == other and one.preemptible and not one.stopping and one.gpus <= left:
                left -= one.gpus
                found.add(one.id)
    return found


@examples(400, quick=60)
@given(worlds(), st.builds(spec, st.integers(1, 2), st.integers(1, 2)), st.integers(0, 2))
def test_a_queue_takes_back_its_own_with_the_fewest_stops_and_leaves_others_theirs(
    world: World, asked: object, priority: int
) -> None:
    run = waiting(asked, queue=MINE)  # type: ignore[arg-type]  # hypothesis knows no better
    victims = world.reclaims(run, priority)
    left, wanted = world.without(()), run.spec.requirements.gpu_count_min * run.spec.nodes
    mine = world.limits[MINE]
    is_own = left.held(MINE) + wanted <= (mine.max_gpus or 0)
    lower = {one.id for one in world.placed if mine.reclaim == Reclaim.ANY or one.priority < priority}
    allowed = [one for one in world.placed if one.queue_id != MINE and one.id in borrowing(world) & lower]
    if not is_own or mine.reclaim == Reclaim.NEVER or left.starts(run):
        assert not victims
        return
    sets = (list(some) for n in range(len(allowed) + 1) for some in combinations(allowed, n))
    enough = [some for some in sets if world.without(some).starts(run)]
    protected = sorted(allowed, key=lambda one: one.protection, reverse=True)
    best = min(enough, key=lambda some: [one in some for one in protected], default=[])
    assert {one.id for one in victims} == {one.id for one in best}
    assert not any(world.without([one for one in victims if one != spared]).starts(run) for spared in victims)
    for one in victims:
        assert world.without(victims).held(one.queue_id) >= (world.limits[one.queue_id].max_gpus or 0)


@examples(200, quick=30)
@given(worlds(), st.builds(spec, st.integers(1, 2), st.integers(1, 2)))
def test_what_was_taken_back_is_not_taken_back_again(world: World, asked: object) -> None:
    """The displaced runs wait, and the queue that took its own back holds it: none of its runs stops for them."""
    run = waiting(asked, queue=MINE)  # type: ignore[arg-type]  # hypothesis knows no better
    victims = world.reclaims(run, 100)
    if not victims:
        return
    then = world.without(victims)
    found = place_on_hosts(run.spec, with_held(then.hosts, then.holders))
    assert isinstance(found, HostPlacement)
    gpus = run.spec.requirements.gpu_count_min
    mine = placed(1, MINE, gpus * len(found.fits), priority=0)
    then.placed.append(mine)
    then.holders += [
        JobUsage((1, node), fit.host_id, fit.cpus, fit.memory_mib, frozenset(fit.gpu_uuids), after(0), None)
        for node, fit in enumerate(found.fits)
    ]
    for one in victims:
        back = waiting(spec(1, one.gpus), one.id, one.queue_id)
        assert not [victim for victim in then.reclaims(back, 100) if victim.queue_id == MINE]


def test_of_a_queue_that_borrows_the_lowest_and_latest_runs_borrow() -> None:
    runs = [
        placed(1, 2, 2, priority=10, since=-60),
        placed(2, 2, 2, priority=10, since=-30),
        placed(3, 2, 1, priority=5, preemptible=False),
        placed(4, 2, 4, priority=5),
        placed(5, 2, 1, priority=20),
        placed(6, 3, 1, priority=1),
    ]
    assert [one.id for one in borrowing_runs({2: 3}, runs)] == [2, 5]


def busy() -> World:
    """Two queues that own two GPUs each of a host with four; the other one holds three."""
    world = World({1: queue(2), 2: queue(2)}, [host(1, gpus=4, cpus=8)], [], [])
    for number, (owner, gpu) in enumerate([(1, "1-0"), (2, "1-1"), (2, "1-2"), (2, "1-3")], start=101):
        world.placed.append(placed(number, owner, 1, since=number))
        world.holders += jobs(world.placed[-1], {1: [gpu]})
    return world


def test_what_is_freed_is_kept_for_the_run_until_it_starts_also_from_others_of_the_cohort() -> None:
    world = busy()
    capacity = world.capacity()
    run = waiting(spec(gpus=1), 7, queue=1)
    victims = Displacer(capacity).displace_for(run, 0, capacity.decide(run))  # type: ignore[arg-type]  # it waits
    assert [one.id for one in victims] == [104]
    assert capacity.turns.kept[7].reclaims
    stopping = replace(world, placed=[*world.placed[:3], replace(victims[0], stopping=True)])
    stopping.holders = [replace(one, stopping=one.job[0] == 104, ends_at=after(80)) for one in world.holders]
    stopping.holders[:3] = world.holders[:3]
    again = stopping.capacity(Turns.of(capacity.turns.rows.values()))
    again.review_reservations()
    assert again.turns.kept[7].starts_at == after(80)
    assert not Displacer(again).would_displace(run, 0, again.decide(run))  # type: ignore[arg-type]  # it waits
    ended = stopping.without(())
    later = ended.capacity(Turns.of(again.turns.rows.values()))
    later.review_reservations()
    back = waiting(spec(gpus=1), 104, queue=2, rank=-1)
    assert not isinstance(later.decide(back), HostPlacement)
    assert isinstance(later.decide(run), HostPlacement)


def test_a_run_that_needs_more_than_its_queue_owns_takes_nothing_back() -> None:
    assert not busy().reclaims(waiting(spec(gpus=2), queue=1), 100)
    assert busy().reclaims(waiting(spec(gpus=1), queue=1), 100)


def test_what_is_free_soon_anyway_is_not_taken_back() -> None:
    world = busy()
    soon = after(30)
    world.holders = [replace(one, ends_at=soon) if one.job[0] == 102 else one for one in world.holders]
    assert not world.reclaims(waiting(spec(gpus=1), queue=1), 100)
