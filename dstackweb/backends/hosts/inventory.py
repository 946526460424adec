"""The rows of hosts and their GPUs: written by the machines and by admins, read as plain data for decisions."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import User
from dstackweb.backends.hosts.fit import HOSTS, GpuView, HostView
from dstackweb.backends.models import (
    Backend,
    EngineCode,
    Gpu,
    Host,
    HostEvent,
    HostEventKind,
    Isolation,
    Ports,
    StartError,
)
from dstackweb.lib import sql
from dstackweb.lib.errors import Conflict, Invalid, NotFound
from dstackweb.spec.labels import check_labels

if TYPE_CHECKING:
    from dstackweb.runner.isolation import Arrangement
    from dstackweb.runner.machine import GpuProbe, Probe


HOLD_BACK_AFTER = 3
"""Failed starts in a row after which a host is held back until one works: empty, it would get each run next."""


class HasLeft(Exception):
    """An admin removed this host: it stops reporting until it is started again."""


def find(name: str) -> Host:
    """A joined host. Raises NotFound."""
    host = Host.joined.filter(name=name).first()
    if host is None:
        raise NotFound(_("host %(name)s does not exist") % {"name": name})
    return host


def is_online(host: Host) -> bool:
    """Whether the host reported lately. Time in which no watcher ran does not count as silence."""
    return host.seen_at is not None and host.silent_s < settings.DSTACKWEB_HOST_SILENT_S


def may_leave(host: Host) -> bool:
    """Whether it is not a running server's own machine, which would come back."""
    return not host.cluster or not is_online(host)


def runs_containers(host: Host) -> bool:
    """Whether the host has a container engine that can be used."""
    return bool(host.engine) and not host.engine.get("code")


def engine_fails(host: Host) -> bool:
    """Whether the host's container engine failed a job, or its version: it gets no jobs with an image."""
    return bool(host.engine.get("name")) and host.engine.get("code") == EngineCode.FAILED


def host_views(backend: Backend | None = None) -> list[HostView]:
    """The joined hosts of one backend, or of all enabled ones, by name; two queries."""
    hosts = Host.joined.filter(**({"backend__enabled": True} if backend is None else {"backend": backend}))
    gpus = _gpus_by_host()
    return [
        HostView(
            id=host.pk,
            name=host.name,
            online=is_online(host),
            draining=host.draining,
            isolation=host.isolation,
            cpus=host.cpus,
            cpus_free=max(0, host.cpus - host.cpus_used),
            memory_mib=host.memory_mib,
            memory_free_mib=max(0, host.memory_mib - host.memory_used_mib),
            gpus=tuple(gpus[host.pk]),
            labels=host.labels,
            held_back=host.held_back_at is not None,
            has_engine=runs_containers(host),
            volumes=tuple(host.engine.get("volumes", ())),
        )
        for host in hosts.order_by("name")
    ]


def _gpus_by_host() -> defaultdict[int, list[GpuView]]:
    # `allocation` is the reverse side of the row by which a job holds a GPU: at most one.
    rows = (
        Gpu.objects.filter(present=True)
        .order_by("host_id", "index")
        .values_list("host_id", "uuid", "index", "name", "memory_mib", "stranger", "allocation")
    )
    gpus: defaultdict[int, list[GpuView]] = defaultdict(list)
    for host_id, uuid, index, name, memory_mib, stranger, allocation in rows:
        gpus[host_id].append(GpuView(uuid, index, name, memory_mib, held=allocation is not None, stranger=stranger))
    return gpus


def ensure_embedded_backend() -> Backend:
    """The backend of the team's own hosts, created if missing."""
    backend, _ = Backend.objects.get_or_create(name=HOSTS, defaults={"kind": HOSTS})
    return backend


def register(
    name: str,
    *,
    address: str,
    cluster: str,
    probe: Probe,
    arrangement: Arrangement,
    starting: bool = False,
    labels: Mapping[str, str] | None = None,
    agent_version: str = "",
    ports: Ports = Ports.NONE,
) -> Host:
    """Write a machine's hardware and set-up, and count it as seen. A host that comes back keeps its row and GPU rows.

    Claims, the set-up snippet, draining and labels stay, except the `labels` given here. A removed host comes back only
    if it is `starting`; raises HasLeft otherwise.
    """
    machine = {
        "address": address,
        "cluster": cluster,
        "agent_version": agent_version,
        "cpus": probe.cpus,
        "memory_mib": probe.memory_mib,
        "boot_id": probe.boot_id,
        "isolation": arrangement.isolation,
        "cgroups": probe.cgroups,
        "engine": probe.engine,
        "ports": ports,
        "job_user": arrangement.job_user,
        "runs_dir": str(arrangement.runs_dir),
        "error": "; ".join(filter(None, [arrangement.error, probe.error])),
        "seen_at": timezone.now(),
        "silent_s": 0.0,
    }
    if cluster:
        machine["token_digest"] = ""
    with transaction.atomic():
        host, created = Host.objects.update_or_create(
            name=name, defaults=machine, create_defaults={**machine, "backend": ensure_embedded_backend()}
        )
        if host.left_at is not None and not starting:
            raise HasLeft
        if starting:
            if host.left_at is not None:
                host.left_at, host.leaving, host.draining = None, False, False
            host.labels = {**host.labels, **(labels or {})}
            host.save(update_fields=["left_at", "leaving", "draining", "labels"])
        if created or starting:
            first = created or not host.events.filter(kind=HostEventKind.JOINED).exists()
            size = {"cpus": probe.cpus, "memory_mib": probe.memory_mib, "gpus": len(probe.gpus)}
            kind = HostEventKind.JOINED if first else HostEventKind.STARTED
            HostEvent.objects.create(host=host, kind=kind, data=size)
        _write_gpus(host, probe.gpus)
    return host


