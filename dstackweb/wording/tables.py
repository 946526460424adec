"""The tables that are exported, with their words: rows are read in pages, so that memory does not grow with them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any

from dstackweb.accounts.models import Project
from dstackweb.runs import history, rows, usage, wait_stats
from dstackweb.runs.history import History, HistoryRange
from dstackweb.runs.models import Queue, Run, Sweep
from dstackweb.runs.queue.past import PastQueueRow
from dstackweb.runs.row_fields import QueueRow, RunRow, sent
from dstackweb.runs.sweeps.selectors import SweepRun, parameter_names, whole_table
from dstackweb.runs.usage_report import Used
from dstackweb.wording import starts, statuses, waiting
from dstackweb.wording.queue import left

AT_ONCE = 500
_STARTS = ("starts_p50", "starts_p90", "starts_basis", "starts_detail")
_OF_RUN = ("gpu_hours", "cpu_hours", "usd")


def _flat(names: Sequence[str]) -> list[str]:
    return [column for name in names for column in (_STARTS if name == "starts" else (name,))]


RUN_COLUMNS = [*_flat(RunRow.sent_fields()), *_OF_RUN]
QUEUE_COLUMNS = [*_flat(QueueRow.sent_fields()), "reason_detail"]
HISTORY_COLUMNS = ["at", "queue", "priority_low", "priority_high", *wait_stats.numbers(wait_stats.WaitStats())]


def run_table(project: Project, now: dt.datetime, **filters: Any) -> Iterator[dict[str, Any]]:
    """The runs that `rows.newest_rows` finds, with what each has used and cost so far, all attempts."""
    before: int | None = None
    while True:
        page, before = rows.newest_rows(project, **filters, before=before, limit=AT_ONCE, kind=RunRow)
        used = usage.of_runs([row.pk for row in page], now)
        for row, item in zip(page, sent(statuses.worded(page)), strict=True):
            mine = Used.of(used[row.pk])._asdict()
            yield _with_starts(item) | {name: mine[name] for name in _OF_RUN}
        if before is None:
            return


SWEEP_COLUMNS = ("index", "name")
SWEEP_OUTCOME = (
    "status", "termination_reason", "exit_code", "status_message", "started_at", "ended_at", "duration_s", "id",
)  # fmt: skip


def sweep_columns(sweep: Sweep) -> list[str]:
    """A parameter that is called like another column has `parameter_` before its name."""
    return [*SWEEP_COLUMNS, *map(_parameter, parameter_names(sweep)), *SWEEP_OUTCOME]


def sweep_table(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """A row for each index of a sweep."""
    for row in whole_table(sweep):
        yield {_parameter(name): value for name, value in row.parameters.items()} | sweep_run(row)


def sweep_run(row: SweepRun) -> dict[str, Any]:
    """A row of a sweep's table without its parameters."""
    run = row.run if isinstance(row.run, Run) else None
    return {
        "index": row.index,
        "name": row.name,
        "status": row.status,
        "termination_reason": run.termination_reason if run else "",
        "exit_code": run.exit_code if run else None,
        "status_message": statuses.run_message(run) if run else "",
        "started_at": run.started_at if run else None,
        "ended_at": run.ended_at if run else None,
        "duration_s": row.duration_s,
        "id": str(run.uid) if run else None,
    }


def _parameter(name: str) -> str:
    return f"parameter_{name}" if name in (*SWEEP_COLUMNS, *SWEEP_OUTCOME) else name


def queue_table(queue: Queue) -> Iterator[dict[str, Any]]:
    """A queue as it stands, in true order. What is moved while it is read may come twice, or not at all."""
    place: tuple[int, int] | None = None
    position = 0
    while page := rows.queue_export_rows(queue, AT_ONCE, after=place, position=position):
        yield from map(_with_starts, queue_items(page))
        place, position = (page[-1].rank, page[-1].pk), page[-1].position


def queue_items(found: Sequence[QueueRow]) -> list[dict[str, Any]]:
    """Rows of a queue as they are sent. Runs with the same reason share its text."""
    of_shapes = {row.shape: row for row in found}
    words = {shape: waiting.reason(row.reason, row.reason_data).text for shape, row in of_shapes.items()}
    starts.add_words((row.starts, row.start_data) for row in found)
    items = sent(found)
    for item, row in zip(items, found, strict=True):
        item["reason_detail"] = words[row.shape]
    return items


def past_items(found: Sequence[PastQueueRow]) -> list[dict[str, Any]]:
    """Rows of a queue's past as they are sent."""
    items = sent(found)
    for item, row in zip(items, found, strict=True):
        item["reason_detail"] = waiting.reason(row.reason, row.reason_data).text if row.reason else ""
        item["then_detail"] = left(row.then)
    return items


def history_table(project: Project, view: HistoryRange, queue: Queue | None = None) -> Iterator[dict[str, Any]]:
    """A row for each span, queue and priority band in which runs waited or started."""
    each = [(queue, history.series(queue, view))] if queue else history.overview(project, view)[1]
    for of_queue, past in each:
        yield from _spans(of_queue.name, past)


def _spans(name: str, past: History) -> Iterator[dict[str, Any]]:
    for index, at in enumerate(past.times):
        for band, tallies in enumerate(past.bands):
            low, high = wait_stats.band_limits(band)
            numbers = wait_stats.numbers(tallies[index])
            if numbers["placed"] or numbers["length_max"]:
                yield {"at": at, "queue": name, "priority_low": low, "priority_high": high} | numbers


def _with_starts(item: dict[str, Any]) -> dict[str, Any]:
    """With the fields of `starts` beside the others."""
    found = item.pop("starts", None)
    fields = dataclasses.asdict(found) if found else {}
    return item | {f"starts_{name}": value for name, value in fields.items() if value != ""}
