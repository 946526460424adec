"""Whether a waiting run stops placed ones so that it can start, and which.

Pure. One mechanism for two causes: preemption within a queue, where a run displaces those that are behind it and lower,
and reclaim in a cohort, where a queue takes back what it has lent. Of the runs that may be displaced, the highest
priority and then the earliest start is spared first: none is stopped without need, and runs end whole, on all their
hosts. Rationale: docs/decisions/0023-preemption.md, 0030-cohorts.md.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from dstackweb.backends.hosts.fit import HostView
from dstackweb.runs.codes import Reclaim
from dstackweb.scheduler.placement import reservation
from dstackweb.scheduler.placement.capacity import WAITS_FOR_HOSTS, Capacity
from dstackweb.scheduler.placement.hosts import Displaced, PlacedRun, Wait, WaitingRun, fit_nodes, may_use_hosts
from dstackweb.scheduler.placement.limits import QueueLimits, gpus_requested, waits_for_gpu_limit
from dstackweb.scheduler.placement.reservation import JobUsage, hosts_after, usable_hosts

DAY = dt.timedelta(days=1)
HOUR_MS = 3_600_000


class Displacer:
    """Decides whom waiting runs displace, on the capacity of a pass."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._waited_for: defaultdict[int, set[int]] = defaultdict(set)
        self._displaced: defaultdict[tuple[int, int], list[Displaced]] = defaultdict(list)

    def displace_for(self, run: WaitingRun, priority: int, waits: Wait) -> Sequence[PlacedRun]:
        """The runs that must stop so that `run` can start; what it needs is then reserved for it until they are gone.

        Call for waiting runs in their order. None where its queue displaces none, it is no help, or a run ahead of it
        waits for the same hosts: it would overtake that one. Also none while what was stopped for it is ending.
        """
        capacity = self._capacity
        if not self._may_displace(run, waits):
            return ()
        ahead = self._waited_for[run.queue_id]
        if len(ahead) >= sum(host.takes_jobs for host in capacity.hosts):
            return ()  # the usual case in a long queue, and cheaper
        usable = usable_hosts(run, capacity.hosts)
        is_first = not usable & ahead
        ahead |= usable
        is_pending = (reserved := capacity.turns.kept.get(run.id)) and capacity.waits_for_stopping(reserved)
        victims = self.would_displace(run, priority, waits) if is_first and not is_pending else ()
        reclaims = is_reclaim(run.queue_id, victims)
        also = self._borrowers(run.queue_id) if reclaims else frozenset()
        outranked = capacity.turns.outranked_by(run, capacity.hosts, also) if victims else None
        budget = self.work_budget(run, victims)
        if outranked is None or (budget and budget.allowed_at != capacity.now):
            return ()
        capacity.stop({one.id: self._stopped_by(one) for one in victims})
        if not reclaims:
            lost = held_gpu_ms(victims, capacity.now)
            self._displaced[run.queue_id, run.user_id].append((capacity.now, lost))
        planned = self._planned(run)
        assert planned is not None, "it fits once the victims are gone"
        if reclaims:
            planned = capacity.not_before_limits(replace(planned, reclaims=True))
        capacity.reserve(planned, instead_of=outranked)
        capacity.promise(run)
        return victims

    def would_displace(self, run: WaitingRun, priority: int, waits: Wait) -> Sequence[PlacedRun]:
        """Whom the run would displace if no run ahead of it in its queue waited for the same hosts: others of its own
        queue only where taking back what that has lent is no help."""
        if not self._may_displace(run, waits):
            return ()
        reclaimed = self._would_reclaim(run, priority) if self._may_reclaim(run, waits) else ()
        return reclaimed or (self._would_preempt(run, priority) if waits.reason in WAITS_FOR_HOSTS else ())

    def work_budget(self, run: WaitingRun, victims: Sequence[PlacedRun]) -> WorkBudget | None:
        """The budget of the run's member for displacing these; None where its queue has none, it displaces none, or it
        takes back what is its queue's own."""
        hours = self._capacity.preempt_gpu_hours.get(run.queue_id)
        if hours is None or not victims or is_reclaim(run.queue_id, victims):
            return None
        earlier = self._capacity.displaced_work(run.queue_id).get(run.user_id, ())
        displaced = [*earlier, *self._displaced[run.queue_id, run.user_id]]
        return WorkBudget.of(hours, displaced, victims, self._capacity.now)

    def _may_displace(self, run: WaitingRun, waits: Wait) -> bool:
        preempts = run.queue_id in self._capacity.preempt_points and waits.reason in WAITS_FOR_HOSTS
        return may_use_hosts(run.spec) and (preempts or self._may_reclaim(run, waits))

    def _may_reclaim(self, run: WaitingRun, waits: Wait) -> bool:
        """Whether its queue takes back what it has lent, and holds no more than its own limit with this run."""
        limits, gpus = self._limits(run.queue_id), gpus_requested(run.spec)
        if limits.reclaim == Reclaim.NEVER or not gpus or run.queue_id not in self._capacity.queue_usage.cohorts:
            return False
        if waits.reason not in WAITS_FOR_HOSTS and not waits_for_gpu_limit(waits):
            return False
        stopping = sum(one.gpus for one in self._capacity.displaceable_runs(run.queue_id) if one.stopping)
        held = self._capacity.queue_usage.gpus[run.queue_id, None] - stopping
        return held + gpus <= (limits.max_gpus or 0)

    def _would_preempt(self, run: WaitingRun, priority: int) -> Sequence[PlacedRun]:
        capacity, points = self._capacity, self._capacity.preempt_points.get(run.queue_id)
        if points is None:
            return ()
        allowed = displaceable(run, priority, points, capacity.displaceable_runs(run.queue_id))
        if not allowed or capacity.turns.outranked_by(run, capacity.hosts) is None:
            return ()
        victims = choose_victims(run, allowed, self._usable(run), capacity.job_usage)
        if not victims:
            return ()
        alone = self._planned(run)
        is_soon = alone and alone.starts_at and alone.starts_at <= max(map(self._stopped_by, victims))
        return () if is_soon else victims

    def _would_reclaim(self, run: WaitingRun, priority: int) -> Sequence[PlacedRun]:
        capacity, any_priority = self._capacity, self._limits(run.queue_id).reclaim == Reclaim.ANY
        placed = capacity.cohort_runs(run.queue_id)
        stopping = [one.counted for one in placed if one.stopping]
        with capacity.queue_usage.without(stopping):
            above = capacity.queue_usage.above_limits(run.queue_id)
        allowed = [one for one in borrowing_runs(above, placed) if any_priority or one.priority < priority]
        if not allowed or capacity.turns.outranked_by(run, capacity.hosts, self._borrowers(run.queue_id)) is None:
            return ()
        hosts = self._usable(run)

        def within_limits(ended: Sequence[PlacedRun]) -> bool:
            gone = [one.counted for one in ended if not one.stopping]
            with capacity.queue_usage.without([*stopping, *gone]):
                return not capacity.exceeded_limits(run)

        victims = choose_victims(run, allowed, hosts, capacity.job_usage, within_limits)
        if not victims:
            return ()
        ending = self._ended_by(max(map(self._stopped_by, victims)))
        is_soon = within_limits([one for one in placed if one.id in ending]) and Room(
            run, hosts, capacity.job_usage
        ).is_enough_without(ending)
        return () if is_soon else victims

    def _borrowers(self, queue_id: int) -> frozenset[int]:
        """The runs of its cohort with a reservation that would borrow: what a queue takes back goes before them."""
        usage = self._capacity.queue_usage
        return frozenset(
            one.run.id
            for one in self._capacity.turns.kept.values()
            if usage.cohorts.get(one.run.queue_id) is usage.cohorts[queue_id] and not one.reclaims
            # One for which others are stopping counts as placed already.
            if not self._capacity.is_promised(one.run.id)
            if usage.gpus[one.run.queue_id, None] + gpus_requested(one.run.spec)
            > (self._limits(one.run.queue_id).max_gpus or 0)
        )

    def _ended_by(self, at: dt.datetime) -> set[int]:
        """The runs on hosts that have certainly ended by then."""
        holders = self._capacity.job_usage
        later = {holder.job[0] for holder in holders if holder.ends_at is None or holder.ends_at > at}
        return {holder.job[0] for holder in holders} - later

    def _limits(self, queue_id: int) -> QueueLimits:
        return self._capacity.limits.get(queue_id, QueueLimits())

    def _usable(self, run: WaitingRun) -> list[HostView]:
        usable = usable_hosts(run, self._capacity.hosts)
        return [host for host in self._capacity.hosts if host.id in usable]

    def _planned(self, run: WaitingRun) -> reservation.HostReservation | None:
        capacity = self._capacity
        return reservation.plan_reservation(
            run, capacity.hosts, capacity.job_usage, capacity.now, capacity.reserve_for_s
        )

    def _stopped_by(self, victim: PlacedRun) -> dt.datetime:
        """When it has ended at the latest if it is stopped now."""
        return self._capacity.now + dt.timedelta(seconds=victim.stop_s + reservation.MARGIN_S)


def is_reclaim(queue_id: int, victims: Sequence[PlacedRun]) -> bool:
    """Whether a run of this queue that displaces these takes back what its queue has lent."""
    return any(one.queue_id != queue_id for one in victims)


def work_s(runs: Sequence[PlacedRun], now: dt.datetime) -> int:
    """How long they have held what they hold, in seconds, together: what is lost without a checkpoint."""
    return round(sum((now - one.since).total_seconds() for one in runs))


def held_gpu_ms(runs: Iterable[PlacedRun], now: dt.datetime) -> int:
    """The GPU-milliseconds that these runs have held; a run without GPUs counts as one GPU."""
    return sum(max(one.gpus, 1) * max(0, (now - one.since) // dt.timedelta(milliseconds=1)) for one in runs)


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
    """How many nodes of a run each host holds once some runs have stopped; each combination is counted once. Nodes need
    the same, so the run fits where the hosts together hold them."""

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
