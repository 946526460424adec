"""What a pass would decide now, by the same functions: on a waiting run, with each candidate place, and on a
submission. Stores nothing."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from django.utils import timezone
from pydantic import ValidationError

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import Offer, PlaceCode
from dstackweb.backends.hosts.fit import HOSTS, HostView, Miss, fit, host_offers
from dstackweb.runs import dependencies, pipelines
from dstackweb.runs.codes import PlanNote, Unavailable, WaitReason
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import member_shares, ordering
from dstackweb.runs.queue.ordering import NO_PENALTY, Penalty
from dstackweb.runs.queue.queues import may_be_displaced, now_us
from dstackweb.runs.recurrence import next_time
from dstackweb.runs.selectors import position_at
from dstackweb.runs.services import PreparedSubmission, Submission, prepare
from dstackweb.runs.states import RunStatus
from dstackweb.runs.sweeps.creation import first_runs
from dstackweb.scheduler.cloud.backend_offers import OfferReader, project_budget
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes import loading
from dstackweb.scheduler.placement import offers
from dstackweb.scheduler.placement.capacity import Capacity
from dstackweb.scheduler.placement.displacing import Displacer, WorkBudget, is_reclaim
from dstackweb.scheduler.placement.hosts import (
    PlacedRun,
    Wait,
    WaitingRun,
    by_permanence,
    fit_nodes,
    host_refusal,
    may_use_hosts,
)
from dstackweb.scheduler.placement.limits import Budget, gpus_requested
from dstackweb.scheduler.placement.reservation import ReservedNode
from dstackweb.spec import labels
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.env import is_weak


@dataclass(frozen=True)
class Candidate:
    """A place that was considered: `fits`, or a code with its numbers (`wording.places.tried`). `where` is a host's
    name, or region and instance type; empty for a backend that can't be asked at all."""

    backend: str
    where: str
    code: PlaceCode
    data: dict[str, Any] = field(default_factory=dict)
    price: Decimal | None = None


@dataclass(frozen=True)
class Decision:
    """`outcome` is a reason with its numbers in `data`; `starting` where it fits, `not_waiting` outside the queue.

    `blockers` are all that hold it up, the most permanent first, which is the outcome. `budget` is the project's where
    the run may cost money, and `reservation` what is kept for this run or, where that matters to it, for another.
    """

    outcome: WaitReason
    data: Mapping[str, Any]
    candidates: list[Candidate]
    at: dt.datetime
    reservation: VisibleReservation | None = None
    blockers: list[Wait] = field(default_factory=list)
    budget: Budget | None = None
    displaces: Sequence[PlacedRun] = ()
    """Whom it will displace once no run ahead of it waits for the same hosts."""
    reclaims: bool = False
    """Whether it then takes back what its queue has lent."""
    work_budget: WorkBudget | None = None
    """Its member's budget for that, where its queue has one."""

    @property
    def limits(self) -> list[Wait]:
        """The limits of its queue among the blockers."""
        return [waits for waits in self.blockers if waits.reason in (WaitReason.USER_LIMIT, WaitReason.QUEUE_LIMIT)]

    @property
    def fits(self) -> bool:
        """Whether the next pass that reaches the run places it."""
        return self.outcome == WaitReason.STARTING


@dataclass(frozen=True)
class VisibleReservation:
    """A reservation for a reader: `run` is None if they may not see it."""

    run: Run | None
    starts_at: dt.datetime | None
    expires_at: dt.datetime | None
    nodes: tuple[ReservedNode, ...]


def visible_reservation(run_id: int, projects: Collection[int]) -> VisibleReservation | None:
    """The reservation of a run for a reader of these projects."""
    row = Reservation.kept().filter(run=run_id).first()
    if row is None:
        return None
    run = row.run if row.run.project_id in projects else None
    nodes = tuple(ReservedNode.from_row(node) for node in row.nodes)
    return VisibleReservation(run, row.starts_at, None if row.starts_at else row.expires_at, nodes)


