"""The project's cloud instances: their runs, their cost, and terminating idle ones."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.db.models import Q
from django.http import HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from dstackweb.accounts.access import allows
from dstackweb.backends import registry
from dstackweb.backends.contract import Availability, Offer
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.lib.errors import Conflict, NotFound
from dstackweb.runs.models import Job, Run
from dstackweb.scheduler.cloud import idle
from dstackweb.web.cloud import budget, offer_rows
from dstackweb.web.common.pages import PageRequest, done, fingerprint, polled, project_page
from dstackweb.wording import offers, statuses
from dstackweb.wording.events import REPEATED

POLL_S = 3
GONE_SHOWN = 12
GONE_FOR = dt.timedelta(hours=24)
HOUR_S = Decimal(3600)
TONES = {"requested": "info", "starting": "info", "running": "go", "stopping": "wait", "gone": "info"}


@dataclass(frozen=True)
class InstanceLine:
    """One instance as a row; `cost` is in USD up to now."""

    of: Instance
    gpu: str
    status: str
    tone: str
    run: Run | None
    cost: Decimal
    why: str
    error: str

    @classmethod
    def make(cls, machine: Instance, run: Run | None, now: dt.datetime) -> InstanceLine:
        """The row; `run` is the one it serves, or served last."""
        idle = machine.status == InstanceStatus.RUNNING and machine.holder is None
        status = _("idle") if idle else _STATUS[machine.status]()
        tone = "wait" if idle or machine.interrupted_at else TONES[machine.status]
        told = statuses.instance_end(machine.why) if machine.why else ""
        failed = machine.error_detail
        error = machine.error or (offers.failure(machine.backend.kind, failed) if failed else "")
        return cls(machine, _gpu(machine), status, tone, run, cost(machine, now), told, error)

    @property
    def idle(self) -> bool:
        """Whether it runs without a job."""
        return self.of.status == InstanceStatus.RUNNING and self.of.holder is None

    @property
    def grows(self) -> bool:
        """Whether it is being billed."""
        return self.of.launched_at is not None and self.of.ended_at is None


_STATUS = {
    "requested": lambda: _("requested"),
    "starting": lambda: _("starting"),
    "running": lambda: _("running"),
    "stopping": lambda: _("terminating"),
    "gone": lambda: _("terminated"),
}


def _gpu(machine: Instance) -> str:
    return offer_rows.gpu(
        Offer(
            backend="", instance_type=machine.instance_type, cpus=0, memory_mib=0, availability=Availability.UNKNOWN,
            gpu_name=machine.gpu_name, gpu_count=machine.gpu_count, gpu_memory_mib=machine.gpu_memory_mib,
        )
    )  # fmt: skip


def cost(machine: Instance, now: dt.datetime) -> Decimal:
    """USD from its launch to its end, or to now; by the second, at the price it was launched at."""
    if machine.launched_at is None:
        return Decimal(0)
    seconds = ((machine.ended_at or now) - machine.launched_at).total_seconds()
    return machine.price * Decimal(str(max(0.0, seconds))) / HOUR_S


@project_page()
def instances_page(request: PageRequest) -> HttpResponse:
    """Current and recently terminated instances; also answers the page's polls."""
    now = timezone.now()
    there = list(_instances_of(request).exclude(status=InstanceStatus.GONE).select_related("backend"))
    lately = Q(ended_at__gt=now - GONE_FOR) | Q(ended_at=None, created_at__gt=now - GONE_FOR)
    went, refused = _instances_of(request).filter(lately, status=InstanceStatus.GONE), Q(cloud_id="", why__in=REPEATED)
    gone = list(went.exclude(refused).select_related("backend").order_by("-created_at")[:GONE_SHOWN])
    refusals = went.filter(refused).count()
    shown = [
        (one.pk, one.status, one.holder, one.why, one.cloud_id, one.launched_at, one.idle_until, one.interrupted_at)
        for one in [*there, *gone]
    ]
    marks = budget.passed(request.project, now)
    version = fingerprint(shown, refusals, [mark.pk for mark in marks])

    def context() -> dict[str, Any]:
        runs = _runs([*there, *gone])
        lines = [InstanceLine.make(one, runs.get(one.pk), now) for one in there]
        return {
            "lines": lines,
            "gone": [InstanceLine.make(one, runs.get(one.pk), now) for one in gone],
            "idle": sum(line.idle for line in lines),
            "refusals": refusals,
            "by_status": Counter(line.status for line in lines).items(),
            "month": budget.month(request.project, now),
            "marks": marks,
            "may_stop": allows(request.role, "admin"),
            "has_clouds": Backend.objects.filter(enabled=True).exclude(kind__in=registry.host_kinds()).exists(),
            "may_submit": allows(request.role, "member"),
            "now": now,
            "poll_s": POLL_S,
        }

    return polled(request, "cloud/instances.html", "cloud/instances_body.html", version, context)


def _instances_of(request: PageRequest) -> Any:
    return Instance.objects.filter(project=request.project)


def _runs(machines: Iterable[Instance]) -> dict[UUID, Run]:
    """The run that each instance serves, or served last."""
    jobs = Job.objects.filter(instance__in=[one.pk for one in machines]).select_related("run").order_by("placed_at")
    return {job.instance_id: job.run for job in jobs if job.instance_id}


@require_POST
@project_page("admin")
def stop(request: PageRequest, machine: UUID) -> HttpResponse:
    """Terminate an idle instance."""
    found = _instances_of(request).filter(pk=machine).first()
    if found is None:
        raise NotFound(_("no such instance in this project"))
    if not idle.end(found.pk):
        raise Conflict(_("the instance is in use or already terminating; to end it, stop its run"))
    return done(
        request, _("Terminating %s") % found.instance_type, reverse("web:machines", args=[request.project.name])
    )
