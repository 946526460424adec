"""Starts that fail on a host are counted in a row: after three the host is held back until a start works there.

A host that fails every start is empty, and would otherwise get each run next. Call these last in a transaction: they
lock the host.
"""

from __future__ import annotations

import datetime as dt

from django.db.models import F

from dstackweb.accounts.models import User
from dstackweb.backends.models import Host, HostEvent, HostEventKind

HOLD_BACK_AFTER = 3
"""Failed starts in a row."""


def count_failure(host_id: int, error: str, now: dt.datetime) -> None:
    """Count a failed start, and hold the host back if it is one too many. `error` is empty if no runner called."""
    host = Host.objects.filter(pk=host_id)
    host.update(start_failures=F("start_failures") + 1, start_error=error)
    if host.filter(start_failures__gte=HOLD_BACK_AFTER, held_back_at=None).update(held_back_at=now):
        data = {"error": error, "failures": host.values_list("start_failures", flat=True).get()}
        HostEvent.objects.create(host_id=host_id, kind=HostEventKind.HELD_BACK, at=now, data=data)


def note_probe_failure(host_id: int, error: str) -> None:
    """Keep the newest error of a host that is held back."""
    Host.objects.filter(pk=host_id, held_back_at__isnull=False).exclude(start_error=error).update(start_error=error)


def clear(host_id: int, now: dt.datetime, *, by: User | None = None, after_probe: bool = False) -> bool:
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
