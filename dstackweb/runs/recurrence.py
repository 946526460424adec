"""The next occurrence of a run with a schedule: a new run of the same name, which waits for its time.

The transaction that ends a run notes the next time in the ended run's `retry_at`. The occurrence is made from there,
behind the queue's row, since its rank belongs to the queue's order; clearing the note decides who makes it.
"""

from __future__ import annotations

import datetime as dt

from django.db import IntegrityError, transaction

from dstackweb.accounts.access import allows, role_in
from dstackweb.runs import schedule
from dstackweb.runs.codes import RunEventKind, ScheduleWait
from dstackweb.runs.models import Run
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.queues import lock_queue
from dstackweb.runs.states import ACTIVE, ENDED, RunStatus
from dstackweb.runs.transitions import lock_run, record


def create_due(now: dt.datetime) -> int:
    """Make the next occurrence of every ended run that has one due. Returns how many were made.

    One that can't be made yet (its name is taken, its queue takes no new runs) is told once and tried at the next look;
    a schedule whose owner may not submit any more ends.
    """
    # A range, and not `IS NOT NULL`: SQLite walks an index for the former only.
    noted = Run.objects.filter(status__in=ENDED, retry_at__gt=schedule.EPOCH).select_related("queue", "project", "user")
    made = 0
    for run in noted.order_by("retry_at"):
        reason = blocked_by(run)
        if reason == ScheduleWait.NO_MEMBER:
            _give_up(run)
        elif reason or not _make(run, now):
            _tell_once(run, reason or ScheduleWait.NAME_TAKEN)
        else:
            made += 1
    return made


def blocked_by(run: Run) -> ScheduleWait | None:
    """Why the next occurrence of an ended run can't be created now; None when it can."""
    role = role_in(run.project, run.user)
    if role is None or not allows(role, "member"):
        return ScheduleWait.NO_MEMBER
    if run.queue.draining:
        return ScheduleWait.DRAINING
    taken = Run.objects.filter(project=run.project_id, name=run.name, status__in=ACTIVE).exists()
    return ScheduleWait.NAME_TAKEN if taken else None


def _make(run: Run, now: dt.datetime) -> bool:
    """Make it; False when its name was taken at this moment. Whoever clears the note has made it."""
    try:
        with transaction.atomic():
            queue = lock_queue(run.queue_id)
            ended = lock_run(run.pk)
            if ended.retry_at is None or ended.status not in ENDED:
                return True
            at = schedule.occurrence_time(ended.retry_at, ended.spec["schedule"]["cron"], now)
            seniority, priority = schedule.seniority_us(at), int(ended.spec["priority"])
            following = Run.objects.create(
                project=ended.project,
                queue=queue,
                user=run.user,
                name=ended.name,
                status=RunStatus.PENDING,
                retry_at=at,
                priority=priority,
                seniority_us=seniority,
                rank=ordering.rank(seniority, priority, queue.step_us),
                shape=ended.shape,
                spec=ended.spec,
                provenance=ended.provenance,
                config_text=ended.config_text,
                env_secret=ended.env_secret,
                archive_id=ended.archive_id,
            )
            Run.objects.filter(pk=ended.pk).update(retry_at=None)
            entered(following)
            record(following, RunEventKind.SCHEDULED, {"previous": str(ended.uid), "at": at.isoformat()}, at=now)
            record(ended, RunEventKind.NEXT_SCHEDULED, {"next": str(following.uid), "at": at.isoformat()}, at=now)
    except IntegrityError:
        return False
    return True


def _give_up(run: Run) -> None:
    """End the schedule of somebody who may not submit any more."""
    with transaction.atomic():
        if Run.objects.filter(pk=run.pk, retry_at=run.retry_at).update(retry_at=None):
            record(
                run, RunEventKind.SCHEDULE_ENDED, {"reason": ScheduleWait.NO_MEMBER, "user": run.user.get_username()}
            )


def _tell_once(run: Run, reason: ScheduleWait) -> None:
    """Say why the next occurrence waits, unless that was the last thing said of the run."""
    last = run.events.last()
    if last is None or last.kind != RunEventKind.SCHEDULE_WAITS or last.data.get("reason") != reason:
        with transaction.atomic():
            record(run, RunEventKind.SCHEDULE_WAITS, {"reason": reason})
