"""One at a time across processes and machines: a row that is claimed, renewed and given back.

A holder that dies costs the others what is left of its time. One that was only slow, and lost the lease, learns it when
it renews: what it does then must not land.
"""

from __future__ import annotations

import datetime as dt

from django.db import IntegrityError, transaction
from django.db.models import Q

from dstackweb.lib.models import Lease


def take(name: str, holder: str, ttl_s: float, now: dt.datetime) -> bool:
    """Whether `holder` has it now, for `ttl_s` seconds: it was free, or theirs before.

    An expiry farther ahead than anybody could have set it is that of a clock that was put back since: void.
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
    except IntegrityError:  # somebody was faster, and may have given it back since
        return False
    return True


def renew(name: str, holder: str, ttl_s: float, now: dt.datetime) -> bool:
    """Hold it `ttl_s` longer; False where somebody else has it, or had it since."""
    until = now + dt.timedelta(seconds=ttl_s)
    return bool(Lease.objects.filter(pk=name, holder=holder).update(expires_at=until))


def release(name: str, holder: str) -> None:
    """Give it back, if it is still theirs."""
    Lease.objects.filter(pk=name, holder=holder).delete()
