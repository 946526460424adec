"""The team's machines as people see them: what each has, who holds it, and for whom it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import Count, Prefetch, prefetch_related_objects

from dstackweb.backends.hosts.views import is_online
from dstackweb.backends.models import Gpu, Host, HostEvent
from dstackweb.runs.models import Job, Run
from dstackweb.runs.selectors import hosts_with_holders
from dstackweb.runs.states import JOB_ACTIVE
from dstackweb.scheduler.models import Reservation


@dataclass(frozen=True)
class Kept:
    """What a host keeps for a run that waits. `gpus` are UUIDs."""

    run: Run
    cpus: int
    memory_mib: int
    gpus: frozenset[str]


@dataclass(frozen=True)
class Listed:
    """One host: its GPUs by index with the run that holds each, its active jobs, what it keeps, its newest events."""

    host: Host
    online: bool
    gpus: Sequence[tuple[Gpu, Run | None]]
    jobs: int
    kept: Kept | None
    events: Sequence[HostEvent] = ()

    @property
    def gpus_total(self) -> int:
        """GPUs that are there now."""
        return sum(gpu.present for gpu, _run in self.gpus)

    @property
    def gpus_used(self) -> int:
        """Of these, those that a job holds or somebody uses outside dstackweb."""
        return sum(gpu.present and (run is not None or gpu.stranger is not None) for gpu, run in self.gpus)


def listed(name: str = "", *, events: int = 0) -> list[Listed]:
    """Every host that has not left (or the one called `name`), by name, with so many of its newest events; few queries
    however many there are."""
    jobs = dict(Job.objects.filter(status__in=JOB_ACTIVE).values_list("host").annotate(Count("pk")).order_by())
    kept, found = _kept(), hosts_with_holders(name)
    newest = _newest([host for host, _gpus in found], events) if events else {}
    return [
        Listed(host, is_online(host), gpus, jobs.get(host.pk, 0), kept.get(host.pk), newest.get(host.pk, ()))
        for host, gpus in found
    ]


def _newest(hosts: Sequence[Host], events: int) -> dict[int, list[HostEvent]]:
    recent = HostEvent.objects.select_related("actor")[:events]
    prefetch_related_objects(hosts, Prefetch("events", queryset=recent, to_attr="newest"))
    return {host.pk: getattr(host, "newest", []) for host in hosts}


def _kept() -> dict[int, Kept]:
    """By host; a run that has several nodes on one host has their sum kept."""
    reservation = Reservation.objects.select_related("run__project").first()
    found: dict[int, Kept] = {}
    if reservation is None:
        return found
    for node in reservation.nodes:
        before = found.get(node["host_id"], Kept(reservation.run, 0, 0, frozenset()))
        found[node["host_id"]] = Kept(
            reservation.run,
            before.cpus + node["cpus"],
            before.memory_mib + node["memory_mib"],
            before.gpus | set(node["gpus"]),
        )
    return found
