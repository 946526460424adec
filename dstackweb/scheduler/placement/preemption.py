"""Which placed runs stop so that a waiting run can start.

Pure. The most that a preemption stops is decided from the top: of the runs that may be displaced, the highest priority
and then the earliest start is spared first. So none is stopped without need, and runs end whole, on all their hosts.
Within a queue a run displaces those that are behind it and lower; in a cohort those that hold what its queue has lent.
Rationale: docs/decisions/0023-preemption.md, 0030-cohorts.md.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from dstackweb.backends.hosts.fit import HostView
from dstackweb.scheduler.placement.hosts import WaitingRun, fit_nodes
from dstackweb.scheduler.placement.reservation import JobUsage, hosts_after


@dataclass(frozen=True)
class PlacedRun:
    """A run of a queue that holds something: it is starting, running or stopping."""

    id: int
    name: str
    user_id: int
    user: str
    attempt: int
    rank: int
    priority: int
    since: dt.datetime
    """When it was placed."""
    stop_s: int
    """Its `stop_duration`: the longest that it takes to end."""
    queue_id: int
    queue: str = ""
    gpus: int = 0
    """Those that it requests, on all its nodes."""
    preemptible: bool = True
    stopping: bool = False

    @property
    def counted(self) -> tuple[int, int, int]:
        """Queue, member and GPUs, as its queue's limits count it."""
        return self.queue_id, self.user_id, self.gpus

    @property
    def may_stop(self) -> bool:
        """Whether it may be displaced at all: marked so, and not stopping yet."""
        return self.preemptible and not self.stopping

    @property
    def place(self) -> tuple[int, int]:
        """Its sort key among the runs of its queue."""
        return self.rank, self.id

    @property
    def protection(self) -> tuple[int, float, int]:
        """Sort key of who is displaced first: the lowest priority, then the latest start."""
        return self.priority, -self.since.timestamp(), -self.id


def work_s(runs: Sequence[PlacedRun], now: dt.datetime) -> int:
    """How long they have held what they hold, in seconds, together: what is lost without a checkpoint."""
    return round(sum((now - one.since).total_seconds() for one in runs))


DAY = dt.timedelta(days=1)
HOUR_MS = 3_600_000
Displaced = tuple[dt.datetime, int]
"""When runs were displaced, and the GPU-milliseconds that they had held."""


