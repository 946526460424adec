"""Reads the rows of lists of runs, as `row_fields` defines them: each list by one statement, the rest by key."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib import sql
from dstackweb.runs import selectors
from dstackweb.runs.codes import MessageCode, StartBasis
from dstackweb.runs.models import Job, Queue, Run, StartEstimate
from dstackweb.runs.row_fields import COLUMNS, TABLES, QueueExportRow, QueuePageRow, QueueRow, RunRow, Starts
from dstackweb.runs.run_places import PlacementSummary, placement_summaries, placement_summary
from dstackweb.runs.service_codes import ServiceState
from dstackweb.runs.service_health import health_of, states as service_states
from dstackweb.runs.states import PLACED, WAITING, RunStatus

SEARCHED = 100
"""Characters of a text that names are searched for: more than any has. SQLite refuses very long ones."""
MAX_ID = 2**63 - 1
Q = TypeVar("Q", bound=QueueRow)
R = TypeVar("R", bound=RunRow)
Known = TypeVar("Known", QueuePageRow, QueueExportRow)


@functools.cache
def _select(names: tuple[str, ...], *more: str) -> str:
    """A SELECT of these fields and of what the reader computes others from."""
    columns = [_column(COLUMNS.get(name, name)) for name in names]
    return f"SELECT {', '.join([*columns, *more])} FROM runs_run run {_ESTIMATE} "


def _column(attribute: str) -> str:
    """The SQL of a run's attribute. Subqueries for names are planned faster than joins."""
    key, _dot, name = attribute.partition(".")
    return f"(SELECT {name} FROM {TABLES[key]} WHERE id = run.{key}_id)" if name else f"run.{key}"


_ESTIMATE = "LEFT JOIN runs_startestimate estimate ON estimate.run_id = run.id"
_START = {
    "start_p50": "estimate.p50",
    "start_p90": "estimate.p90",
    "start_basis": "estimate.basis",
    "start_data": "estimate.data",
}
"""The estimate of a run's start; null where there is none."""
_BASES = {str(basis): basis for basis in StartBasis}

NO_REASONS: Mapping[str, selectors.WaitingFor] = {}
_PAGE = "SELECT id FROM runs_run WHERE queue_id = %s AND status = 'submitted' ORDER BY rank, id LIMIT %s OFFSET %s"
"""The rows before the page are skipped in the index."""
_BEHIND = (
    "SELECT id FROM runs_run WHERE queue_id = %s AND status = 'submitted' AND (rank, id) > (%s, %s)"
    " ORDER BY rank, id LIMIT %s"
)


def queue_rows(queue: Queue, limit: int = 50, offset: int = 0) -> list[QueueRow]:
    """A page of the queue in true order."""
    return _queue_rows(QueueRow, queue, _PAGE, [queue.pk, limit, offset], itertools.count(offset + 1))


def queue_page_rows(
    queue: Queue, limit: int, offset: int, reasons: Mapping[str, selectors.WaitingFor] = NO_REASONS
) -> list[QueuePageRow]:
    """A page of the queue; `reasons` are those of shapes that are known already."""
    return _queue_rows(QueuePageRow, queue, _PAGE, [queue.pk, limit, offset], itertools.count(offset + 1), reasons)


def queue_rows_at(
    queue: Queue, positions: Mapping[int, int], reasons: Mapping[str, selectors.WaitingFor] = NO_REASONS,
    *, kind: type[Known],
) -> list[Known]:  # fmt: skip
    """The rows of these runs, whose positions are known by id, in this order. A run that left the queue is left out."""
    if not positions:
        return []
    ids = f"SELECT id FROM runs_run WHERE id IN ({sql.places(positions)}) AND status = 'submitted'"
    found = _queue_rows(kind, queue, ids, list(positions), itertools.count(1), reasons)
    rows = {row.pk: row for row in found}
    for pk, row in rows.items():
        row.position = positions[pk]
    return [rows[pk] for pk in positions if pk in rows]


