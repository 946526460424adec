"""How a machine writes what it is and has into its rows, and says that it lives."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from dstackweb.backends.hosts.isolation import Arrangement
from dstackweb.backends.hosts.probe import GpuProbe, Probe
from dstackweb.backends.models import Backend, Gpu, Host, HostEvent, HostEventKind

KIND = "hosts"
EMBEDDED = "hosts"
"""The name of the backend that every deployment has."""


class HasLeft(Exception):
    """People had this host leave: it says nothing more, until it is started again."""


def ensure_embedded_backend() -> Backend:
    """The backend of the team's own hosts, made when it isn't there yet."""
    backend, _ = Backend.objects.get_or_create(name=EMBEDDED, defaults={"kind": KIND})
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
) -> Host:
    """Write what a machine is and has, and count it as seen. A host that comes back keeps its row and its GPUs' rows.

    What jobs hold of it, its set-up snippet, draining and labels stay as they are, but for the `labels` given here.
    One that had left comes back only when it is `starting`: raises HasLeft otherwise.
    """
    machine = {
        "address": address,
        "cluster": cluster,
        "cpus": probe.cpus,
        "memory_mib": probe.memory_mib,
        "boot_id": probe.boot_id,
        "isolation": arrangement.isolation,
        "job_user": arrangement.job_user,
        "runs_dir": str(arrangement.runs_dir),
        "error": "; ".join(filter(None, [arrangement.error, probe.error])),
        "seen_at": timezone.now(),
        "silent_s": 0.0,
    }
    with transaction.atomic():
        host, created = Host.objects.update_or_create(
            name=name, defaults=machine, create_defaults={**machine, "backend": ensure_embedded_backend()}
        )
        if host.left_at is not None and not starting:
            raise HasLeft
        if starting:
            _start(host, labels or {})
        if created or starting:
            HostEvent.objects.create(
                host=host, kind=HostEventKind.JOINED if created else HostEventKind.STARTED, data=_size(probe)
            )
        _write_gpus(host, probe.gpus)
    return host


def _start(host: Host, labels: Mapping[str, str]) -> None:
    """Back from having left, and with the labels of its command line. The row is locked."""
    if host.left_at is not None:
        host.left_at, host.leaving, host.draining = None, False, False
    host.labels = {**host.labels, **labels}
    host.save(update_fields=["left_at", "leaving", "draining", "labels"])


def _size(probe: Probe) -> dict[str, int]:
    return {"cpus": probe.cpus, "memory_mib": probe.memory_mib, "gpus": len(probe.gpus)}


def heartbeat(host: Host) -> bool:
    """Count one sign of life. False when the host's row is gone, and it must register again. Raises HasLeft."""
    if Host.joined.filter(pk=host.pk).update(beat=F("beat") + 1, seen_at=timezone.now()):
        return True
    if Host.objects.filter(pk=host.pk).exists():
        raise HasLeft
    return False


def _write_gpus(host: Host, gpus: tuple[GpuProbe, ...]) -> None:
    """Upsert by UUID, in one order so that two writers never wait for each other; the others are no longer present."""
    rows = [
        Gpu(
            uuid=gpu.uuid,
            host=host,
            index=gpu.index,
            name=gpu.name,
            memory_mib=gpu.memory_mib,
            present=True,
            stranger=gpu.stranger,
        )
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid)
    ]
    Gpu.objects.bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=["uuid"],
        update_fields=["host", "index", "name", "memory_mib", "present", "stranger"],
    )
    Gpu.objects.filter(host=host).exclude(uuid__in=[gpu.uuid for gpu in gpus]).update(present=False, stranger=None)
