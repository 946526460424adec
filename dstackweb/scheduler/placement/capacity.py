"""Free capacity, and the decision on one run after another while it shrinks (docs/design.md#scheduling). Pure: what is
costly to read (usage of jobs, offers, budgets) comes through functions that are called only when needed."""

from __future__ import annotations

import datetime as dt
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dstackweb.backends.contract import Offer
from dstackweb.backends.hosts.fit import HOSTS, HostView, gpus_matching, taken
from dstackweb.runs.codes import ReservationEnd, Unavailable, WaitReason
from dstackweb.scheduler.placement import limits, offers, reservation
from dstackweb.scheduler.placement.hosts import (
    Displaced,
    HostPlacement,
    PlacedRun,
    Wait,
    WaitingRun,
    by_permanence,
    fit_nodes,
    may_use_hosts,
    place_on_hosts,
)
from dstackweb.scheduler.placement.limits import Budget, QueueLimits, QueueUsage, budget_data, gpus_requested
from dstackweb.scheduler.placement.offers import BackendOffers, OfferPlacement
from dstackweb.scheduler.placement.reservation import HostReservation, JobUsage, Turns, is_ahead
from dstackweb.spec.effective import EffectiveSpec

WAITS_FOR_HOSTS = (WaitReason.WAITING_FOR_CAPACITY, WaitReason.RESERVED_FOR_OTHER)
"""Reasons that a reservation can help against."""
UNTIL_STEP_S = 300
"""End times are rounded up to five minutes, so that reasons change rarely."""


