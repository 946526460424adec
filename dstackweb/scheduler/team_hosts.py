"""The team's hosts as people see them: what each has, which runs hold it, and what is reserved; and what admins do
about one that is held back, or whose machine is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import Count, Prefetch
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import User
from dstackweb.backends.hosts import inventory
from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Gpu, Host, HostEvent, HostEventKind
from dstackweb.lib.errors import Conflict, Invalid
from dstackweb.runs import wakeups
from dstackweb.runs.attempts import end_job, return_job
from dstackweb.runs.codes import MessageCode
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.selectors import TEXTS
from dstackweb.runs.states import JOB_ACTIVE, Reason
from dstackweb.scheduler.models import Reservation

MAX_REASON = 300
"""Characters."""


@dataclass(frozen=True)
class ReservedCapacity:
    """What is reserved on a host for a waiting run. `gpus` are UUIDs."""

    run: Run
    cpus: int
    memory_mib: int
    gpus: frozenset[str]


@dataclass(frozen=True)
class HostSummary:
    """One host: its GPUs by index, each with the run that holds it, its active jobs, reservation and newest events."""

    host: Host
    online: bool
    gpus: Sequence[tuple[Gpu, Run | None]]
    jobs: int
    kept: ReservedCapacity | None
    events: Sequence[HostEvent] = ()

    @property
    def gpus_total(self) -> int:
        """GPUs present now."""
        return sum(gpu.present for gpu, _run in self.gpus)

    @property
    def gpus_used(self) -> int:
        """Present GPUs that a job holds, or that are used outside dstackweb."""
        return sum(gpu.present and (run is not None or gpu.stranger is not None) for gpu, run in self.gpus)


def list_hosts(name: str = "", *, events: int = 0) -> list[HostSummary]:
    """All hosts that have not left, or the one called `name`, each with its `events` newest events; a fixed number of
    queries."""
    jobs = dict(Job.objects.filter(status__in=JOB_ACTIVE).values_list("host").annotate(Count("pk")).order_by())
    kept = _reserved_by_host()
    hosts = Host.joined.filter(**({"name": name} if name else {}))
    holders = {
        allocation.gpu_id: allocation.job.run
        for allocation in Allocation.objects.filter(gpu__isnull=False, host__in=hosts)
        .select_related("job__run__project", "job__run__user")
        .defer(*(f"job__run__{name}" for name in (*TEXTS, "spec")))
    }
    shown = hosts.prefetch_related("gpus").order_by("name")
    if events:
        recent = HostEvent.objects.select_related("actor")[:events]
        shown = shown.prefetch_related(Prefetch("events", queryset=recent, to_attr="newest"))
    return [
        HostSummary(
            host,
            is_online(host),
            [(gpu, holders.get(gpu.pk)) for gpu in host.gpus.all()],
            jobs.get(host.pk, 0),
            kept.get(host.pk),
            getattr(host, "newest", ()),
        )
        for host in shown
    ]


def _reserved_by_host() -> dict[int, ReservedCapacity]:
    """What is reserved, by host id; several nodes on one host are added up."""
    found: dict[int, ReservedCapacity] = {}
    for reservation in Reservation.kept():  # no host is in two of them
        for node in reservation.nodes:
            before = found.get(node["host_id"], ReservedCapacity(reservation.run, 0, 0, frozenset()))
            found[node["host_id"]] = ReservedCapacity(
                reservation.run,
                before.cpus + node["cpus"],
                before.memory_mib + node["memory_mib"],
                before.gpus | set(node["gpus"]),
            )
    return found


def take_jobs_again(host: Host, by: User) -> None:
    """Place jobs on a host that is held back because starts failed."""
    if inventory.clear_failed_starts(host.pk, timezone.now(), by=by):
        wakeups.request_pass()
    host.refresh_from_db()


def declare_gone(host: Host, by: User, reason: str) -> int:
    """End all jobs of a host whose machine will not come back, and free what they held; returns how many.

    Runs end, are retried or go back to the queue as after any other loss. A job's runner that does come back is
    refused, and stops its commands. Raises Invalid without a reason, Conflict while the host is online: its jobs may
    still use its GPUs.
    """
    reason = reason.strip()
    if not reason:
        raise Invalid.at("reason", msg=_("say how you know that the machine is gone"))
    if len(reason) > MAX_REASON:
        raise Invalid.at("reason", msg=_("at most %(max_reason)s characters") % {"max_reason": MAX_REASON})
    host.refresh_from_db()
    if is_online(host):
        raise Conflict(
            _("%(host)s is online, so its jobs may still use its GPUs. Stop their runs instead") % {"host": host.name}
        )
    detail = {"code": MessageCode.GIVEN_UP, "host": host.name, "by": by.username, "reason": reason}
    ended = 0
    for job_id in Job.objects.filter(host=host, status__in=JOB_ACTIVE).order_by("pk").values_list("pk", flat=True):
        ended += return_job(job_id, detail=detail) or end_job(job_id, Reason.INSTANCE_UNREACHABLE, detail=detail)
    data = {"reason": reason, "jobs": ended}
    HostEvent.objects.create(host=host, kind=HostEventKind.GONE, actor=by, data=data)
    return ended
