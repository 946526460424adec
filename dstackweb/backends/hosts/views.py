"""Hosts as decisions see them, read from their rows in two queries."""

from __future__ import annotations

from collections import defaultdict

from django.conf import settings

from dstackweb.backends.hosts.fit import GpuView, HostView
from dstackweb.backends.models import Backend, Gpu, Host


def host_views(backend: Backend | None = None) -> list[HostView]:
    """The hosts of one backend, or of all enabled ones, by name; those that are silent or drained included."""
    joined = Host.joined.all()
    hosts = joined.filter(backend__enabled=True) if backend is None else joined.filter(backend=backend)
    gpus = _gpus_by_host()
    return [_view(host, gpus[host.pk]) for host in hosts.order_by("name")]


def is_online(host: Host) -> bool:
    """Whether the host has been heard of lately, as far as the watcher was up to hear it."""
    return host.seen_at is not None and host.silent_s < settings.DSTACKWEB_HOST_SILENT_S


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


def _view(host: Host, gpus: list[GpuView]) -> HostView:
    return HostView(
        id=host.pk,
        name=host.name,
        online=is_online(host),
        draining=host.draining,
        isolation=host.isolation,
        cpus=host.cpus,
        cpus_free=max(0, host.cpus - host.cpus_used),
        memory_mib=host.memory_mib,
        memory_free_mib=max(0, host.memory_mib - host.memory_used_mib),
        gpus=tuple(gpus),
        labels=host.labels,
    )
