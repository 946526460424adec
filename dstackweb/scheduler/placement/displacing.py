"""Whether a waiting run stops placed ones so that it can start, and which.

Pure. One mechanism for two causes: preemption within a queue, and reclaim in a cohort, where a queue takes back what it
has lent. Rationale: docs/decisions/0023-preemption.md, 0030-cohorts.md.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from dstackweb.backends.hosts.fit import HostView
from dstackweb.runs.codes import Reclaim
from dstackweb.scheduler.placement import preemption, reservation
from dstackweb.scheduler.placement.capacity import WAITS_FOR_HOSTS, Capacity
from dstackweb.scheduler.placement.hosts import Wait, WaitingRun, may_use_hosts
from dstackweb.scheduler.placement.limits import QueueLimits, gpus_requested, waits_for_gpu_limit
from dstackweb.scheduler.placement.preemption import Displaced, PlacedRun, Room, WorkBudget
from dstackweb.scheduler.placement.turns import usable_hosts


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
            lost = preemption.held_gpu_ms(victims, capacity.now)
            self._displaced[run.queue_id, run.user_id].append((capacity.now, lost))
        planned = self._planned(run)
        assert planned is not None, "it fits once the victims are gone"
        if reclaims:
            planned = capacity.not_before_limits(replace(planned, reclaims=True))
        capacity.reserve(planned, instead_of=outranked)
        capacity.promise(run)
        return victims

    def would_displace(self, run: WaitingRun, priority: int, waits: Wait) -> Sequence[PlacedRun]:
        """Whom the run would displace if no run ahead of it in its queue waited for the same hosts.

        What its queue has lent comes first: a run displaces others of its own queue only where that is no help.
        """
        if not self._may_displace(run, waits):
            return ()
        reclaimed = self._would_reclaim(run, priority) if self._may_reclaim(run, waits) else ()
        return reclaimed or (self._would_preempt(run, priority) if waits.reason in WAITS_FOR_HOSTS else ())

    def work_budget(self, run: WaitingRun, victims: Sequence[PlacedRun]) -> WorkBudget | None:
        """The budget of the run's member for displacing these; None where its queue has none, or it displaces none.

        What its queue takes back from others counts towards no budget: it is its own.
        """
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
        allowed = preemption.displaceable(run, priority, points, capacity.displaceable_runs(run.queue_id))
        if not allowed or capacity.turns.outranked_by(run, capacity.hosts) is None:
            return ()
        victims = preemption.choose_victims(run, allowed, self._usable(run), capacity.job_usage)
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
        allowed = [one for one in preemption.borrowing_runs(above, placed) if any_priority or one.priority < priority]
        if not allowed or capacity.turns.outranked_by(run, capacity.hosts, self._borrowers(run.queue_id)) is None:
            return ()
        hosts = self._usable(run)

        def within_limits(ended: Sequence[PlacedRun]) -> bool:
            gone = [one.counted for one in ended if not one.stopping]
            with capacity.queue_usage.without([*stopping, *gone]):
                return not capacity.exceeded_limits(run)

        victims = preemption.choose_victims(run, allowed, hosts, capacity.job_usage, within_limits)
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
