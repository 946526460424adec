"""What pages and the API read of sweeps."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import NotFound
from dstackweb.lib.sql import parsed_uid
from dstackweb.runs.codes import NoRun
from dstackweb.runs.models import Queue, Run, Sweep
from dstackweb.runs.prefix_counters import took_s
from dstackweb.runs.run_names import run_name
from dstackweb.runs.selectors import TEXTS
from dstackweb.runs.states import ENDED, PLACED, RunStatus
from dstackweb.spec.array import Array, Parameters

PAGE = 1000
"""Most rows of a sweep's table that are read at once."""
NOT_SHOWN = (*TEXTS, "spec", "penalty_basis")
LARGE = ("array", "spec", "provenance", "config_text", "env_secret")
"""Columns that only the creation of runs needs."""
JOINED = Sweep.objects.select_related("queue", "project", "user", "stopped_by", "count")


def find_sweep(project: Project, name: str) -> Sweep:
    """The sweep with this uid, or the newest of this name. Raises NotFound."""
    sweeps = JOINED.filter(project=project)
    uid = parsed_uid(name)
    found = (sweeps.filter(uid=uid) if uid else sweeps.filter(name=name).order_by("-id")).first()
    if found is None:
        raise NotFound(_("no sweep is called %(name)s in %(project)s") % {"name": repr(name), "project": project.name})
    return found


def find_sweeps(ids: Collection[int]) -> list[Sweep]:
    """The sweeps with these ids, without what is large."""
    return list(JOINED.filter(pk__in=ids).defer(*LARGE).order_by("pk"))


def newest_sweeps(
    project: Project, limit: int, before: int | None = None, *, active: bool = False, queue: Queue | None = None
) -> list[Sweep]:
    """The project's sweeps, newest first, without what is large; those that have not ended, those of a queue."""
    sweeps = JOINED.filter(project=project).defer(*LARGE).order_by("-id")
    if before is not None:
        sweeps = sweeps.filter(pk__lt=before)
    if active:
        sweeps = sweeps.filter(ended_at=None)
    if queue is not None:
        sweeps = sweeps.filter(queue=queue)
    return list(sweeps[:limit])


@dataclass(frozen=True)
class SweepRun:
    """A row of a sweep's table: a run, or why there is none."""

    index: int
    name: str
    parameters: Parameters
    run: Run | NoRun

    @property
    def status(self) -> RunStatus | NoRun:
        return RunStatus(self.run.status) if isinstance(self.run, Run) else self.run

    @property
    def duration_s(self) -> float | None:
        """Seconds from the start of its newest attempt to its end; None before."""
        return took_s(self.run.started_at, self.run.ended_at) if isinstance(self.run, Run) else None

    def elapsed_s(self, now: dt.datetime) -> float | None:
        """The same, or up to now while it runs."""
        if isinstance(self.run, Run) and self.run.status in PLACED:
            return took_s(self.run.started_at, now)
        return self.duration_s


def table(sweep: Sweep, start: int, limit: int) -> list[SweepRun]:
    """Rows of a sweep from an index on, one for each index, whether its run exists or not. One statement."""
    end = min(sweep.size, start + limit)
    if start >= end:
        return []
    runs = {
        run.sweep_index: run for run in sweep.runs.filter(sweep_index__gte=start, sweep_index__lt=end).defer(*NOT_SHOWN)
    }
    return list(_rows(sweep, range(start, end), runs))


def table_of_status(sweep: Sweep, statuses: Sequence[RunStatus], start: int, limit: int) -> list[SweepRun]:
    """The same with only the runs that are in one of these statuses."""
    mine = sweep.runs.filter(status__in=statuses, sweep_index__gte=start).order_by("sweep_index")
    runs = {run.sweep_index: run for run in mine.defer(*NOT_SHOWN)[:limit]}
    return list(_rows(sweep, [index for index in runs if index is not None], runs))


def whole_table(sweep: Sweep) -> Iterator[SweepRun]:
    """All rows, read PAGE at a time."""
    for start in range(0, sweep.size, PAGE):
        yield from table(sweep, start, PAGE)


def _rows(sweep: Sweep, indices: Sequence[int], runs: dict[int | None, Run]) -> Iterator[SweepRun]:
    array, rest = Array.model_validate(sweep.array), NoRun.DROPPED if sweep.stopped_at else NoRun.TO_COME
    for index in indices:
        run = runs.get(index) or (NoRun.REMOVED if index < sweep.next_index else rest)
        yield SweepRun(index, run_name(sweep.name, index), array.parameters(index), run)


def parameter_names(sweep: Sweep) -> tuple[str, ...]:
    """The columns of its table, in the order of the file."""
    return Array.model_validate(sweep.array).names


@dataclass(frozen=True)
class SweepCounts:
    """How many of a sweep's runs are where; all of them add up to its size.

    `left` are to be created, `dropped` never will be, since it was stopped, and `removed` were.
    """

    waiting: int
    running: int
    done: int
    failed: int
    terminated: int
    left: int
    dropped: int
    removed: int

    @classmethod
    def of(cls, sweep: Sweep) -> SweepCounts:
        count, rest = sweep.count, sweep.size - sweep.next_index
        ended = {status.value: getattr(count, status.value) for status in ENDED}
        is_stopped = sweep.stopped_at is not None
        existing = count.waiting + count.placed + sum(ended.values())
        return cls(
            waiting=count.waiting,
            running=count.placed,
            **ended,
            left=0 if is_stopped else rest,
            dropped=rest if is_stopped else 0,
            removed=sweep.next_index - existing,
        )