def queue_export_rows(
    queue: Queue, limit: int, *, after: tuple[int, int] | None, position: int
) -> list[QueueExportRow]:
    """The rows behind the place `after` (rank, id), which has this position; the first ones if it is None."""
    if after is None:
        return _queue_rows(QueueExportRow, queue, _PAGE, [queue.pk, limit, 0], itertools.count(1))
    parameters = [queue.pk, *after, limit]
    return _queue_rows(QueueExportRow, queue, _BEHIND, parameters, itertools.count(position + 1))


def _queue_rows(
    kind: type[Q], queue: Queue, ids: str, parameters: Sequence[int], positions: Iterable[int],
    known: Mapping[str, selectors.WaitingFor] = NO_REASONS,
) -> list[Q]:  # fmt: skip
    """The rows of the runs that the SELECT `ids` gives, in true order."""
    statement = f"{_select(kind.columns(), *_START.values())} WHERE run.id IN ({ids}) ORDER BY run.rank, run.id"
    names = (*kind.columns(), *_START)
    found = [dict(zip(names, row, strict=True)) for row in sql.rows(statement, parameters)]
    unknown = {row["shape"] for row in found} - known.keys()
    reasons = {**known, **selectors.wait_reasons(queue, unknown)} if unknown else known
    rows = []
    for position, row in zip(positions, found, strict=False):
        reason, data = reasons[row["shape"]]
        row = _decoded(row)
        row |= _starts(row, RunStatus.SUBMITTED, is_paused=queue.paused)
        rows.append(kind(**row, position=position, reason=reason, reason_data=data))
    return rows


def _starts(row: dict[str, Any], status: str, *, is_paused: bool) -> dict[str, Any]:
    """The fields of a run's start; takes the columns that they are read from out of the decoded row."""
    p50, p90, basis, data = row.pop("start_p50"), row.pop("start_p90"), row.pop("start_basis"), row.pop("start_data")
    if status == RunStatus.PENDING:
        after = row["status_detail"].get("code") == MessageCode.AFTER
        basis = StartBasis.AFTER_RUNS if after else StartBasis.SCHEDULED
    elif is_paused and status == RunStatus.SUBMITTED and basis != StartBasis.IMPOSSIBLE:
        basis = StartBasis.PAUSED
    elif status == RunStatus.SUBMITTED:
        # Another version of the server may know more.
        basis = _BASES.get(basis, StartBasis.UNKNOWN)
        return {"starts": Starts(p50=p50, p90=p90, basis=basis), "start_data": data or {}}
    starts = Starts(p50=None, p90=None, basis=basis) if status in WAITING else None
    return {"starts": starts, "start_data": {}}


def newest_rows(
    project: Project,
    *,
    statuses: Sequence[str] = (),
    user: str = "",
    text: str = "",
    queue: str = "",
    since: dt.datetime | None = None,
    until: dt.datetime | None = None,
    oldest_first: bool = False,
    before: int | None = None,
    limit: int = 50,
    kind: type[R],
) -> tuple[list[R], int | None]:
    """A project's runs, newest first, and the cursor (`before`) of the next page or None.

    Submitted at `since` or later and before `until`. With `oldest_first` the cursor is the run that the page follows.
    """
    if statuses or user or text or queue or since or until or oldest_first:
        runs = Run.objects.filter(project=project)
        # By key, as the index that answers all of this has it: a join would read each run's row.
        if queue:
            runs = runs.filter(queue__in=list(project.queues.filter(name=queue).values_list("pk", flat=True)))
        if user:
            runs = runs.filter(user__in=list(User.objects.filter(username=user).values_list("pk", flat=True)))
        if since is not None:
            runs = runs.filter(submitted_at__gte=since)
        if until is not None:
            runs = runs.filter(submitted_at__lt=until)
        if text:
            runs = runs.filter(name__icontains=text[:SEARCHED])
        if before is not None:
            runs = runs.filter(pk__gt=before) if oldest_first else runs.filter(pk__lt=before)
        narrowed = user or text or queue or since or until
        each = statuses or (tuple(RunStatus) if narrowed else ())
        ids = selectors.newest(runs, limit + 1, each, oldest_first=oldest_first)
        found = run_rows(ids[:limit], kind)
        return found[::-1] if oldest_first else found, _next(ids, limit)
    below = MAX_ID if before is None else max(0, min(before, MAX_ID))
    where = "WHERE run.project_id = %s AND run.id < %s ORDER BY run.id DESC LIMIT %s"
    rows = _run_rows(kind, where, [project.pk, below, limit + 1])
    return rows[:limit], _next([row.pk for row in rows], limit)


