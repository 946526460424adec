"""Removes data that is no longer needed, in small steps."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from django.conf import settings
from django.contrib.sessions.backends.db import SessionStore
from django.db.models import Exists, OuterRef
from django.utils import timezone
from django_q.models import OrmQ

from dstackweb.backends import services
from dstackweb.backends.hosts import local
from dstackweb.backends.models import Host, HostEvent, HostInvite
from dstackweb.gpus.samples import averages
from dstackweb.lib.models import Lease
from dstackweb.offers import counts
from dstackweb.progress import finalize
from dstackweb.runs import history
from dstackweb.runs.models import Job, Move, Run, Verdict
from dstackweb.runs.prefix_counters import to_ms
from dstackweb.runs.states import ENDED, JOB_ACTIVE, RunStatus
from dstackweb.scheduler.cloud import common as cloud

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
    services.forget_secrets(timezone.now() - cloud.SEARCHED_FOR)
    SessionStore.clear_expired()
    counts.prune(timezone.now())
    Lease.objects.filter(expires_at__lt=timezone.now() - LOST_TASK_AGE).delete()
    OrmQ.objects.filter(lock__lt=timezone.now() - LOST_TASK_AGE).delete()


def tidy_host(host: str) -> None:
    """Remove what ended jobs left on this machine: runner files, and later the runs' directories."""
    active = {str(pk) for pk in Job.objects.filter(host__name=host, status__in=JOB_ACTIVE).values_list("pk", flat=True)}
    local.prune(active)
    here = Host.objects.filter(name=host).exclude(runs_dir="").first()
    if here is not None:
        local.prune_runs(here.runs_dir, _ended, older_than_s=settings.DSTACKWEB_RUN_DIRS_DAYS * 86400)


def _ended(uids: Sequence[str]) -> set[str]:
    """The ended runs among these. An unknown one belongs to another deployment, and stays."""
    ended = Run.objects.filter(uid__in=uids, status__in=ENDED).values_list("uid", flat=True)
    return {str(uid) for uid in ended}
