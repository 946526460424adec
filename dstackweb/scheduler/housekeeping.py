"""Removing what nobody will look at again, in small steps."""

from __future__ import annotations

import datetime as dt

from django.contrib.sessions.backends.db import SessionStore
from django.db.models import Exists, OuterRef
from django.utils import timezone
from django_q.models import OrmQ

from dstackweb.backends.hosts import local
from dstackweb.runs.models import Job, Run, Verdict
from dstackweb.runs.states import JOB_ACTIVE, RunStatus

LOST_TASK_AGE = dt.timedelta(days=1)


def keep_house() -> None:
    """Verdicts of shapes that nobody waits with, sessions that have expired, tasks no cluster ever took."""
    waiting = Run.objects.filter(queue=OuterRef("queue"), shape=OuterRef("shape"), status=RunStatus.SUBMITTED)
    Verdict.objects.filter(~Exists(waiting)).delete()
    SessionStore.clear_expired()
    OrmQ.objects.filter(lock__lt=timezone.now() - LOST_TASK_AGE).delete()


def tidy_host(host: str) -> None:
    """State directories of jobs that have ended and whose runner has gone."""
    active = {str(pk) for pk in Job.objects.filter(host__name=host, status__in=JOB_ACTIVE).values_list("pk", flat=True)}
    local.prune(active)
