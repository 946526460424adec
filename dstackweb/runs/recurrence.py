"""Creates the next occurrence of a scheduled run: a new run of the same name, which waits for its time.

The transaction that ends a run stores that time in its `retry_at`; the process that clears it creates the occurrence,
under the queue's lock because of its rank.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from croniter import croniter
from django.db import IntegrityError, transaction

from dstackweb.accounts.access import allows, role_in
from dstackweb.accounts.models import User
from dstackweb.lib.sql import for_each
from dstackweb.runs.codes import RunEventKind, ScheduleWait
from dstackweb.runs.models import Run
from dstackweb.runs.queue import member_shares
from dstackweb.runs.queue.queues import lock_queue
from dstackweb.runs.run_names import is_taken
from dstackweb.runs.shared_rows import count_new, shared_rows_last
from dstackweb.runs.states import ENDED, Reason, RunStatus
from dstackweb.runs.transitions import lock_run, record


def create_occurrences(now: dt.datetime) -> int:
    """Create the next occurrence of every ended run whose schedule continues. Returns how many.

    If it cannot be created yet (name taken, queue draining), that is recorded once and retried with the next check. The
    schedule ends if its owner may not submit any more.
    """
    # A range, and not `IS NOT NULL`: SQLite walks an index for the former only.
    ended = Run.objects.filter(status__in=ENDED, retry_at__gt=EPOCH).select_related("queue", "project", "user")
    made: list[Run] = []

    def follow(run: Run) -> None:
        reason = blocked_by(run)
        if reason == ScheduleWait.NO_MEMBER:
            end_schedule(run, reason, user=run.user.get_username())
        elif reason or not _create(run, now):
            _record_wait(run, reason or ScheduleWait.NAME_TAKEN)
        else:
            made.append(run)

    for_each(ended.order_by("retry_at"), follow)
    return len(made)


def blocked_by(run: Run) -> ScheduleWait | None:
    """Why the next occurrence of an ended run can't be created now; None when it can."""
    role = role_in(run.project, run.user)
    if role is None or not allows(role, "member"):
        return ScheduleWait.NO_MEMBER
    if run.queue.draining:
        return ScheduleWait.DRAINING
    return ScheduleWait.NAME_TAKEN if is_taken(run.project, run.name) else None


def _create(run: Run, now: dt.datetime) -> bool:
    """Create it, or find that it was created meanwhile; False when its name is taken now."""
    try:
        with shared_rows_last():
            queue = lock_queue(run.queue_id)
            ended = lock_run(run.pk)
            if ended.retry_at is None or ended.status not in ENDED:
                return True
            at = occurrence_time(ended.retry_at, ended.spec["schedule"]["cron"], now)
            following = Run(
                project=ended.project,
                queue=queue,
                user=run.user,
                name=ended.name,
                status=RunStatus.PENDING,
                retry_at=at,
                priority=int(ended.spec["priority"]),
                seniority_us=seniority_us(at),
                shape=ended.shape,
                spec=ended.spec,
                provenance=ended.provenance,
                config_text=ended.config_text,
                env_secret=ended.env_secret,
                archive_id=ended.archive_id,
            )
            member_shares.enter(queue, following, waits=False)
            following.save(force_insert=True)
            Run.objects.filter(pk=ended.pk).update(retry_at=None)
            count_new(following)
            record(following, RunEventKind.SCHEDULED, {"previous": str(ended.uid), "at": at.isoformat()}, at=now)
            record(ended, RunEventKind.NEXT_SCHEDULED, {"next": str(following.uid), "at": at.isoformat()}, at=now)
    except IntegrityError:
        return False
    return True


def end_schedule(run: Run, reason: ScheduleWait, *, actor: User | None = None, **data: str) -> None:
    """End the schedule of an ended run whose next occurrence has not been created."""
    with transaction.atomic():
        if Run.objects.filter(pk=run.pk, retry_at=run.retry_at).update(retry_at=None):
            record(run, RunEventKind.SCHEDULE_ENDED, {"reason": reason, **data}, actor=actor)


def _record_wait(run: Run, reason: ScheduleWait) -> None:
    """Record why the next occurrence waits, unless that is the last event of the run."""
    last = run.events.last()
    if last is None or last.kind != RunEventKind.SCHEDULE_WAITS or last.data.get("reason") != reason:
        with transaction.atomic():
            record(run, RunEventKind.SCHEDULE_WAITS, {"reason": reason})


BY_PEOPLE = (Reason.STOPPED_BY_USER, Reason.ABORTED_BY_USER)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def next_time(crons: Sequence[str], after: dt.datetime) -> dt.datetime:
    """The first time after `after` (UTC) that matches one of the cron expressions."""
    found: list[dt.datetime] = [croniter(cron, after).get_next(dt.datetime) for cron in crons]
    return min(found)


def next_after_end(crons: Sequence[str], stop_reason: str, now: dt.datetime) -> dt.datetime | None:
    """When a run that ended at `now` is due again; None without a schedule, or if people stopped it."""
    return next_time(crons, now) if crons and stop_reason not in BY_PEOPLE else None


def occurrence_time(at: dt.datetime, crons: Sequence[str], now: dt.datetime) -> dt.datetime:
    """`at`, or the next time if that was missed: by a minute, since cron counts minutes."""
    return at if now - at < dt.timedelta(minutes=1) else next_time(crons, now)


def seniority_us(at: dt.datetime) -> int:
    """The seniority (µs) of a run that enters its queue at `at`: time before its schedule is no waiting."""
    return (at - EPOCH) // dt.timedelta(microseconds=1)
