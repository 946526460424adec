"""What is kept for how long, and what prunes it: in small transactions, for a bounded time per tick.

What remains goes with the next ticks, which then follow each other at once. Nothing goes that an active run, its retry
or its schedule may need.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone
from django_q.models import OrmQ

from dstackweb.accounts import attempts
from dstackweb.accounts.sessions import SessionStore
from dstackweb.audit.models import AuditEntry
from dstackweb.backends import api_calls, services
from dstackweb.backends.hosts.inventory import is_online
from dstackweb.backends.models import Host, HostEvent, HostInvite
from dstackweb.gpus import averages
from dstackweb.lib.models import CacheRow, Lease
from dstackweb.lib.sql import for_each
from dstackweb.lib.storage import storage
from dstackweb.lib.times import to_ms
from dstackweb.offers import counts
from dstackweb.progress import finalize
from dstackweb.runs import archives, artifacts, history, logs, past_log, removal
from dstackweb.runs.models import Archive, Artifact, Job, Move, RemovedRun, Run, Sweep, Verdict
from dstackweb.runs.queue import past
from dstackweb.runs.states import ACTIVE, ENDED, RunStatus
from dstackweb.scheduler.cloud import instances
from dstackweb.scheduler.models import Retention, RetentionKind
from dstackweb.scheduler.processes import project_removal

log = logging.getLogger(__name__)
BUDGET_S = 5.0
"""Of one tick: a worker of the control cluster is busy as long."""
AT_ONCE = 50
"""Runs, logs or archives of one step, which is at most one transaction."""
ROWS_AT_ONCE = 2_000
MOST_COUNTED = 100_000
"""What waits is counted up to here."""
REMOVED_KEPT = dt.timedelta(days=60)
"""A host that was away for longer keeps the directories of runs removed meanwhile."""
UNFINISHED_KEPT = dt.timedelta(hours=1)
"""After the end of its job, a file that was not sent to its end is kept for so long."""
LOST_TASKS_KEPT = dt.timedelta(days=1)
INVITES_KEPT = dt.timedelta(days=7)
MOVES_KEPT = dt.timedelta(hours=1)
"""Long after a move can be undone: until then it shows who moved a run."""


@dataclass(frozen=True)
class PrunedData:
    """One kind of data. `step` prunes a little of it, and returns how much; 0 when nothing is left."""

    name: RetentionKind
    waiting: Callable[[dt.datetime], int]
    step: Callable[[dt.datetime], int]


_registered: dict[RetentionKind, Callable[[dt.datetime], QuerySet[Any]]] = {}


def register(name: RetentionKind, old: Callable[[dt.datetime], QuerySet[Any]]) -> None:
    """Prune rows of a room above this one: those of `old`."""
    _registered[name] = old


def kinds() -> list[PrunedData]:
    """All kinds that the database knows; each host prunes its own files (`scheduler.hosts`)."""
    return [
        _of_rows(RetentionKind.LOGS, old_logs, _prune_logs),
        _of_rows(RetentionKind.ARTIFACTS, old_artifacts, _prune_artifacts),
        _of_rows(RetentionKind.ARCHIVES, unused_archives, _prune_archives),
        _of_rows(RetentionKind.RUNS, old_runs, _prune_runs),
        _of_rows(RetentionKind.RUNS, _old_empty_sweeps, _delete_some),
        PrunedData(RetentionKind.TASKS, lambda now: finalize.waiting(to_ms(now), MOST_COUNTED), _prune_tasks),
        PrunedData(RetentionKind.AVERAGES, lambda now: averages.waiting(now, MOST_COUNTED), averages.forget),
        _of_rows(RetentionKind.HISTORY, history.old_hours, _delete_some),
        _of_rows(RetentionKind.QUEUE_PAST, past.old_places, _delete_some),
        _of_rows(RetentionKind.QUEUE_PAST, past.old_verdicts, _delete_some),
        _of_rows(RetentionKind.HOST_EVENTS, _old_host_events, _delete_some),
        _of_rows(RetentionKind.AUDIT, _old_audit_entries, _delete_some),
        *(_of_rows(name, old, _delete_some) for name, old in _registered.items()),
        PrunedData(RetentionKind.PROJECTS, lambda _now: project_removal.waiting(MOST_COUNTED), project_removal.step),
        # What interrupted removals have left behind.
        PrunedData(
            RetentionKind.LEFTOVERS,
            lambda _now: RemovedRun.objects.filter(has_logs=True)[:MOST_COUNTED].count(),
            lambda _now: removal.remove_logs(AT_ONCE),
        ),
        _of_rows(RetentionKind.LEFTOVERS, _unfinished_artifacts, _drop_artifacts),
        _of_rows(RetentionKind.LEFTOVERS, _old_removed_runs, _delete_some),
        _of_rows(RetentionKind.LEFTOVERS, _old_removed_archives, _delete_archives),
    ]


def prune(now: dt.datetime | None = None, budget_s: float | None = BUDGET_S) -> bool:
    """Prune all kinds in turn, step by step, for `budget_s` seconds (None: to the end); returns whether some remains. A
    kind that fails stops no other; its error is raised at the end."""
    now, began = now or timezone.now(), time.monotonic()
    left, pruned, failed = kinds(), Counter[RetentionKind](), None
    while left and (budget_s is None or time.monotonic() - began < budget_s):
        unfinished: list[PrunedData] = []
        for kind in left:
            try:
                done = kind.step(now)
            except Exception as error:
                log.exception("could not prune %s", kind.name)
                failed = error
                continue
            pruned[kind.name] += done
            if done:
                unfinished.append(kind)
        left = unfinished
    for name, number in due(now).items():
        Retention.note(name, "", waiting=number, pruned=pruned[name], now=now)
    if failed is not None:
        raise failed
    return bool(left)


def current() -> list[Retention]:
    """Return what waited to be pruned at the last ticks: in the deployment, and on hosts that are online.

    How much waits on a host that is silent or was removed is unknown, and nothing prunes it.
    """
    online = {host.name for host in Host.joined.all() if is_online(host)}
    return [row for row in Retention.objects.order_by("kind", "host") if not row.host or row.host in online]


def due(now: dt.datetime) -> dict[RetentionKind, int]:
    """How much of each kind waits to be pruned, counted up to MOST_COUNTED."""
    numbers = Counter[RetentionKind]()
    for kind in kinds():
        numbers[kind.name] += kind.waiting(now)
    return dict(numbers)


def old_runs(now: dt.datetime) -> QuerySet[Run]:
    """Runs that ended long ago. One whose schedule continues stays until its next occurrence was made from it."""
    old = Run.objects.filter(
        ended_at__lt=now - dt.timedelta(days=settings.DSTACKWEB_RUNS_DAYS), status__in=ENDED, retry_at=None
    )
    return old.order_by("ended_at")


def _old_empty_sweeps(now: dt.datetime) -> QuerySet[Sweep]:
    """Sweeps that ended without a run, long ago; others are removed with their last run."""
    return Sweep.objects.filter(
        ended_at__lt=now - dt.timedelta(days=settings.DSTACKWEB_RUNS_DAYS), next_index=0
    ).order_by("id")


def old_logs(now: dt.datetime) -> QuerySet[Job]:
    before = now - dt.timedelta(days=settings.DSTACKWEB_LOGS_DAYS)
    jobs = Job.objects.filter(log_removed_at=None, ended_at__lt=before)
    return jobs.filter(run__status__in=ENDED, run__ended_at__lt=before).order_by("ended_at")


def old_artifacts(now: dt.datetime) -> QuerySet[Artifact]:
    before = now - dt.timedelta(days=settings.DSTACKWEB_ARTIFACTS_DAYS)
    old = Artifact.objects.filter(created_at__lt=before, job__run__status__in=ENDED, job__run__ended_at__lt=before)
    return old.order_by("created_at")


def _unfinished_artifacts(now: dt.datetime) -> QuerySet[Artifact]:
    """Files that their runner began to send, and never will go on with: their job has ended."""
    begun = Artifact.objects.filter(stored_at=None, created_at__lt=now - UNFINISHED_KEPT)
    return begun.filter(job__ended_at__lt=now - UNFINISHED_KEPT).order_by("created_at")


def unused_archives(now: dt.datetime) -> QuerySet[Archive]:
    """Code that no one has uploaded, found or submitted for long, and that no active or scheduled run needs."""
    return Archive.objects.filter(_unused(now), removed_at=None).order_by("used_at")


def _unused(now: dt.datetime) -> Q:
    before = now - dt.timedelta(days=settings.DSTACKWEB_ARCHIVES_DAYS)
    users = Run.objects.filter(archive=OuterRef("pk"))
    needed = users.filter(Q(status__in=ACTIVE) | Q(retry_at__isnull=False) | Q(ended_at__gte=before))
    sweeps = Sweep.objects.filter(Q(ended_at=None) | Q(ended_at__gte=before), archive=OuterRef("pk"))
    return Q(used_at__lt=before) & ~Q(Exists(needed)) & ~Q(Exists(sweeps))


def _old_host_events(now: dt.datetime) -> QuerySet[HostEvent]:
    return HostEvent.objects.filter(at__lt=now - dt.timedelta(days=settings.DSTACKWEB_HOST_EVENTS_DAYS))


def _old_audit_entries(now: dt.datetime) -> QuerySet[AuditEntry]:
    return AuditEntry.objects.filter(at__lt=now - dt.timedelta(days=settings.DSTACKWEB_AUDIT_DAYS))


def _old_removed_runs(now: dt.datetime) -> QuerySet[RemovedRun]:
    return RemovedRun.objects.filter(at__lt=now - REMOVED_KEPT, has_logs=False)


def _old_removed_archives(now: dt.datetime) -> QuerySet[Archive]:
    unnamed = ~Q(Exists(Run.objects.filter(archive=OuterRef("pk"))))
    unnamed &= ~Q(Exists(Sweep.objects.filter(archive=OuterRef("pk"))))
    return Archive.objects.filter(unnamed, removed_at__lt=now - REMOVED_KEPT)


def _of_rows(
    name: RetentionKind, old: Callable[[dt.datetime], QuerySet[Any]], step: Callable[[QuerySet[Any], dt.datetime], int]
) -> PrunedData:
    return PrunedData(name, lambda now: old(now)[:MOST_COUNTED].count(), lambda now: step(old(now), now))


def _prune_runs(old: QuerySet[Run], now: dt.datetime) -> int:
    ids = list(old.values_list("pk", flat=True)[:AT_ONCE])
    return removal.remove(ids, Q(retry_at__isnull=False), now)


def _prune_logs(old: QuerySet[Job], now: dt.datetime) -> int:
    """The files first: a log whose removal was interrupted is found again by its row."""
    ids = list(old.values_list("pk", flat=True)[: AT_ONCE * 4])
    for job_id in ids:
        logs.remove_log(job_id)
    return logs.forget(ids, now)


def _prune_artifacts(old: QuerySet[Artifact], now: dt.datetime) -> int:
    return artifacts.forget(list(old[:AT_ONCE]), now)


def _drop_artifacts(unfinished: QuerySet[Artifact], _now: dt.datetime) -> int:
    return artifacts.drop_unfinished(list(unfinished[:AT_ONCE]))


def _prune_archives(old: QuerySet[Archive], now: dt.datetime) -> int:
    return sum(archives.remove_archive(archive, _unused(now), now) for archive in old[:AT_ONCE])


def _delete_archives(old: QuerySet[Archive], now: dt.datetime) -> int:
    """Their files too, of which a killed removal may have left some."""
    some = list(old[:AT_ONCE])
    for archive in some:
        storage().remove(archive.key)
    return Archive.objects.filter(pk__in=[archive.pk for archive in some]).delete()[0]


def _prune_tasks(now: dt.datetime) -> int:
    return 0 if finalize.prune(to_ms(now)) else 1


def _delete_some(old: QuerySet[Any], now: dt.datetime) -> int:
    ids = list(old.order_by().values_list("pk", flat=True)[:ROWS_AT_ONCE])
    number: int = old.model._default_manager.filter(pk__in=ids).delete()[0]
    return number


def keep_house() -> None:
    """Remove what is of no use to anyone: lost work, unused secrets, outdated verdicts; even when one part fails."""
    now = timezone.now()
    parts: tuple[Callable[[], object], ...] = (
        partial(_prune_verdicts, now),
        Move.objects.filter(at__lt=now - MOVES_KEPT).delete,
        HostInvite.objects.filter(expires_at__lt=now - INVITES_KEPT).delete,
        # Kept while their clouds are searched for left instances.
        partial(services.forget_secrets, now - instances.SEARCHED_FOR),
        SessionStore.clear_expired,
        attempts.forget_old,
        partial(counts.prune, now),
        partial(api_calls.prune, now),
        CacheRow.expired().delete,
        Lease.objects.filter(expires_at__lt=now - LOST_TASKS_KEPT).delete,
        OrmQ.objects.filter(lock__lt=now - LOST_TASKS_KEPT).delete,
    )
    for_each(parts, lambda part: part())


def _prune_verdicts(now: dt.datetime) -> None:
    """Delete wait reasons of shapes with which no run waits. The shape "" is the whole queue."""
    waiting = Run.objects.filter(queue=OuterRef("queue"), status=RunStatus.SUBMITTED)
    of_shapes = Verdict.objects.exclude(shape="").exclude(Exists(waiting.filter(shape=OuterRef("shape"))))
    for outdated in (of_shapes, Verdict.objects.filter(~Exists(waiting), shape="")):
        with transaction.atomic():
            past_log.close_verdicts(outdated, now)
            outdated.delete()
