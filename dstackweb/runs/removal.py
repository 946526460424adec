"""Removes ended runs for good, with all they have; all counters stay right (docs/design.md, rule 7).

A removed run leaves a row (`RemovedRun`) until its files are gone: hosts delete the directories of runs that they know
to have ended, and never those of an unknown run.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q
from django.dispatch import Signal
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.models import User
from dstackweb.lib import sql
from dstackweb.lib.errors import Conflict, NotFound
from dstackweb.lib.storage import storage
from dstackweb.progress import finalize
from dstackweb.runs import logs, usage
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.concurrency import may_change
from dstackweb.runs.models import (
    Artifact,
    Job,
    ProjectArtifacts,
    ProjectLogs,
    RemovedRun,
    RemovedSpend,
    Run,
    RunEvent,
    Sweep,
)
from dstackweb.runs.shared_rows import count_removed, shared_rows_last
from dstackweb.runs.states import ENDED, RunStatus

log = logging.getLogger(__name__)

run_deleted = Signal()
"""A person has deleted `run`, in this transaction: nothing else remembers it. Also given: the `user`."""
REMOVED_SEARCHED = dt.timedelta(days=1)
"""A removed run's directory goes at once on hosts that are back within this time, and else when it is old."""


def delete(run: Run, user: User, role: str) -> None:
    """Delete an ended run, and the schedule that it would continue. Raises Forbidden, Conflict, NotFound."""
    may_change(run, user, role)
    with shared_rows_last():
        if is_deleted := bool(remove([run.pk], Q())):
            run_deleted.send(sender=Run, run=run, user=user)
    if is_deleted:
        log.info("%s deleted run %s (%s) of %s", user.get_username(), run.name, run.uid, run.user.get_username())
        return
    status = Run.objects.filter(pk=run.pk).values_list("status", flat=True).first()
    if status is None:
        raise NotFound(_("run %(run)s was deleted before") % {"run": run.name})
    raise Conflict(
        _("run %(run)s is %(status)s: only ended runs can be deleted. Nothing was deleted. Stop it first.")
        % {"run": run.name, "status": status}
    )


def remove(run_ids: Collection[int], unless: Q, now: dt.datetime | None = None) -> int:
    """Remove the runs that have ended and don't match `unless`; returns how many. Their files go after the commit."""
    now = now or timezone.now()
    with shared_rows_last():
        mine = Run.objects.filter(pk__in=run_ids, status__in=ENDED, ended_at__isnull=False)
        if unless:
            mine = mine.exclude(unless)
        runs = list(mine.select_for_update().order_by("pk").defer("config_text", "provenance", "env_secret", "spec"))
        if not runs:
            return 0
        keys = [run.pk for run in runs]
        removed, freed, freed_artifacts = _leave_rows(runs, now)
        placements = RunEvent.objects.filter(
            run__in=keys, kind=RunEventKind.PROVISIONING, data__from=RunStatus.SUBMITTED.value
        )
        count_removed(runs, list(placements.values_list("run__queue", "run__priority", "at")), now)
        spent = usage.of_jobs(Job.objects.filter(run__in=keys), now)  # instances have their own rows, which stay
        Run.objects.filter(pk__in=keys).delete()
        for sweep_id in sorted({run.sweep_id for run in runs if run.sweep_id is not None}):
            left = Exists(Run.objects.filter(sweep=OuterRef("pk")))
            Sweep.objects.filter(~Q(left), pk=sweep_id, ended_at__isnull=False).delete()
        finalize.expire(keys)
        month = usage.month_of(now).date()
        for project_id, usd in sorted(spent.items()):
            sql.shift(RemovedSpend, {"project_id": project_id, "month": month}, {"usd": F("usd") + usd})
        ProjectLogs.uncount(freed)
        ProjectArtifacts.uncount(freed_artifacts)
        transaction.on_commit(lambda: _remove_logs(removed), robust=True)
    return len(runs)


def remove_logs(limit: int = 50) -> int:
    """Remove logs and artifacts that removed runs have left, of so many runs; returns of how many."""
    rows = list(RemovedRun.objects.filter(has_logs=True).order_by("uid")[:limit])
    _remove_logs(rows)
    return len(rows)


def _remove_logs(removed: Sequence[RemovedRun]) -> None:
    for row in removed:
        for job_id in row.logs:
            logs.remove_log(job_id)
        for key in row.artifacts:
            storage().remove(key)
    RemovedRun.objects.filter(pk__in=[row.pk for row in removed]).update(logs=[], artifacts=[], has_logs=False)


def _leave_rows(runs: Sequence[Run], now: dt.datetime) -> tuple[list[RemovedRun], Counter[int], Counter[int]]:
    """The rows, and the bytes by project that were counted for logs, and for artifacts. The jobs are locked."""
    logs, freed = defaultdict[int, list[str]](list), Counter[int]()
    keys, freed_artifacts = defaultdict[int, list[str]](list), Counter[int]()
    project_of = {run.pk: run.project_id for run in runs}
    jobs = Job.objects.filter(run__in=runs, log_removed_at=None).select_for_update().order_by("pk")
    for run_id, job_id, counted in jobs.values_list("run_id", "pk", "log_counted"):
        logs[run_id].append(str(job_id))
        freed[project_of[run_id]] += counted
    kept = Artifact.objects.filter(job__run__in=runs).select_for_update(of=("self",)).order_by("pk")
    for run_id, key, size in kept.values_list("job__run", "key", "size"):
        keys[run_id].append(key)
        freed_artifacts[project_of[run_id]] += size
    rows = RemovedRun.objects.bulk_create(
        RemovedRun(
            uid=run.uid, at=now, ended_at=run.ended_at or now, logs=logs[run.pk], artifacts=keys[run.pk],
            has_logs=bool(logs[run.pk] or keys[run.pk]),
        )
        for run in runs
    )  # fmt: skip
    return rows, freed, freed_artifacts


def over(uids: Sequence[str], before: dt.datetime) -> set[str]:
    """The runs among these that ended before, or were removed. An unknown one is another deployment's."""
    ended = Run.objects.filter(uid__in=uids, status__in=ENDED, ended_at__lt=before).values_list("uid", flat=True)
    removed = RemovedRun.objects.filter(uid__in=uids).values_list("uid", flat=True)
    return {str(uid) for uid in (*ended, *removed)}


def removed_lately(before: dt.datetime) -> list[str]:
    """Removed runs whose directories go at once, since they ended after `before` and are not old yet."""
    young = RemovedRun.objects.filter(at__gte=timezone.now() - REMOVED_SEARCHED, ended_at__gte=before)
    return [str(uid) for uid in young.values_list("uid", flat=True)]
