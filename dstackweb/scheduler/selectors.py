"""The team's hosts as people see them: what each has, which runs hold it, and what is reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import Count, Prefetch

from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Gpu, Host, HostEvent
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.selectors import TEXTS
from dstackweb.runs.states import JOB_ACTIVE
from dstackweb.scheduler.models import Reservation


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
    """All hosts that have not left, by name, or the one called `name`; each with its `events` newest events.

    The number of queries does not depend on the number of hosts.
    """
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
