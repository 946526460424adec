"""One placement pass at a time: the row that a pass claims, renews, and gives back (docs/design.md#scheduling)."""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from dstackweb.scheduler.models import PassState

EXPIRES_S = 10.0
"""A pass that was killed holds up the next one this long at most."""


class ClaimLost(Exception):
    """A newer pass has begun: this one must not write any more."""


def request() -> bool:
    """Note that a pass is wanted; True when the caller should enqueue it, False when one is queued already."""
    requested = PassState.objects.filter(pk=1).values_list("requested", flat=True).first()
    if requested is None:
        PassState.objects.get_or_create(pk=1)
    return not requested and bool(PassState.objects.filter(pk=1, requested=False).update(requested=True))


def is_requested() -> bool:
    """Whether somebody has asked for a pass since the last one was claimed."""
    return PassState.objects.filter(pk=1, requested=True).exists()


def claim(now: dt.datetime) -> int | None:
    """Make the caller's the one pass, and return its generation; None while another is at work.

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
            # The holder looks at this when it ends, so what the caller came for isn't missed.
            PassState.objects.filter(pk=1).update(requested=True)
            return None
        return PassState.objects.values_list("generation", flat=True).get(pk=1)


def renew(generation: int) -> None:
    """Renew a claim: first in each transaction in which its pass writes. Raises Outdated when the claim is lost."""
    until = timezone.now() + dt.timedelta(seconds=EXPIRES_S)
    if not PassState.objects.filter(pk=1, generation=generation).update(expires_at=until):
        raise ClaimLost


def release(generation: int, duration_ms: float, placed: int) -> None:
    """End a pass, unless a newer one has begun; `placed` is how many runs it placed."""
    PassState.objects.filter(pk=1, generation=generation).update(
        expires_at=None, ended_at=timezone.now(), duration_ms=duration_ms, placed=placed
    )
