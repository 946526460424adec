"""Removes what is of no use to anyone: lost work, unused secrets, outdated verdicts. `retention` prunes old data."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from functools import partial

from django.db import transaction
from django.db.models import Exists, OuterRef
from django.utils import timezone
from django_q.models import OrmQ

from dstackweb.accounts import attempts
from dstackweb.accounts.sessions import SessionStore
from dstackweb.backends import services
from dstackweb.backends.models import HostInvite
from dstackweb.lib.models import CacheRow, Lease
from dstackweb.lib.sql import for_each
from dstackweb.offers import counts
from dstackweb.runs import past_verdicts
from dstackweb.runs.models import Move, Run, Verdict
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.cloud import instances

LOST_TASK_AGE = dt.timedelta(days=1)
INVITES_AGE = dt.timedelta(days=7)
MOVES_AGE = dt.timedelta(hours=1)
"""Long after a move can be undone: until then it shows who moved a run."""


def keep_house() -> None:
    """Prune all of it, even when one part fails."""
    now = timezone.now()
    parts: tuple[Callable[[], object], ...] = (
        partial(_prune_verdicts, now),
        Move.objects.filter(at__lt=now - MOVES_AGE).delete,
        HostInvite.objects.filter(expires_at__lt=now - INVITES_AGE).delete,
        # Kept while their clouds are searched for left instances.
        partial(services.forget_secrets, now - instances.SEARCHED_FOR),
        SessionStore.clear_expired,
        attempts.forget_old,
        partial(counts.prune, now),
        CacheRow.expired().delete,
        Lease.objects.filter(expires_at__lt=now - LOST_TASK_AGE).delete,
        OrmQ.objects.filter(lock__lt=now - LOST_TASK_AGE).delete,
    )
    for_each(parts, lambda part: part())


def _prune_verdicts(now: dt.datetime) -> None:
    """Delete wait reasons of shapes with which no run waits. The shape "" is the whole queue."""
    waiting = Run.objects.filter(queue=OuterRef("queue"), status=RunStatus.SUBMITTED)
    of_shapes = Verdict.objects.exclude(shape="").exclude(Exists(waiting.filter(shape=OuterRef("shape"))))
    for outdated in (of_shapes, Verdict.objects.filter(~Exists(waiting), shape="")):
        with transaction.atomic():
            past_verdicts.close_all(outdated, now)
            outdated.delete()
