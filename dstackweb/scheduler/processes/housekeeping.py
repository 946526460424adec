"""Removes data that is no longer needed, in small steps."""

from __future__ import annotations

import datetime as dt

from django.contrib.sessions.backends.db import SessionStore
from django.db.models import Exists, OuterRef
from django.utils import timezone
from django_q.models import OrmQ

from dstackweb.backends import services
from dstackweb.backends.models import HostEvent, HostInvite
from dstackweb.gpus.samples import averages
from dstackweb.lib.models import Lease
from dstackweb.offers import counts
from dstackweb.progress import finalize
from dstackweb.runs import history
from dstackweb.runs.models import Move, Run, Verdict
from dstackweb.runs.prefix_counters import to_ms
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.cloud import instances

LOST_TASK_AGE = dt.timedelta(days=1)
HOST_EVENTS_AGE = dt.timedelta(days=90)
INVITES_AGE = dt.timedelta(days=7)
MOVES_AGE = dt.timedelta(hours=1)
"""Long after a move can be undone: until then it shows who moved a run."""


def keep_house() -> None:
    """Prune wait reasons of shapes no run waits with, old moves, history, GPU averages and tasks, expired rows, lost
    work, and unused secrets."""
    waiting = Run.objects.filter(queue=OuterRef("queue"), status=RunStatus.SUBMITTED)
    # The shape "" is the whole queue.
    Verdict.objects.exclude(shape="").exclude(Exists(waiting.filter(shape=OuterRef("shape")))).delete()
    Verdict.objects.filter(~Exists(waiting), shape="").delete()
    finalize.prune(to_ms(timezone.now()))
    history.prune(timezone.now())
    averages.forget(timezone.now())
    Move.objects.filter(at__lt=timezone.now() - MOVES_AGE).delete()
    HostEvent.objects.filter(at__lt=timezone.now() - HOST_EVENTS_AGE).delete()
    HostInvite.objects.filter(expires_at__lt=timezone.now() - INVITES_AGE).delete()
    # Kept while their clouds are searched for left instances.
    services.forget_secrets(timezone.now() - instances.SEARCHED_FOR)
    SessionStore.clear_expired()
    counts.prune(timezone.now())
    Lease.objects.filter(expires_at__lt=timezone.now() - LOST_TASK_AGE).delete()
    OrmQ.objects.filter(lock__lt=timezone.now() - LOST_TASK_AGE).delete()