@dataclass
class Capacity:
    """Hosts, offers, the reservations and the limits that decisions are made with."""

    now: dt.datetime
    reserve_after_s: float
    """The wait after which capacity is reserved for a run."""
    reserve_for_s: float
    """How long it is reserved if the start is unknown."""
    hosts: Sequence[HostView]
    limits: Mapping[int, QueueLimits] = field(default_factory=dict)
    """By queue id; a missing queue has no limits."""
    queue_usage: QueueUsage = field(default_factory=QueueUsage)
    ask_backends: Callable[[EffectiveSpec], BackendOffers] = lambda spec: BackendOffers()
    order_from_backends: Callable[[Sequence[Offer]], object] = lambda offers: None
    """Takes what was placed from what `ask_backends` counts as free."""
    idle_instances: Callable[[int], Sequence[Offer]] = lambda project_id: ()
    """A project's idle cloud instances, by project id."""
    budget_of: Callable[[int], Budget | None] = lambda project_id: None
    read_job_usage: Callable[[], Sequence[JobUsage]] = tuple
    preempt_points: Mapping[int, int] = field(default_factory=dict)
    """By queue id: how many points of priority less a displaced run has; a queue without them displaces none."""
    placed_runs: Callable[[int], Sequence[PlacedRun]] = lambda queue_id: ()
    """A queue's placed runs, by queue id."""
    preempt_gpu_hours: Mapping[int, int] = field(default_factory=dict)
    """By queue id: what a member's runs may displace within a day, in GPU-hours; a queue without it has no limit."""
    displaced_work: Callable[[int], Mapping[int, Sequence[Displaced]]] = lambda queue_id: {}
    """What each member's runs displaced within the last day, by queue id."""
    turns: Turns = field(default_factory=Turns)
    used: Counter[offers.OfferKey] = field(default_factory=Counter)
    """Nodes placed per offer."""

    def __post_init__(self) -> None:
        self._read_usage = functools.cache(self.read_job_usage)
        self._job_usage: Sequence[JobUsage] | None = None
        self._added: list[JobUsage] = []
        self._unreserved: dict[frozenset[int], Sequence[HostView]] = {}
        self._promised: dict[int, tuple[int, int, int]] = {}
        self._stopping: set[int] = set()
        self._taken: set[int] = set()

    @property
    def job_usage(self) -> Sequence[JobUsage]:
        """What jobs hold of the hosts, including runs placed by this pass."""
        if self._job_usage is None:
            self._job_usage = list({used.job: used for used in (*self._read_usage(), *self._added)}.values())
        return self._job_usage

    def decide(self, run: WaitingRun) -> HostPlacement | OfferPlacement | Wait:
        """Where the run goes, own hosts first if it names none before, or the most permanent reason why it waits."""
        outcome = self._anywhere(run)
        return next(iter(self._blockers(run, outcome)), outcome)

    def blockers(self, run: WaitingRun) -> list[Wait]:
        """All that keeps the run from starting now, the most permanent first."""
        return self._blockers(run, self._anywhere(run))

    def _blockers(self, run: WaitingRun, outcome: HostPlacement | OfferPlacement | Wait) -> list[Wait]:
        return by_permanence([*([outcome] if isinstance(outcome, Wait) else []), *self.exceeded_limits(run)])

    def on_backend(self, run: WaitingRun, name: str) -> HostPlacement | OfferPlacement | Wait:
        """Where the run would go if it named this backend alone, or why it would wait there. Limits don't count."""
        return self._anywhere(replace(run, spec=run.spec.model_copy(update={"backends": (name,)})))

    def exceeded_limits(self, run: WaitingRun) -> list[Wait]:
        """The limits of its queue that the run would exceed now, the most permanent first."""
        queue_limits, gpus = self.limits.get(run.queue_id, QueueLimits()), gpus_requested(run.spec)
        with self.queue_usage.without([self._promised[run.id]] if run.id in self._promised else []):
            return limits.exceeded_limits(queue_limits, self.queue_usage, run.queue_id, run.user_id, gpus)

    def promise(self, run: WaitingRun) -> None:
        """Count a run for which others are stopping as placed: no limit may keep it from what they leave."""
        self._withdraw(run.id)
        self._promised[run.id] = counted = (run.queue_id, run.user_id, gpus_requested(run.spec))
        self.queue_usage.add(*counted)

    def is_promised(self, run_id: int) -> bool:
        return run_id in self._promised

    def _withdraw(self, run_id: int) -> None:
        if (counted := self._promised.pop(run_id, None)) is not None:
            self.queue_usage.remove(*counted)

    def offers_for(self, run: WaitingRun) -> BackendOffers:
        """Offers of other backends for this run, its project's idle instances first."""
        asked = self.ask_backends(run.spec)
        kept = offers.matching_idle(self.idle_instances(run.project_id), run.spec.requirements, image=run.spec.image)
        return replace(asked, offers=(*kept, *asked.offers))

    def queue_wait(self, queue_id: int) -> Wait | None:
        """Why a whole queue waits, other than a pause; None if it does not."""
        return limits.queue_wide_limit(self.limits.get(queue_id, QueueLimits()), self.queue_usage, queue_id)

    def take(self, run: WaitingRun, placed: HostPlacement | OfferPlacement) -> None:
        """Subtract a run's placement from the free capacity."""
        self._taken.add(run.id)
        self.queue_usage.add(run.queue_id, run.user_id, gpus_requested(run.spec))
        if isinstance(placed, OfferPlacement):
            self.used.update(offers.offer_key(offer) for offer in placed.offers)
            self.order_from_backends(placed.offers)
        else:
            self.hosts = placed.hosts
            end = reservation.latest_end(self.now, run.spec.max_duration_s, run.spec.stop_duration_s, self.now)
            self._added += [
                JobUsage((run.id, node), made.host_id, made.cpus, made.memory_mib, frozenset(made.gpu_uuids),
                         since=self.now, ends_at=end)
                for node, made in enumerate(placed.fits)
            ]  # fmt: skip
        self._job_usage = None
        self.end_reservation(run.id, ReservationEnd.PLACED)

    def reserve(self, reserved: HostReservation, instead_of: Iterable[HostReservation] = ()) -> None:
        """Begin or renew a reservation, instead of those that it outranks."""
        for other in instead_of:
            self.end_reservation(other.run.id, ReservationEnd.OUTRANKED)
        self.turns.keep(reserved)
        self._unreserved.clear()

    def end_reservation(self, run_id: int, why: str) -> None:
        """End a run's reservation, if it has one; `why` is a code."""
        self._withdraw(run_id)
        self.turns.end(run_id, why, self.hosts, self.now)
        self._unreserved.clear()

    def reserve_for(self, run: WaitingRun, waits: Wait) -> HostReservation | None:
        """Reserve capacity for a run that waits, if it is its turn; returns the reservation made."""
        waited_s = (self.now - run.queued_at).total_seconds()
        if waits.reason not in WAITS_FOR_HOSTS or waited_s <= self.reserve_after_s or run.id in self.turns.kept:
            return None
        if not may_use_hosts(run.spec) or not self.turns.is_left_to(run, self.hosts):
            return None
        before, outranked = self.turns.lapsed.get(run.id), self.turns.outranked_by(run, self.hosts)
        if before is None and outranked is None:
            if reservation.may_be_planned(run, self.hosts, self.job_usage):
                self.turns.want(run, self.hosts)
            return None
        planned = reservation.plan_reservation(run, self.hosts, self.job_usage, self.now, self.reserve_for_s)
        if planned is None or (before is not None and planned.starts_at is None):
            return None
        if outranked is None:
            self.turns.want(run, self.hosts)
            return None
        made = replace(planned, expires_at=before.expires_at) if before else planned
        self.reserve(made, instead_of=outranked)
        return made

    def stop(self, ends: Mapping[int, dt.datetime]) -> None:
        """Count runs as stopping; `ends`: by run id, when they are gone at the latest."""
        self._stopping |= ends.keys()
        self._added += [
            replace(used, ends_at=min(used.ends_at or ends[used.job[0]], ends[used.job[0]]), stopping=True)
            for used in self.job_usage
            if used.job[0] in ends
        ]
        self._job_usage = None
        self._unreserved.clear()

    def displaceable_runs(self, queue_id: int) -> list[PlacedRun]:
        """A queue's placed runs without those that this pass has placed; those that it stops are `stopping`."""
        return [
            replace(one, stopping=True) if one.id in self._stopping else one
            for one in self.placed_runs(queue_id)
            if one.id not in self._taken
        ]

    def cohort_runs(self, queue_id: int) -> list[PlacedRun]:
        """Those of all queues of its cohort."""
        cohort = self.queue_usage.cohorts.get(queue_id)
        return [one for other in (cohort.queues if cohort else ()) for one in self.displaceable_runs(other)]

    def limits_after_stops(self, run: WaitingRun) -> list[Wait]:
        """The limits that the run would exceed once all runs of its cohort have ended that are stopping already."""
        stopping = [one.counted for one in self.cohort_runs(run.queue_id) if one.stopping]
        with self.queue_usage.without(stopping):
            return self.exceeded_limits(run)

    def review_reservations(self) -> None:
        """Renew the reservations in a new pass, or end them."""
        for reserved in list(self.turns.kept.values()):
            judged = self._review(reserved)
            if isinstance(judged, str):
                self.end_reservation(reserved.run.id, judged)
            else:
                self.reserve(judged)
                if (judged.reclaims and judged.starts_at) or self.waits_for_stopping(judged):
                    self.promise(judged.run)

    def waits_for_stopping(self, reserved: HostReservation) -> bool:
        """Whether it starts when jobs that are stopping have left its hosts."""
        here = (used for used in self.job_usage if used.stopping and used.host_id in reserved.host_ids)
        ends = [used.ends_at for used in here if used.ends_at is not None]
        return bool(ends) and reserved.starts_at is not None and reserved.starts_at <= max(ends)

    def _review(self, reserved: HostReservation) -> HostReservation | ReservationEnd | WaitReason:
        """The renewed reservation, or the code of why it ends."""
        outcome = self.decide(reserved.run)
        if isinstance(outcome, Wait) and outcome.reason not in WAITS_FOR_HOSTS and not self._is_met(reserved, outcome):
            return outcome.reason
        kept = reservation.renew_reservation(reserved, self.hosts, self.job_usage, self.now, self.reserve_for_s)
        # If the reserved nodes are gone, it is still the run's turn: reserve others.
        kept = kept or self._plan_again(reserved)
        if kept is None:
            return ReservationEnd.VANISHED
        if reserved.reclaims:
            kept = self.not_before_limits(kept, reserved.starts_at)
        return ReservationEnd.EXPIRED if kept.has_expired(self.now) else kept

    def _is_met(self, reserved: HostReservation, waits: Wait) -> bool:
        """Whether it waits for a limit that runs which stop for it leave to it."""
        return reserved.reclaims and limits.waits_for_gpu_limit(waits) and not self.limits_after_stops(reserved.run)

    def not_before_limits(self, reserved: HostReservation, before: dt.datetime | None = None) -> HostReservation:
        """With a start no earlier than the end of what its cohort's limits wait for; `before` is its previous start."""
        if reserved.starts_at is None or not self.exceeded_limits(reserved.run):
            return reserved
        stopping = {one.id for one in self.cohort_runs(reserved.run.queue_id) if one.stopping}
        ends = [used.ends_at for used in self.job_usage if used.job[0] in stopping and used.ends_at is not None]
        starts_at = max([reserved.starts_at, *ends])
        return replace(reserved, starts_at=reservation.stable_start(before, starts_at, self.now))

    def _plan_again(self, reserved: HostReservation) -> HostReservation | None:
        """Other nodes, not on hosts of other reservations; the time when it ends stays."""
        others = [other.host_ids for other in self.turns.kept.values() if other.run.id != reserved.run.id]
        hosts = [host for host in self.hosts if not any(host.id in ids for ids in others)]
        made = reservation.plan_reservation(reserved.run, hosts, self.job_usage, self.now, self.reserve_for_s)
        expires_at = reserved.expires_at or (made.expires_at if made else None)
        return replace(made, expires_at=expires_at, reclaims=reserved.reclaims) if made else None

    def binding_reservations(self, run: WaitingRun) -> list[HostReservation]:
        """Those of which the run must use nothing, because it may still run when they start."""
        return [
            reserved
            for reserved in self.turns.kept.values()
            if run.id != reserved.run.id
            and not is_ahead(run, reserved.run)
            and not reservation.may_finish_before(run.spec, reserved, self.now)
        ]

    def unreserved_hosts(self, run: WaitingRun) -> Sequence[HostView]:
        """The hosts without what is reserved and the run must not use."""
        binding = self.binding_reservations(run)
        key = frozenset(reserved.run.id for reserved in binding)
        if key not in self._unreserved:
            hosts = self.hosts
            for reserved in binding:
                hosts = reservation.hosts_without(reserved, hosts, self.job_usage)
            self._unreserved[key] = hosts
        return self._unreserved[key]

    def reservation_against(self, run: WaitingRun) -> HostReservation | None:
        """The reservation that keeps the run from where it fits now: its best place, else any."""
        binding = self.binding_reservations(run)
        if not binding or not may_use_hosts(run.spec):
            return None
        outcome = place_on_hosts(run.spec, self.hosts)
        best = {fit.host_id for fit in outcome.fits} if isinstance(outcome, HostPlacement) else set()
        beside = {host.id: host for host in self.unreserved_hosts(run)}
        for ids in (best, {host.id for host in self.hosts}):
            kept = {
                host.id
                for host in self.hosts
                if host.id in ids and len(fit_nodes(run.spec, [host])) > len(fit_nodes(run.spec, [beside[host.id]]))
            }
            found = [reserved for reserved in binding if reserved.host_ids & kept]
            if found:
                return min(found, key=lambda reserved: (reserved.until or self.now, reserved.run.id))
        return None

    def _anywhere(self, run: WaitingRun) -> HostPlacement | OfferPlacement | Wait:
        here = self._on_hosts(run) if may_use_hosts(run.spec) else None
        if isinstance(here, HostPlacement) and not offers.named_place(run.spec, HOSTS):
            return here
        there = self._on_offers(run)
        if isinstance(here, HostPlacement):
            return there if isinstance(there, OfferPlacement) and offers.precedes_hosts(run.spec, there) else here
        if isinstance(there, OfferPlacement):
            return there
        found = [waits for waits in (here, there) if waits is not None]
        # One of them must be resolved: the least permanent, the first of equals.
        no_backend = Wait(WaitReason.BACKEND_UNAVAILABLE, {"code": Unavailable.NO_BACKEND})
        return max(found, key=lambda waits: waits.reason.place, default=no_backend)

    def _on_hosts(self, run: WaitingRun) -> HostPlacement | Wait:
        outcome = place_on_hosts(run.spec, self.hosts)
        if isinstance(outcome, Wait):
            if outcome.reason == WaitReason.WAITING_FOR_CAPACITY:
                return Wait(outcome.reason, {**outcome.data, **self._until(run.spec, outcome.data)})
            return outcome
        if not self.binding_reservations(run):
            return outcome
        beside = place_on_hosts(run.spec, self.unreserved_hosts(run))
        if isinstance(beside, Wait):
            against = self.reservation_against(run)
            return Wait(WaitReason.RESERVED_FOR_OTHER, reservation.reserved_data(run, against)) if against else beside
        left = {host.id: host for host in self.hosts}
        for made in beside.fits:
            left[made.host_id] = taken(left[made.host_id], made)
        return HostPlacement(beside.fits, tuple(left.values()))

    def _on_offers(self, run: WaitingRun) -> OfferPlacement | Wait | None:
        asked = self.offers_for(run)
        if not asked.offers and not asked.failed and may_use_hosts(run.spec):
            return None
        outcome = offers.choose_offers(run.spec, asked, self.used)
        if isinstance(outcome, Wait) or not outcome.price:
            return outcome
        budget = self.budget_of(run.project_id)
        if budget is None or not budget.is_spent:
            return outcome
        free = replace(asked, offers=tuple(offer for offer in asked.offers if not offer.price))
        without = offers.choose_offers(run.spec, free, self.used)
        return without if isinstance(without, OfferPlacement) else Wait(WaitReason.BUDGET_LIMIT, budget_data(budget))

    def _until(self, spec: EffectiveSpec, data: Mapping[str, Any]) -> dict[str, Any]:
        """When enough GPUs are free at the latest on the host that comes closest."""
        if spec.nodes > 1 or "gpus" not in data.get("short", ()):
            return {}
        host = next(host for host in self.hosts if host.name == data["host"])
        wanted = {gpu.uuid for gpu in gpus_matching(host, spec.requirements) if gpu.held and gpu.stranger is None}
        missing = data["gpus"] - data["gpus_free"]
        ends = sorted(
            holder.ends_at for holder in self.job_usage if holder.ends_at is not None for _ in holder.gpus & wanted
        )
        if len(ends) < missing:
            return {}
        return {"busy": missing, "busy_until": rounded_up(ends[missing - 1]).isoformat()}


def rounded_up(at: dt.datetime) -> dt.datetime:
    """The next multiple of UNTIL_STEP_S."""
    return dt.datetime.fromtimestamp(-(-at.timestamp() // UNTIL_STEP_S) * UNTIL_STEP_S, tz=dt.UTC)