def decide_now(run: Run) -> Decision:
    """What a pass would decide on this run (read with its queue and project) if it were its turn."""
    now = timezone.now()
    if run.status != RunStatus.SUBMITTED:
        return Decision(WaitReason.NOT_WAITING, {}, [], now)
    try:
        spec = EffectiveSpec.model_validate(run.spec)
    except ValidationError:
        return Decision(WaitReason.BACKEND_UNAVAILABLE, {"code": Unavailable.UNREADABLE}, [], now)
    _reader, capacity = loading.load_present([run.queue])
    waiting = loading.waiting_run(run, run.queue, spec)
    blockers = _blockers(waiting, run.queue, capacity)
    first = blockers[0] if blockers else Wait(WaitReason.STARTING)
    candidates = list(list_candidates(waiting, capacity))
    displacer = Displacer(capacity)
    displaces = displacer.would_displace(waiting, run.priority, first)
    reserved = capacity.turns.kept.get(run.pk) or capacity.reservation_against(waiting)
    return Decision(
        outcome=first.reason,
        data=first.data,
        candidates=candidates,
        at=now,
        reservation=visible_reservation(reserved.run.id, [run.project_id]) if reserved else None,
        blockers=blockers,
        budget=project_budget(run.project_id, now) if any(one.price for one in candidates) else None,
        displaces=displaces,
        reclaims=is_reclaim(run.queue_id, displaces),
        work_budget=displacer.work_budget(waiting, displaces),
    )


MAX_FORESEEN = 20
"""Shapes whose waits in another queue are foreseen."""


def foresee_waits(entries: Sequence[Run]) -> list[tuple[Run, Wait | None]]:
    """Why the first run of each shape would wait in the queue that it is shown in, whatever its position: the most
    permanent reason, None if it could start. All are of one queue; of the first MAX_FORESEEN shapes."""
    firsts = {run.shape: run for run in reversed(entries) if run.status == RunStatus.SUBMITTED}
    runs = sorted(firsts.values(), key=lambda run: (run.rank, run.pk))[:MAX_FORESEEN]
    if not runs:
        return []
    queue = runs[0].queue
    _reader, capacity = loading.load_present([queue])
    return [(run, _foreseen(run, queue, capacity)) for run in runs]


def _foreseen(run: Run, queue: Queue, capacity: Capacity) -> Wait | None:
    try:
        spec = EffectiveSpec.model_validate(run.spec)
    except ValidationError:
        return Wait(WaitReason.BACKEND_UNAVAILABLE, {"code": Unavailable.UNREADABLE})
    return next(iter(_blockers(loading.waiting_run(run, queue, spec), queue, capacity)), None)


def list_candidates(run: WaitingRun, capacity: Capacity) -> Iterator[Candidate]:
    """Every host, then every offer, in the order of preference."""
    if may_use_hosts(run.spec):
        for host, beside in zip(capacity.hosts, capacity.unreserved_hosts(run), strict=True):
            yield _host_candidate(run.spec, host, beside)
    asked = capacity.offers_for(run)
    for name, code in sorted(asked.failed.items()):
        yield Candidate(name, "", PlaceCode(code))
    for offer in sorted(asked.offers, key=lambda offer: (offers.refusal(run.spec, offer) is not None, offer.price)):
        yield _offer_candidate(run.spec, offer)


def _host_candidate(spec: EffectiveSpec, host: HostView, beside: HostView) -> Candidate:
    """`beside` is the host without what is reserved for another run."""
    if (why := host_refusal(spec, host)) is not None:
        return Candidate(HOSTS, host.name, why, _refusal_data(spec, why))
    outcome = fit(host, spec.requirements)
    if isinstance(outcome, Miss):
        return Candidate(HOSTS, host.name, outcome.code, outcome.data)
    nodes = len(fit_nodes(spec, [beside]))
    code = PlaceCode.FITS if nodes else PlaceCode.RESERVED
    return Candidate(HOSTS, host.name, code, {"nodes": nodes, "of": spec.nodes}, Decimal(0))


def _refusal_data(spec: EffectiveSpec, why: PlaceCode) -> dict[str, Any]:
    """What the run asks for that a host or offer refused for `why` does not have."""
    match why:
        case PlaceCode.OTHER_REGION:
            return {"asked": list(spec.regions or ())}
        case PlaceCode.OTHER_INSTANCE_TYPE:
            return {"asked": list(spec.instance_types or ())}
        case PlaceCode.HAS_NO_LABELS:
            return {"asked": labels.shown(spec.labels)}
        case PlaceCode.TOO_LITTLE_ISOLATION:
            return {"isolation": spec.least_isolation}
        case PlaceCode.VOLUME_NOT_LISTED:
            return {"asked": [volume.partition(":")[0] for volume in spec.volumes or ()]}
        case PlaceCode.IMAGE_NOT_SUPPORTED:
            return {"image": spec.image}
        case PlaceCode.TOO_EXPENSIVE:
            return {"max_price": spec.max_price}
    return {}


