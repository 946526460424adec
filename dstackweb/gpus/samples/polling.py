"""How looks at a host's GPUs go: kept for its page, and told once when it changes."""

from __future__ import annotations

import datetime as dt

from django.db import connection

from dstackweb.backends.hosts.nvml import Look
from dstackweb.backends.models import Host, HostEvent, HostEventKind
from dstackweb.gpus.clock import to_moment
from dstackweb.gpus.models import HostSampling

AN_HOUR = dt.timedelta(hours=1)
MOST_AN_HOUR = 12
"""Events of one host about its sampling: a GPU that comes and goes with each look must not fill its list."""
KINDS = (
    HostEventKind.NVML_MISSING, HostEventKind.NVML_FOUND, HostEventKind.SAMPLING_FAILS, HostEventKind.SAMPLING_WORKS,
)  # fmt: skip


def note(host: Host, look: Look, at_ms: int) -> None:
    """Keep how a look went. Call inside a transaction."""
    at = to_moment(at_ms)
    if _went_as_before(host, look, at):
        return
    before = HostSampling.objects.filter(host=host).first() or HostSampling(host=host)
    HostSampling.objects.update_or_create(
        host=host, defaults={"at": at, "took_ms": look.took_ms, "library": look.library, "error": look.error}
    )
    events = []
    if before.library != look.library:
        events.append(
            HostEvent(host=host, at=at, kind=HostEventKind.NVML_FOUND if look.library else HostEventKind.NVML_MISSING)
        )
    if before.error != look.error:
        data = {"error": look.error} if look.error else {}
        kind = HostEventKind.SAMPLING_FAILS if look.error else HostEventKind.SAMPLING_WORKS
        events.append(HostEvent(host=host, at=at, kind=kind, data=data))
    told = HostEvent.objects.filter(host=host, kind__in=KINDS, at__gt=at - AN_HOUR).count()
    HostEvent.objects.bulk_create(events[: max(0, MOST_AN_HOUR - told)])


def _went_as_before(host: Host, look: Look, at: dt.datetime) -> bool:
    """Whether it is kept by this already; by SQL of its own since it is asked all the time (lib.sql)."""
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE gpus_hostsampling SET at = %s, took_ms = %s WHERE host_id = %s AND library = %s AND error = %s",
            [connection.ops.adapt_datetimefield_value(at), look.took_ms, host.pk, look.library, look.error],
        )
        return bool(cursor.rowcount)
