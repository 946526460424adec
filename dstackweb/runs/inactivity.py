"""Ends unused dev environments, with a notice first. The gateway counts: it knows when it could see their use."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dstackweb.lib import sql
from dstackweb.runs.attempts import settle_run, stop_jobs
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Run, RunActivity
from dstackweb.runs.shared_rows import shared_rows_last, touch
from dstackweb.runs.states import Reason, RunStatus
from dstackweb.runs.transitions import lock_run, move_run, record

log = logging.getLogger(__name__)

NOTICE_LEAST_S, NOTICE_MOST_S = 120.0, 600.0


class Due(Enum):
    NOTHING = "nothing"
    NOTICE = "notice"
    STOP = "stop"


def due(idle_s: float, limit_s: int | None, warned: bool) -> Due:
    """What is due after so long without use: a notice when a quarter of the limit remains (2 to 10 min), then a stop.

    Nothing is stopped without a notice; with a limit under 4 min it comes after half of it.
    """
    if limit_s is None:
        return Due.NOTHING
    if idle_s >= limit_s and warned:
        return Due.STOP
    return Due.NOTICE if idle_s >= limit_s - notice_s(limit_s) and not warned else Due.NOTHING


def notice_s(limit_s: int) -> float:
    """How long before the stop the notice comes."""
    return min(limit_s / 2, max(NOTICE_LEAST_S, min(NOTICE_MOST_S, limit_s / 4)))


@dataclass(frozen=True)
class Use:
    """What the gateway saw of an attempt that was connected, since it last noted that."""

    attempt: int
    used_at: dt.datetime | None
    """When it was last used, if it was."""
    idle_s: float
    """Seconds since then or, if it was not used, since the last note."""


def note(uses: Mapping[int, Use], now: dt.datetime) -> None:
    """Note the use of runs, by their id, and do what is due. One that fails stops no other."""
    known = {row.run_id: row for row in RunActivity.objects.filter(run__in=uses)}
    rows = [updated(known.get(run_id), run_id, use, now) for run_id, use in uses.items()]
    existing = set(Run.objects.filter(pk__in=uses).values_list("pk", flat=True))
    rows = [row for row in rows if row.run_id in existing]
    sql.write(rows, ["run"], ["attempt", "connected_at", "used_at", "idle_s", "warned"])
    limits = Run.objects.filter(pk__in=uses, status=RunStatus.RUNNING)
    limit_of = dict(limits.values_list("pk", "spec__inactivity_duration_s"))
    for row in rows:
        try:
            if due(row.idle_s, limit_of.get(row.run_id), row.warned) != Due.NOTHING:
                act(row.run_id, now)
        except Exception:
            log.exception("run %s: its inactivity was not handled, will retry", row.run_id)


def updated(row: RunActivity | None, run_id: int, use: Use, now: dt.datetime) -> RunActivity:
    """The row of a run after this use: idleness adds up, and begins anew with each use and each attempt."""
    before = row if row is not None and row.attempt == use.attempt else RunActivity(run_id=run_id)
    return RunActivity(
        run_id=run_id,
        attempt=use.attempt,
        connected_at=now,
        used_at=use.used_at or before.used_at,
        idle_s=use.idle_s if use.used_at else before.idle_s + use.idle_s,
        warned=before.warned and use.used_at is None,
    )


def act(run_id: int, now: dt.datetime) -> Due:
    """Do what is due for a run, decided again with its row locked."""
    with shared_rows_last():
        run = lock_run(run_id)
        row = RunActivity.objects.filter(run=run, attempt=run.attempt).first()
        limit_s = run.spec.get("inactivity_duration_s")
        if row is None or limit_s is None or run.status != RunStatus.RUNNING:
            return Due.NOTHING
        what = due(row.idle_s, limit_s, row.warned)
        if what == Due.NOTICE:
            RunActivity.objects.filter(pk=row.pk).update(warned=True)
            left = max(notice_s(limit_s) if row.idle_s >= limit_s else 0.0, limit_s - row.idle_s)
            stops_at = (now + dt.timedelta(seconds=left)).isoformat()
            data = {"idle_s": round(row.idle_s), "limit_s": limit_s, "stops_at": stops_at}
            record(run, RunEventKind.INACTIVITY_NOTICE, data, attempt=run.attempt, at=now)
            touch(run.queue_id)
        elif what == Due.STOP:
            move_run(
                run,
                RunStatus.TERMINATING,
                now=now,
                event=RunEventKind.INACTIVITY_STOP,
                data={"reason": Reason.INACTIVITY, "limit_s": limit_s},
                stop_reason=Reason.INACTIVITY,
            )
            stop_jobs(run, Reason.INACTIVITY, grace_s=None)
            settle_run(run)
        return what