def held_gpu_ms(runs: Iterable[PlacedRun], now: dt.datetime) -> int:
    """The GPU-milliseconds that these runs have held; a run without GPUs counts as one GPU."""
    return sum(max(one.gpus, 1) * max(0, (now - one.since) // MILLISECOND) for one in runs)


MILLISECOND = dt.timedelta(milliseconds=1)


@dataclass(frozen=True)
class WorkBudget:
    """What a member's runs may displace within any 24 hours, in GPU-milliseconds, and what they have.

    `wanted_ms` is what the preemption in question would add now, and `allowed_at` the first moment from which on that
    is within the budget, if it displaces the same runs then: now, or as earlier ones are a day old. None: never.
    """

    most_ms: int
    displaced_ms: int
    wanted_ms: int
    allowed_at: dt.datetime | None

    @classmethod
    def of(
        cls, hours: int, displaced: Sequence[Displaced], victims: Sequence[PlacedRun], now: dt.datetime
    ) -> WorkBudget:
        """With a budget of so many GPU-hours. The work of the victims goes on growing meanwhile."""
        most_ms = hours * HOUR_MS
        recent = sorted(one for one in displaced if one[0] > now - DAY)
        left_ms = spent_ms = sum(gpu_ms for _at, gpu_ms in recent)
        allowed_at = None
        for at, older_ms in [(now, 0), *((at + DAY, gpu_ms) for at, gpu_ms in recent)]:
            left_ms -= older_ms
            if allowed_at is None and left_ms + held_gpu_ms(victims, at) <= most_ms:
                allowed_at = at
        return cls(most_ms, spent_ms, held_gpu_ms(victims, now), allowed_at)


def displaceable(run: WaitingRun, priority: int, points: int, placed: Sequence[PlacedRun]) -> list[PlacedRun]:
    """Of the placed runs of its queue those that `run` may displace: behind it, by at least `points` of priority."""
    lower = priority - points
    return [one for one in placed if one.may_stop and one.priority <= lower and one.place > run.place]


def borrowing_runs(above: Mapping[int, int], placed: Iterable[PlacedRun]) -> list[PlacedRun]:
    """The runs that hold what their queues have borrowed, in the order in which they are displaced.

    `above` has the GPUs that a queue holds above its own limit, by queue id. Of its preemptible runs the least
    protected count as borrowing, as many as hold no more than that together: whichever of them stop, the queue keeps
    what it owns.
    """
    left = Counter(above)
    found = []
    for one in sorted(placed, key=lambda one: one.protection):
        if one.may_stop and 0 < one.gpus <= left[one.queue_id]:
            left[one.queue_id] -= one.gpus
            found.append(one)
    return found


def choose_victims(
    run: WaitingRun,
    allowed: Sequence[PlacedRun],
    hosts: Sequence[HostView],
    holders: Sequence[JobUsage],
    within_limits: Callable[[Sequence[PlacedRun]], bool] = lambda stopped: True,
) -> list[PlacedRun]:
    """The runs to stop so that `run` fits on these hosts, the most protected first; none where it is no help or need.

    Jobs that are stopping count as ended: a run that waits for their end displaces no one else. `hosts` are those
    that the run may use, without what is kept for others; only runs with jobs on hosts are stopped. `within_limits`:
    whether limits let it start once some have stopped; stopping more must never make it false.
    """
    room = Room(run, hosts, holders)
    there = {holder.job[0] for holder in holders if not holder.stopping}
    return _fewest(
        [one for one in allowed if one.id in there],
        lambda stopped: within_limits(stopped) and room.is_enough_without({one.id for one in stopped}),
    )


class Room:
    """How many nodes of a run each host holds once some runs have stopped; each combination is counted once.

    Nodes need the same and hosts are independent of each other, so the run fits where the hosts together hold them.
    """

    def __init__(self, run: WaitingRun, hosts: Sequence[HostView], holders: Sequence[JobUsage]) -> None:
        self._spec, self._hosts = run.spec, hosts
        self._around: dict[int, list[JobUsage]] = {host.id: [] for host in hosts}
        for holder in holders:
            if holder.host_id in self._around:
                self._around[holder.host_id].append(holder)
        self._runs = {
            host_id: frozenset(holder.job[0] for holder in around if not holder.stopping)
            for host_id, around in self._around.items()
        }
        self._nodes: dict[tuple[int, frozenset[int]], int] = {}

    def is_enough_without(self, stopped: Set[int]) -> bool:
        """Whether the run fits once the runs with these ids have ended, and all that are stopping already."""
        nodes = 0
        for host in self._hosts:
            nodes += self._nodes_on(host, self._runs[host.id] & stopped)
            if nodes >= self._spec.nodes:
                return True
        return False

    def _nodes_on(self, host: HostView, ids: frozenset[int]) -> int:
        if (host.id, ids) not in self._nodes:
            around = self._around[host.id]
            gone = [holder for holder in around if holder.stopping or holder.job[0] in ids]
            self._nodes[host.id, ids] = len(fit_nodes(self._spec, hosts_after([host], around, gone)))
        return self._nodes[host.id, ids]


def _fewest(candidates: Sequence[PlacedRun], enough: Callable[[Sequence[PlacedRun]], bool]) -> list[PlacedRun]:
    """The victims that spare the most protected run, then the next, and so on; empty if all are not enough.

    `enough` must be monotonic. Each victim costs a binary search: the last one of the shortest prefix, in the order of
    protection, that is enough together with the victims found so far is needed whatever else is stopped.
    """
    order = sorted(candidates, key=lambda one: one.protection)
    found: list[PlacedRun] = []
    if not enough(order):
        return found
    while not enough(found):
        count = bisect_left(range(len(order)), True, key=lambda length: enough([*order[:length], *found]))
        found.append(order[count - 1])
        order = order[: count - 1]
    return found
