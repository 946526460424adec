"""Idle cloud instances, kept for the next run of the same project: listed as offers, taken, ended early."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Sequence
from uuid import UUID

from dstackweb.backends.contract import Availability, InstanceEnd, Offer
from dstackweb.backends.models import Instance, InstanceStatus

SILENT_S = 60.0
"""An instance silent for longer is not offered: it may be gone."""
SPARE_S = 15.0
"""An instance with less idle time left is not offered: it may end before its agent polls."""


def reader(now: dt.datetime) -> Callable[[int], Sequence[Offer]]:
    """A function that returns a project's idle instances as offers. Rows are read once, on the first call."""
    read: dict[int, list[Offer]] | None = None

    def of_project(project_id: int) -> Sequence[Offer]:
        nonlocal read
        if read is None:
            read = _by_project(now)
        return read.get(project_id, ())

    return of_project


def _by_project(now: dt.datetime) -> dict[int, list[Offer]]:
    found: defaultdict[int, list[Offer]] = defaultdict(list)
    # `exclude(GONE)` matches a partial index: without it SQLite scans all instances there ever were.
    there = Instance.objects.select_related("backend").exclude(status=InstanceStatus.GONE)
    kept = there.filter(
        status=InstanceStatus.RUNNING,
        holder=None,
        interrupted_at=None,
        silent_s__lt=SILENT_S,
        idle_until__gt=now + dt.timedelta(seconds=SPARE_S),
        backend__enabled=True,
        backend__deleted_at=None,
    )
    for instance in kept.order_by("created_at", "pk"):
        if len(instance.gpus) >= instance.gpu_count:
            found[instance.project_id].append(_offer(instance))
    return dict(found)


def _offer(instance: Instance) -> Offer:
    return Offer(
        backend=instance.backend.name,
        region=instance.region,
        instance_type=instance.instance_type,
        cpus=instance.cpus,
        memory_mib=instance.memory_mib,
        gpu_name=instance.gpu_name,
        gpu_count=instance.gpu_count,
        gpu_memory_mib=instance.gpu_memory_mib,
        spot=instance.is_spot,
        price=instance.price,
        availability=Availability.IDLE,
        detail={"code": "idle_instance", "instance": str(instance.pk), "fits": 1},
    )


def take(instance_id: UUID, job_id: UUID, project_id: int, now: dt.datetime) -> bool:
    """Give an idle instance to a job of its project; False when it is no longer idle. Call inside a transaction."""
    idle = Instance.objects.filter(
        pk=instance_id,
        project=project_id,
        status=InstanceStatus.RUNNING,
        holder=None,
        interrupted_at=None,
        idle_until__gt=now,
    )
    return bool(idle.update(holder=job_id, idle_since=None, idle_until=None, status_s=0))


def end(instance_id: UUID) -> bool:
    """End an idle instance early. Returns False, changing nothing, when it has a job or is ending already."""
    idle = Instance.objects.filter(pk=instance_id, status=InstanceStatus.RUNNING, holder=None)
    return bool(idle.update(status=InstanceStatus.STOPPING, why=InstanceEnd.STOPPED, idle_until=None, status_s=0))
