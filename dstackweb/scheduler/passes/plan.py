"""Plans a submission without storing it: settings, offers, position in the queue, why it would wait."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import Offer
from dstackweb.backends.hosts.fit import host_offers
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import Queue
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.queues import now_us
from dstackweb.runs.schedule import next_time
from dstackweb.runs.selectors import position_at
from dstackweb.runs.services import PreparedSubmission, Submission, prepare
from dstackweb.scheduler.cloud.backend_offers import OfferReader
from dstackweb.scheduler.passes import loading
from dstackweb.scheduler.passes.reservations import load_reservation
from dstackweb.scheduler.placement import offers
from dstackweb.scheduler.placement.capacity import Capacity, may_use_hosts, most_permanent
from dstackweb.scheduler.placement.hosts import Wait, WaitingRun, allows_host


@dataclass(frozen=True)
class Plan:
    """`waits` is None when the run could start at once if it were first in its queue.

    A run with a schedule enters its queue `next_at`, and has no `position` until then.
    """

    prepared: PreparedSubmission
    offers: Sequence[Offer]
    position: int | None
    next_at: dt.datetime | None
    waits: Wait | None

    @property
    def impossible(self) -> bool:
        """Whether nothing that is set up could ever provide it."""
        return self.waits is not None and self.waits.reason == WaitReason.IMPOSSIBLE


def plan(project: Project, user: User, role: str, submission: Submission) -> Plan:
    """Plan a submission. Raises what `services.prepare` raises."""
    prepared = prepare(project, user, role, submission)
    spec, queue, now = prepared.effective.spec, prepared.queue, timezone.now()
    seniority = ordering.next_seniority(now_us(), queue.last_seniority_us)
    rank = ordering.rank(seniority, spec.priority, queue.step_us)
    run = WaitingRun(
        id=sys.maxsize,
        name=spec.name or "",
        project_id=project.pk,
        project=project.name,
        queue_id=queue.pk,
        user_id=user.pk,
        rank=rank,
        queued_at=now,
        spec=spec,
    )
    kept = load_reservation()
    capacity = loading.load_capacity([queue], OfferReader(), now, kept.reserved if kept else None)
    next_at = next_time(spec.schedule.cron, now) if spec.schedule else None
    position = None if next_at else position_at(queue, rank, None)
    return Plan(prepared, _offers(run, capacity), position, next_at, _waits(run, queue, capacity))


def _waits(run: WaitingRun, queue: Queue, capacity: Capacity) -> Wait | None:
    """Why it would wait now, whatever its position."""
    outcome = capacity.decide(run)
    found = [Wait(WaitReason.QUEUE_PAUSED)] if queue.paused else []
    if isinstance(outcome, Wait):
        found.append(outcome)
    return most_permanent(found) if found else None


def _offers(run: WaitingRun, capacity: Capacity) -> list[Offer]:
    """Allowed hosts as offers, then offers of other backends, cheapest first."""
    spec = run.spec
    hosts = [host for host in capacity.hosts if allows_host(spec, host)] if may_use_hosts(spec) else []
    found = host_offers(hosts, spec.requirements, image=spec.image)
    return found + offers.acceptable_offers(spec, capacity.offers_for(run))
