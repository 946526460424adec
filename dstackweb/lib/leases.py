"""Leases: locks across processes and machines that expire, as rows.

The lease of a holder that dies blocks others until it expires. A holder that was too slow, and lost its lease, notices
when it renews: it must then discard its work.
"""

from __future__ import annotations

import datetime as dt

from django.db import IntegrityError, transaction
from django.db.models import Q

from dstackweb.lib.models import Lease


def take(name: str, holder: str, ttl_s: float, now: dt.datetime) -> bool:
    """Take the lease for `ttl_s` seconds; True if it was free or already held by `holder`.

    An expiry too far in the future is void: it was set before a clock was set back.
    """
    ttl = dt.timedelta(seconds=ttl_s)
    free = Q(holder=holder) | Q(expires_at__lte=now) | Q(expires_at__gt=now + 2 * ttl)
    if Lease.objects.filter(free, pk=name).update(holder=holder, expires_at=now + ttl):
        return True
    if Lease.objects.filter(pk=name).exists():
        return False
    try:
        with transaction.atomic():
            Lease.objects.create(pk=name, holder=holder, expires_at=now + ttl)
    except IntegrityError:  # another holder was faster
        return False
    return True


def renew(name: str, holder: str, ttl_s: float, now: dt.datetime) -> bool:
    """Extend the lease to `ttl_s` from now; False if `holder` has lost it."""
    until = now + dt.timedelta(seconds=ttl_s)
    return bool(Lease.objects.filter(pk=name, holder=holder).update(expires_at=until))


def release(name: str, holder: str) -> None:
    """Release the lease if `holder` still has it."""
    Lease.objects.filter(pk=name, holder=holder).delete()
