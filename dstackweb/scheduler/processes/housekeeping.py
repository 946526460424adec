"""Removes data that is no longer needed, in small steps: old rows, lost work, unused secrets."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from functools import partial

from django.contrib.sessions.backends.db import SessionStore
from django.db.models import Exists, OuterRef
from django.utils import timezone
from django_q.models import OrmQ

from dstackweb.backends import services
from dstackweb.backends.models import HostEvent, HostInvite
from dstackweb.gpus.samples import averages
from dstackweb.lib.models import Lease
from dstackweb.lib.sql import for_each
from dstackweb.lib.times import to_ms
from dstackweb.offers import counts
from dstackweb.progress import finalize
from dstackweb.runs import history
from dstackweb.runs.models import Move, Run, Verdict
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.cloud import instances

LOST_TASK_AGE = dt.timedelta(days=1)
HOST_EVENTS_AGE = dt.timedelta(days=90)
INVITES_AGE = dt.timedelta(days=7)
MOVES_AGE = dt.timedelta(hours=1)
"""Long after a move can be undone: until then it shows who moved a run."""


def keep_house() -> None:
    """Prune all of it, even when one part fails."""
    now = timezone.now()
    parts: tuple[Callable[[], object], ...] = (
        _prune_verdicts,
        partial(finalize.prune, to_ms(now)),
        partial(history.prune, now),
        partial(averages.forget, now),
        Move.objects.filter(at__lt=now - MOVES_AGE).delete,
        HostEvent.objects.filter(at__lt=now - HOST_EVENTS_AGE).delete,
        HostInvite.objects.filter(expires_at__lt=now - INVITES_AGE).delete,
        # Kept while their clouds are searched for left instances.
        partial(services.forget_secrets, now - instances.SEARCHED_FOR),
        SessionStore.clear_expired,
        partial(counts.prune, now),
        Lease.objects.filter(expires_at__lt=now - LOST_TASK_AGE).delete,
        OrmQ.objects.filter(lock__lt=now - LOST_TASK_AGE).delete,
    )
    for_each(parts, lambda part: part())


def _prune_verdicts() -> None:
    """Delete wait reasons of shapes with which no run waits. The shape "" is the whole queue."""
    waiting = Run.objects.filter(queue=OuterRef("queue"), status=RunStatus.SUBMITTED)
    Verdict.objects.exclude(shape="").exclude(Exists(waiting.filter(shape=OuterRef("shape")))).delete()
    Verdict.objects.filter(~Exists(waiting), shape="").delete()
