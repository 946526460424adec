"""All kept counters and sums beside a recount (DESIGN 3, rule 7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.db.models import Count, Sum

from dstackweb.backends.models import Host
from dstackweb.runs.models import Allocation, Job, QueueCount, Run
from dstackweb.runs.states import JOB_ENDED, RunStatus


@dataclass(frozen=True)
class Difference:
    """A counter that says `kept` where a recount gives `counted`."""

    what: str
    kept: int
    counted: int

    def __str__(self) -> str:
        return f"{self.what}: kept {self.kept}, counted {self.counted}"


def differences() -> Iterator[Difference]:
    """Everything that disagrees. Consistent only while nothing moves, or inside one snapshot."""
    yield from _queues()
    yield from _hosts()
    orphans = Allocation.objects.filter(job__status__in=JOB_ENDED).count()
    if orphans:
        yield Difference("allocations of ended jobs", orphans, 0)
    missing = Job.objects.exclude(status__in=JOB_ENDED).filter(allocations=None, backend__kind="hosts").count()
    if missing:
        yield Difference("active jobs that hold nothing", missing, 0)


def _queues() -> Iterator[Difference]:
    counted = {
        (row["queue"], row["status"]): row["n"]
        for row in Run.objects.order_by().values("queue", "status").annotate(n=Count("pk"))
    }
    for row in QueueCount.objects.select_related("queue__project"):
        for status in RunStatus:
            kept, real = getattr(row, status.value), counted.get((row.queue_id, status.value), 0)
            if kept != real:
                yield Difference(f"queue {row.queue} {status.value}", kept, real)


def _hosts() -> Iterator[Difference]:
    sums = Host.objects.annotate(cpus_real=Sum("allocations__cpus"), memory_real=Sum("allocations__memory_mib"))
    for host in sums:
        if host.cpus_used != (host.cpus_real or 0):
            yield Difference(f"host {host.name} CPUs", host.cpus_used, host.cpus_real or 0)
        if host.memory_used_mib != (host.memory_real or 0):
            yield Difference(f"host {host.name} memory (MiB)", host.memory_used_mib, host.memory_real or 0)