def _offer_candidate(spec: EffectiveSpec, offer: Offer) -> Candidate:
    where = " ".join(filter(None, (offer.region, offer.instance_type, "(spot)" if offer.spot else "")))
    refused = offers.refusal(spec, offer)
    if refused is not None:
        return Candidate(offer.backend, where, refused, _refusal_data(spec, refused), offer.price)
    nodes = offers.nodes_available(offer, {}, spec.nodes)
    code = PlaceCode.FITS if nodes else offers.NOT_NOW.get(offer.availability, PlaceCode.BUSY)
    return Candidate(offer.backend, where, code, {"nodes": nodes, "of": spec.nodes} | dict(offer.detail), offer.price)


@dataclass(frozen=True)
class Outlook:
    """What one backend has for a run now, whether the run may use it (`used`) or not: why it `waits`, if it does, and
    the `price` per hour of all nodes, if there is an offer."""

    backend: str
    used: bool
    waits: Wait | None
    price: Decimal | None

    def order(self, spec: EffectiveSpec) -> tuple[bool, bool, int, Decimal, int, str]:
        """Those that the run may use first; of these the ones that could start, the cheapest first."""
        permanence = -self.waits.reason.place if self.waits else 0
        named = offers.named_place(spec, self.backend)
        return not self.used, self.waits is not None, permanence, self.price or Decimal(0), named, self.backend


@dataclass(frozen=True)
class Plan:
    """`waits` is None when the run could start at once if it were first in its queue.

    A run with a schedule enters its queue `next_at`, one with `after` when others have ended: it has no `position`.
    `share` is the penalty of its member's share now.
    """

    prepared: PreparedSubmission
    share: Penalty
    offers: Sequence[Offer]
    backends: Sequence[Outlook]
    position: int | None
    next_at: dt.datetime | None
    waits: Wait | None
    notes: Sequence[PlanNote]
    at: dt.datetime
    displaces: Sequence[PlacedRun] = ()
    """Whom it would displace once no run ahead of it waits for the same hosts."""
    reclaims: bool = False
    """Whether it would then take back what its queue has lent."""
    work_budget: WorkBudget | None = None

    @property
    def spec(self) -> EffectiveSpec:
        return self.prepared.effective.spec

    @property
    def follows(self) -> dict[str, Any] | None:
        """The detail of the message of a run that waits for the end of others; None otherwise."""
        waits_for = self.prepared.dependencies
        return dependencies.detail(waits_for) if dependencies.waits(waits_for) else None

    @property
    def impossible(self) -> bool:
        """Whether nothing that is set up could ever provide it."""
        return self.waits is not None and self.waits.reason == WaitReason.IMPOSSIBLE


def plan(project: Project, user: User, role: str, submission: Submission) -> Plan:
    """Plan the submission of one run, or of a sweep. Raises what `services.prepare` raises."""
    prepared = prepare(project, user, role, submission)
    return _plan(project, user, submission, prepared, *loading.load_present([prepared.queue]))


def plan_all(project: Project, user: User, role: str, submission: Submission) -> list[Plan]:
    """Plan each run of a file, in the order in which they would be stored. Raises what `pipelines.prepare` raises."""
    steps = pipelines.prepare(project, user, role, submission)
    present = loading.load_present({step.prepared.queue.pk: step.prepared.queue for step in steps}.values())
    plans = [_plan(project, user, step.submission, step.prepared, *present) for step in steps]
    return [replace(one, position=_position_beside(plans, number)) for number, one in enumerate(plans)]


def _position_beside(plans: Sequence[Plan], number: int) -> int | None:
    """A position that counts the runs of the same file which enter the same queue ahead of it."""
    mine = plans[number]

    def is_ahead(other: Plan, at: int) -> bool:
        points = mine.spec.priority - other.spec.priority
        return other.prepared.queue == mine.prepared.queue and (points < 0 or (points == 0 and at < number))

    there = [other for at, other in enumerate(plans) if other.position is not None and is_ahead(other, at)]
    ahead = sum(first_runs(other.spec.array) if other.spec.array else 1 for other in there)
    return None if mine.position is None else mine.position + ahead