def heartbeat(host: Host) -> bool:
    """Count a heartbeat. False if the host's row is gone and it must register again. Raises HasLeft."""
    if Host.joined.filter(pk=host.pk).update(heartbeats=F("heartbeats") + 1, seen_at=timezone.now()):
        return True
    if Host.objects.filter(pk=host.pk).exists():
        raise HasLeft
    return False


def _write_gpus(host: Host, gpus: tuple[GpuProbe, ...]) -> None:
    """Upsert by UUID, in one order so that two writers never deadlock; the host's other GPUs are no longer present."""
    columns = ["index", "name", "memory_mib", "stranger"]
    rows = [
        Gpu(uuid=gpu.uuid, host=host, present=True, **{name: getattr(gpu, name) for name in columns})
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid)
    ]
    sql.write(rows, ["uuid"], ["host", "present", *columns])
    Gpu.objects.filter(host=host).exclude(uuid__in=[gpu.uuid for gpu in gpus]).update(present=False, stranger=None)


def set_draining(host: Host, by: User, draining: bool) -> bool:
    """Accept no new jobs while running ones continue, or accept jobs again and stay. False if nothing changed."""
    with transaction.atomic():
        changed = (
            Host.joined.filter(pk=host.pk)
            .exclude(draining=draining, leaving=False)
            .update(draining=draining, leaving=False)
        )
        if changed:
            _record(host, by, HostEventKind.DRAINED if draining else HostEventKind.UNDRAINED)
    host.refresh_from_db()
    return bool(changed)


def set_labels(host: Host, by: User, changes: Mapping[str, str | None]) -> None:
    """Set labels; None removes one, and others stay. Raises Invalid."""
    with transaction.atomic():
        # On SQLite the transaction has the write lock from its start.
        labels = dict(Host.objects.select_for_update().get(pk=host.pk).labels)
        kept = {name: value for name, value in (labels | dict(changes)).items() if value is not None}
        try:
            kept = check_labels(kept)
        except ValueError as error:
            raise Invalid.at("labels", msg=str(error)) from None
        if kept != labels:
            Host.objects.filter(pk=host.pk).update(labels=kept)
            record_labels(host, by, labels, kept)
    host.refresh_from_db()


def record_labels(host: Host, by: User, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Write the event of changed labels: the new values, and the names of removed labels."""
    given = {name: value for name, value in after.items() if before.get(name) != value}
    _record(host, by, HostEventKind.LABELLED, set=given, removed=sorted(set(before) - set(after)))


def leave(host: Host, by: User) -> None:
    """Drain it, and let the watcher remove it once no job uses it.

    Raises Conflict for the server's own machine, which would come back with the server.
    """
    if not may_leave(host):
        raise Conflict(
            _("%(host)s is the server's own machine and can't leave; drain it to keep jobs away") % {"host": host.name}
        )
    with transaction.atomic():
        if Host.joined.filter(pk=host.pk, leaving=False).update(leaving=True, draining=True):
            _record(host, by, HostEventKind.LEAVING)
    host.refresh_from_db()


def _record(host: Host, by: User, kind: HostEventKind, **data: Any) -> None:
    HostEvent.objects.create(host=host, kind=kind, actor=by, data=data)


def names_by_isolation() -> dict[str, list[str]]:
    """The joined hosts by how they isolate jobs, without silent ones that refuse jobs."""
    names: dict[str, list[str]] = {}
    for host in Host.joined.order_by("name"):
        if host.isolation != Isolation.NONE or is_online(host):
            names.setdefault(host.isolation, []).append(host.name)
    return names


def count_failed_start(host_id: int, error: str, now: dt.datetime) -> None:
    """Count a failed start, and hold the host back if it is one too many. `error` is empty if no runner called.

    Call it last in a transaction, as `clear_failed_starts`: they lock the host.
    """
    host = Host.objects.filter(pk=host_id)
    host.update(start_failures=F("start_failures") + 1, start_error=error)
    if host.filter(start_failures__gte=HOLD_BACK_AFTER, held_back_at=None).update(held_back_at=now):
        data = {"error": error, "failures": host.values_list("start_failures", flat=True).get()}
        HostEvent.objects.create(host_id=host_id, kind=HostEventKind.HELD_BACK, at=now, data=data)


def hold_back(host_id: int, error: StartError, now: dt.datetime) -> None:
    """Give a host no more jobs until a start without a job works, or an admin says so. Call it as the above."""
    if Host.objects.filter(pk=host_id, held_back_at=None).update(held_back_at=now, start_error=error):
        HostEvent.objects.create(host_id=host_id, kind=HostEventKind.HELD_BACK, at=now, data={"error": error})


def note_failed_probe(host_id: int, error: str) -> None:
    """Keep the newest error of a host that is held back."""
    Host.objects.filter(pk=host_id, held_back_at__isnull=False).exclude(start_error=error).update(start_error=error)


def clear_failed_starts(host_id: int, now: dt.datetime, *, by: User | None = None, after_probe: bool = False) -> bool:
    """Forget failed starts, because a start worked or an admin says so. True if the host was held back.

    `after_probe`: only a start without a job worked, so that one failure holds the host back again.
    """
    left = {"start_failures": HOLD_BACK_AFTER - 1 if after_probe else 0, "start_error": ""}
    host = Host.objects.filter(pk=host_id)
    if host.filter(held_back_at__isnull=False).update(held_back_at=None, **left):
        data = {"probe": True} if after_probe else {}
        HostEvent.objects.create(host_id=host_id, kind=HostEventKind.TAKES_JOBS, actor=by, at=now, data=data)
        return True
    if not after_probe:
        host.exclude(start_failures=0).update(**left)
    return False