def _next(ids: Sequence[int], limit: int) -> int | None:
    return ids[limit - 1] if len(ids) > limit else None


def run_rows(ids: Sequence[int], kind: type[R]) -> list[R]:
    if not ids:
        return []
    return _run_rows(kind, f"WHERE run.id IN ({sql.places(ids)}) ORDER BY run.id DESC", ids)


def row_of(run: Run, jobs: Sequence[Job], *, is_new: bool = False) -> RunRow:
    """The row of a loaded run (with queue and user) and its jobs. `is_new`: it was submitted a moment ago."""
    row = {name: attrgetter(COLUMNS.get(name, name))(run) for name in RunRow.columns()}
    placed = run.status in PLACED
    place = placement_summary([job for job in jobs if job.attempt == run.attempt]) if placed else None
    row |= _estimate_of(None if is_new else run) | {"id": str(run.uid), "is_paused": run.queue.paused}
    found = health_of(run)
    return _placed(RunRow, row, place, run.held_until, found.state if found else None)


def starts_of(run: Run) -> tuple[Starts | None, dict[str, Any]]:
    """When a loaded run (with queue) starts, and the data of the basis; None unless it waits."""
    row = _estimate_of(run) | {"status_detail": run.status_detail}
    fields = _starts(row, run.status, is_paused=run.queue.paused)
    return fields["starts"], fields["start_data"]


def _estimate_of(run: Run | None) -> dict[str, Any]:
    waits = run is not None and run.status == RunStatus.SUBMITTED
    columns = [column.partition(".")[2] for column in _START.values()]
    found = StartEstimate.objects.filter(run=run).values_list(*columns).first() if waits else None
    return dict(zip(_START, found or [None] * len(columns), strict=True))


def _run_rows(kind: type[R], where: str, parameters: Sequence[int]) -> list[R]:
    names = kind.columns()
    columns = (*names, *(name for name in _OF_RUN if name not in names))
    statement = _select(names, *(_OF_RUN[name] for name in columns[len(names) :])) + where
    found = [_decoded(dict(zip(columns, row, strict=True))) for row in sql.rows(statement, parameters)]
    places = placement_summaries([row["pk"] for row in found if row["status"] in PLACED])
    health = service_states(found, timezone.now())
    rows = []
    for row in found:
        hold = {name: row[name] for name in ("status", "started_at", "extended_s", "spec")}
        held_until = Run(**hold).held_until if row["status"] == RunStatus.RUNNING else None
        del row["extended_s"]
        if "spec" not in names:
            del row["spec"]
        rows.append(_placed(kind, row, places.get(row["pk"]), held_until, health.get(row["pk"])))
    return rows


_OF_RUN = {
    **_START,
    "is_paused": f"CASE WHEN run.status = 'submitted' THEN {_column('queue.paused')} END",
    "extended_s": "run.extended_s",
    # Only a hold that has begun, and a service, need their spec to be listed.
    "spec": "CASE WHEN run.status = 'running' THEN run.spec END",
}
"""What other fields of a run's row are read from."""


def _placed(
    kind: type[R], row: dict[str, Any], place: PlacementSummary | None, held_until: dt.datetime | None,
    health: ServiceState | None,
) -> R:  # fmt: skip
    if place and not row["status_message"] and not row["status_detail"]:
        row |= {"status_message": place.message, "status_detail": place.detail}
    row |= _starts(row, row["status"], is_paused=bool(row.pop("is_paused")))
    return kind(**row, held_until=held_until, where=place.where if place else None, health=health)


def _decoded(row: dict[str, Any]) -> dict[str, Any]:
    row["id"] = sql.uid(row["id"])
    for name in ("spec", "status_detail", "start_data"):
        if text := row.get(name):
            row[name] = json.loads(text) if text != "{}" else {}
    return row
