"""Allows one placement pass at a time: a pass claims, renews and releases the row (docs/design.md#scheduling)."""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from dstackweb.scheduler.models import PassState

EXPIRES_S = 10.0
"""A killed pass delays the next one this long at most."""


class ClaimLost(Exception):
    """A newer pass has begun: this one must not write."""


def request() -> bool:
    """Request a pass; True when the caller must enqueue it, False when one is queued already."""
    requested = PassState.objects.filter(pk=1).values_list("requested", flat=True).first()
    if requested is None:
        PassState.objects.get_or_create(pk=1)
    return not requested and bool(PassState.objects.filter(pk=1, requested=False).update(requested=True))


def is_requested() -> bool:
    """Whether a pass was requested since the last one was claimed."""
    return PassState.objects.filter(pk=1, requested=True).exists()


def claim(now: dt.datetime) -> int | None:
    """Claim the right to run a pass, and return its generation; None while another pass runs.

    A claim whose end lies further ahead than it could have been set (the clock was put back) is void. What is a
    little too far ahead was renewed since `now` was read, or by a clock that is a little fast.
    """
    PassState.objects.get_or_create(pk=1)
    until = now + dt.timedelta(seconds=EXPIRES_S)
    free = Q(expires_at=None) | Q(expires_at__lte=now) | Q(expires_at__gt=until + dt.timedelta(seconds=EXPIRES_S))
    with transaction.atomic():
        won = PassState.objects.filter(free, pk=1).update(
            generation=F("generation") + 1, expires_at=until, requested=False
        )
        if not won:
            # The running pass checks this when it ends, so the request is not lost.
            PassState.objects.filter(pk=1).update(requested=True)
            return None
        return PassState.objects.values_list("generation", flat=True).get(pk=1)


def renew(generation: int) -> None:
    """Renew a claim: first in each transaction in which its pass writes. Raises ClaimLost."""
    until = timezone.now() + dt.timedelta(seconds=EXPIRES_S)
    if not PassState.objects.filter(pk=1, generation=generation).update(expires_at=until):
        raise ClaimLost


def release(generation: int, duration_ms: float, placed: int) -> None:
    """Release a claim, unless a newer pass has begun; `placed`: how many runs it placed."""
    PassState.objects.filter(pk=1, generation=generation).update(
        expires_at=None, ended_at=timezone.now(), duration_ms=duration_ms, placed=placed
    )