def _plan(
    project: Project,
    user: User,
    submission: Submission,
    prepared: PreparedSubmission,
    reader: OfferReader,
    capacity: Capacity,
) -> Plan:
    spec, queue, now = prepared.effective.spec, prepared.queue, capacity.now
    seniority = ordering.next_seniority(now_us(), queue.last_seniority_us)
    follows = dependencies.waits(prepared.dependencies)
    share = NO_PENALTY if follows else member_shares.foresee(queue, user.pk, gpus_requested(spec))
    rank = ordering.rank(seniority, spec.priority, queue.step_us, share.seconds)
    run = WaitingRun(
        id=sys.maxsize,
        name=spec.name or "",
        project_id=project.pk,
        project=project.name,
        queue_id=queue.pk,
        user_id=user.pk,
        rank=rank,
        queued_at=now,
        spec=spec.of_project(project.name, project.least_isolation),
    )
    next_at = next_time(spec.schedule.cron, now) if spec.schedule else None
    position = None if next_at or follows else position_at(queue, rank, None)
    waits, notes = next(iter(_blockers(run, queue, capacity)), None), _notes(prepared, submission)
    displacer = Displacer(capacity)
    displaces = displacer.would_displace(run, spec.priority, waits) if waits and position else ()
    return Plan(
        prepared, share, _offers(run, capacity), _outlooks(run, capacity, reader), position, next_at, waits,
        notes, now, displaces, is_reclaim(queue.pk, displaces), displacer.work_budget(run, displaces),
    )  # fmt: skip


def _outlooks(run: WaitingRun, capacity: Capacity, reader: OfferReader) -> list[Outlook]:
    """The backends that the run uses or could name, the best first."""
    used = {HOSTS, *reader.free()} if run.spec.backends is None else set(run.spec.backends)
    found = (_outlook(run, capacity, name, used=name in used) for name in {HOSTS, *reader.backends, *used})
    return sorted((one for one in found if one is not None), key=lambda one: one.order(run.spec))


def _outlook(run: WaitingRun, capacity: Capacity, name: str, *, used: bool) -> Outlook | None:
    """None for a backend of other projects."""
    outcome = capacity.on_backend(run, name)
    if not isinstance(outcome, Wait):
        return Outlook(name, used, None, outcome.price if isinstance(outcome, offers.OfferPlacement) else Decimal(0))
    if outcome.data.get("code") == Unavailable.OTHER_PROJECT:
        return None
    if name == HOSTS:
        return Outlook(name, used, outcome, None if outcome.reason == WaitReason.IMPOSSIBLE else Decimal(0))
    alone = replace(run, spec=run.spec.model_copy(update={"backends": (name,)}))
    found = offers.acceptable_offers(alone.spec, capacity.offers_for(alone))
    return Outlook(name, used, outcome, found[0].price * run.spec.nodes if found else None)


def _notes(prepared: PreparedSubmission, submission: Submission) -> list[PlanNote]:
    """Settings that do not do what their name promises."""
    spec = prepared.effective.spec
    copied = [submission.env[name] for name in prepared.run_file.masked_env if name in submission.env]
    notes = {
        PlanNote.NOT_PREEMPTED: spec.preemptible and not may_be_displaced(prepared.queue),
        PlanNote.WEAK_VALUE: any(map(is_weak, copied)),
        PlanNote.SERVICE_ENDS: spec.is_service and spec.max_duration_s is not None,
    }
    return [note for note, applies in notes.items() if applies]


def _blockers(run: WaitingRun, queue: Queue, capacity: Capacity) -> list[Wait]:
    """Why it would wait now, whatever its position: all reasons, the most permanent first."""
    paused = [Wait(WaitReason.QUEUE_PAUSED)] if queue.paused else []
    return by_permanence([*paused, *capacity.blockers(run)])


def _offers(run: WaitingRun, capacity: Capacity) -> list[Offer]:
    """Allowed hosts as offers, then offers of other backends, cheapest first."""
    spec = run.spec
    hosts = capacity.hosts if may_use_hosts(spec) else ()
    # `host_offers` lists hosts without containers as not available.
    listed = [host for host in hosts if host_refusal(spec, host) in (None, PlaceCode.IMAGE_NOT_SUPPORTED)]
    found = host_offers(listed, spec.requirements, image=spec.image)
    return found + offers.acceptable_offers(spec, capacity.offers_for(run))
