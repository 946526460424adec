"""What would happen to a submission, without storing anything: settings, offers, place in the queue, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import Offer
from dstackweb.backends.hosts.fit import host_offers
from dstackweb.backends.hosts.views import host_views
from dstackweb.runs import ordering
from dstackweb.runs.selectors import position_at
from dstackweb.runs.queues import now_us
from dstackweb.runs.services import Prepared, Submission, prepare
from dstackweb.scheduler.placement import Waits, is_named, place


@dataclass(frozen=True)
class Plan:
    """`waits` is None when the run could start at once, were it first in line."""

    prepared: Prepared
    offers: Sequence[Offer]
    position: int
    waits: Waits | None

    @property
    def impossible(self) -> bool:
        """No registered host could ever fit it."""
        return self.waits is not None and self.waits.reason == "impossible"


def plan(project: Project, user: User, role: str, submission: Submission) -> Plan:
    """Plan a submission. Raises what `services.prepare` raises."""
    prepared = prepare(project, user, role, submission)
    spec, queue = prepared.effective.spec, prepared.queue
    hosts = host_views()
    outcome = place(spec, hosts)
    seniority = ordering.next_seniority(now_us(), queue.last_seniority_us)
    rank = ordering.rank(seniority, spec.priority, queue.step_us)
    return Plan(
        prepared=prepared,
        offers=host_offers([host for host in hosts if is_named(spec, host)], spec.requirements, image=spec.image),
        position=position_at(queue, rank, None),
        waits=outcome if isinstance(outcome, Waits) else None,
    )
