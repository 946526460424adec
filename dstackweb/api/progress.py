"""Progress: the states of a run's tasks, or of a project's runs, counted by the prefix of their names."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any, Literal

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Field, P, Path, Query, QueryEx, Router, Schema

from dstackweb.api.app import Page, project_of, ready, refusals, run_of
from dstackweb.lib.errors import NotFound
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.progress import selectors, task_lists
from dstackweb.progress.models import NAME_MAX
from dstackweb.progress.selectors import GroupFilter, Order, ProgressBar, ScopeProgress, StuckOf, no_stuck
from dstackweb.progress.states import AS_ENDED, AS_REPORTED, PLAIN, TaskState, folded
from dstackweb.progress.task_lists import FailedTask, TaskRow
from dstackweb.runs.models import Run
from dstackweb.runs.stuck import stuck_runs


class StatesOut(Schema):
    """Tasks in each state, shown as done, failed, released, running, queued, no worker, waiting."""

    memory: int
    erred: int
    released: int
    processing: int
    queued: int
    no_worker: int
    waiting: int


class OutcomesOut(Schema):
    """How finished tasks ended; `done`, `failed`, `released` and `forgotten` sum to `finished`."""

    done: int = Field(description="Done, whatever has become of them since")
    released_done: int = Field(description="Those of `done` that are released now")
    forgotten_done: int = Field(description="Those of `done` that are forgotten now")
    failed: int = Field(description="Failed, whatever has become of them since")
    released_failed: int = Field(description="Those of `failed` that are released now")
    forgotten_failed: int = Field(description="Those of `failed` that are forgotten now")
    released: int = Field(description="Released without being done or failed")
    forgotten: int = Field(description="Forgotten without being done or failed, or it is not known")


class GroupOut(Schema):
    """Counters of one group."""

    name: str
    total: int = Field(description="All `states` and `forgotten`")
    states: StatesOut
    forgotten: int = Field(description="Finished, and dropped by their reporter; `total` includes them")
    outcomes: OutcomesOut
    finished: int = Field(description="`memory`, `erred`, `released` and `forgotten`")
    mean_s: float | None = Field(description="Mean duration of a task; null if none was timed")
    recent_s: float | None = Field(description="Recent duration: each report weighs as much as all earlier ones")
    changed_at: dt.datetime | None = Field(description="Time of the last change")


class PrefixOut(GroupOut):
    """Counters of all tasks with the same prefix, their rate, and the time left."""

    groups: int = Field(description="Number of groups, also of those whose tasks are all forgotten")
    rate_per_s: float | None = Field(description="Current rate of finished tasks; null if none finished recently")
    rate_low: float | None
    rate_high: float | None
    paused: int = Field(description="Of a project: runs in paused queues; while there are any, no time left is given")
    impossible: int = Field(description="Of a project: runs that nothing can run; the time left is without them")
    left_s: float | None = Field(description="Estimated seconds until all tasks are finished; null if unknown")
    left_low_s: float | None = Field(description="Start of a range that holds the truth in nine of ten looks")
    left_high_s: float | None = Field(description="End of the range; null too if it is open")


class SilentOut(Schema):
    """Reporters that have unfinished tasks and stopped reporting without saying that they ended."""

    reporters: int
    since: dt.datetime = Field(description="The last report of the one that is silent for the longest time")


class ProgressOut(Schema):
    """A page of prefixes, and the totals of all prefixes."""

    run: str | None = Field(description="Null for a project, like the next three")
    id: str | None
    status: str | None = Field(description="Of the run")
    attempt: int | None = Field(description="The run's attempt; null too if nothing was reported")
    ended: bool = Field(description="The attempt has ended; shortly after the end there may be changes")
    silent: SilentOut | None = Field(description="While it is not null, no time left is given")
    version: int = Field(description="Increases with every change")
    count: int = Field(description="Number of prefixes")
    full: bool = Field(
        description="A run has as many prefixes as are counted one by one (10,000): a Dask scheduler counts further "
        "ones in the prefix `…`, and other reports of new prefixes are refused as `too_many_prefixes`"
    )
    total: PrefixOut = Field(description="The totals; the name is empty")
    prefixes: list[PrefixOut]
    next: str | None = Field(description="The `cursor` of the next page")


class GroupsOut(Page[GroupOut]):
    """A page of a prefix's groups."""


class FailureOut(Schema):
    """A task that has failed."""

    key: str
    prefix: str
    group: str
    message: str
    at: dt.datetime


class FailuresOut(Page[FailureOut]):
    """A page of failed tasks, newest first."""


class TaskOut(Schema):
    """A task that was reported individually."""

    key: str
    state: Literal[tuple(PLAIN)]  # type: ignore[valid-type]  # Dask's states, as reported
    outcome: Literal["done", "failed"] | None = Field(description="How it ended, also if it is released now")
    message: str = Field(description="The newest that was reported with another state than failed; empty without one")
    since: dt.datetime


class TaskListOut(Page[TaskOut]):
    """A page of a group's tasks; empty if they were reported as counts."""


def prefix_of(bar: ProgressBar) -> dict[str, Any]:
    rate, left = bar.rate, bar.left
    return {
        **group_of(bar),
        "groups": bar.groups,
        "rate_per_s": rate and rate.per_s,
        "rate_low": rate and rate.low,
        "rate_high": rate and rate.high,
        "paused": bar.stuck.paused,
        "impossible": bar.stuck.impossible,
        "left_s": left and left.seconds,
        "left_low_s": left and left.low,
        "left_high_s": left.high if left and left.high < math.inf else None,
    }


def group_of(bar: ProgressBar) -> dict[str, Any]:
    states, counts = folded(bar.states, AS_REPORTED), bar.counts
    return {
        "name": bar.name,
        "total": bar.total,
        "states": {state.value: states[state] for state in PLAIN if state != TaskState.FORGOTTEN},
        "forgotten": states[TaskState.FORGOTTEN],
        "outcomes": {
            "done": counts[TaskState.MEMORY],
            "failed": counts[TaskState.ERRED],
            "released": counts[TaskState.RELEASED],
            "forgotten": counts[TaskState.FORGOTTEN],
            **{state.value: bar.states[state] for state in AS_ENDED},
        },
        "finished": bar.finished,
        "mean_s": bar.mean_s,
        "recent_s": bar.recent_s,
        "changed_at": to_moment(bar.changed_ms) if bar.changed_ms else None,
    }


def failure_of(failed: FailedTask) -> dict[str, Any]:
    shown = failed._asdict()
    del shown["id"]
    return shown | {"at": to_moment(shown.pop("at_ms"))}


def task_of(task: TaskRow) -> dict[str, Any]:
    ended = AS_ENDED.get(task.state, task.state)
    return {
        "key": task.key,
        "state": AS_REPORTED.get(task.state, task.state),
        "outcome": {TaskState.MEMORY: "done", TaskState.ERRED: "failed"}.get(ended),
        "message": task.message,
        "since": to_moment(task.since_ms),
    }


router = Router(tags=["progress"])
of_runs = Router(tags=["progress"])
REFUSALS = refusals(404, 422)

Attempt = QueryEx[int | None, P(ge=1, le=2**31 - 1, description="Default: the newest with tasks")]


class Paging(Schema):
    limit: int = Field(50, ge=1, le=500)
    cursor: str = Field("", pattern=r"^(\d{1,18}\.\d{1,18})?$", description="The `next` of the page before")


class Find(Paging):
    find: str = Field("", max_length=NAME_MAX, description="A part of the name, case-insensitive")


class PrefixFilter(Find):
    order: Order = Field(
        "active", description="`active`: unfinished ones first; `failed`: those with the most failed tasks first"
    )


class OfPrefix(Schema):
    prefix: str = Field(max_length=NAME_MAX)


class GroupFilters(Find, OfPrefix):
    only: GroupFilter = Field("", description="`failed`: with failed tasks; `running`: with running tasks")


class FailureFilter(Paging):
    prefix: str = Field("", max_length=NAME_MAX)


class TaskFilter(Paging, OfPrefix):
    group: str = Field(max_length=NAME_MAX)


@router.get("", response={200: ProgressOut, **REFUSALS}, summary="Progress of a project's runs")
def of_project(request: HttpRequest, project: Path[str], wanted: Query[PrefixFilter]) -> HttpResponse:
    """By the prefix of their names; each run is a group."""
    found, _role = project_of(request, project)
    return _prefixes(request, None, _of_project(request, project), wanted, stuck_runs(found).of)


@router.get("/groups", response={200: GroupsOut, **REFUSALS}, summary="A prefix's runs")
def groups_of_project(request: HttpRequest, project: Path[str], wanted: Query[GroupFilters]) -> HttpResponse:
    """Runs with the same name are counted together."""
    return _groups(request, _of_project(request, project), wanted)


@of_runs.get("/{name}/progress", response={200: ProgressOut, **REFUSALS}, summary="Progress of a run's tasks")
def of_run(
    request: HttpRequest, project: Path[str], name: str, wanted: Query[PrefixFilter], attempt: Attempt = None
) -> HttpResponse:
    """By prefix; empty if the run reported no tasks."""
    run, _role = run_of(request, project, name)
    return _prefixes(request, run, selectors.of_run(run.pk, to_ms(timezone.now()), attempt), wanted)


@of_runs.get("/{name}/progress/groups", response={200: GroupsOut, **REFUSALS}, summary="The groups of a prefix")
def groups_of_run(
    request: HttpRequest, project: Path[str], name: str, wanted: Query[GroupFilters], attempt: Attempt = None
) -> HttpResponse:
    """In the order of their first report, without groups whose tasks are all forgotten."""
    return _groups(request, _of_run(request, project, name, attempt), wanted)


@of_runs.get("/{name}/progress/failures", response={200: FailuresOut, **REFUSALS}, summary="Failed tasks")
def failures_of_run(
    request: HttpRequest, project: Path[str], name: str, wanted: Query[FailureFilter], attempt: Attempt = None
) -> HttpResponse:
    """With their messages, newest first; of all prefixes, or of one."""
    overview = _of_run(request, project, name, attempt)
    if overview is None:
        return ready(request, {"items": [], "next": None})
    of = _prefix(overview, wanted.prefix).id if wanted.prefix else None
    found, following = task_lists.failures(overview.scope_id, of, wanted.cursor or None, wanted.limit)
    return ready(request, {"items": [failure_of(failed) for failed in found], "next": following})


@of_runs.get("/{name}/progress/tasks", response={200: TaskListOut, **REFUSALS}, summary="The tasks of a group")
def tasks_of_run(
    request: HttpRequest, project: Path[str], name: str, wanted: Query[TaskFilter], attempt: Attempt = None
) -> HttpResponse:
    """The tasks that were reported individually, in the order of their first report."""
    of = _prefix(_of_run(request, project, name, attempt), wanted.prefix)
    bar = selectors.group(of.id, wanted.group)
    if bar is None:
        raise NotFound(
            _("there is no group %(group)s in %(prefix)s") % {"group": repr(wanted.group), "prefix": wanted.prefix}
        )
    found, following = task_lists.tasks(bar.id, wanted.cursor or None, wanted.limit)
    return ready(request, {"items": [task_of(task) for task in found], "next": following})


def _prefixes(
    request: HttpRequest,
    run: Run | None,
    overview: ScopeProgress | None,
    wanted: PrefixFilter,
    stuck: StuckOf = no_stuck,
) -> HttpResponse:
    """ProgressOut; empty if nothing was reported."""
    bars: list[ProgressBar] = []
    following = None
    if overview is None:
        nothing = ProgressBar(0, "", dict.fromkeys(TaskState, 0), 0, 0, 0, 0, None, None, None, 0, 0)
        overview = ScopeProgress(0, 0, 0, 0, 0, nothing, ended=False)
    else:
        totals, bars, following = selectors.prefixes(
            overview.scope_id, to_ms(timezone.now()), find=wanted.find, order=wanted.order, after=wanted.cursor or None,
            limit=wanted.limit, stuck=stuck,
        )  # fmt: skip
        overview = totals or overview
    answer = {
        "run": run and run.name,
        "id": run and str(run.uid),
        "status": run and run.status,
        "attempt": overview.attempt or None,
        "ended": overview.ended,
        "silent": overview.silence
        and {"reporters": overview.silence.reporters, "since": to_moment(overview.silence.since_ms)},
        "version": overview.version,
        "count": overview.prefixes,
        "full": overview.is_full,
        "total": prefix_of(overview.bar),
        "prefixes": [prefix_of(bar) for bar in bars],
        "next": following,
    }
    return ready(request, answer)


def _groups(request: HttpRequest, overview: ScopeProgress | None, wanted: GroupFilters) -> HttpResponse:
    of = _prefix(overview, wanted.prefix)
    bars, following = selectors.groups(
        of.id, only=wanted.only, find=wanted.find, after=wanted.cursor or None, limit=wanted.limit
    )
    return ready(request, {"items": [group_of(bar) for bar in bars], "next": following})


def _of_project(request: HttpRequest, project: str) -> ScopeProgress | None:
    found, _role = project_of(request, project)
    return selectors.of_project(found.pk, to_ms(timezone.now()))


def _of_run(request: HttpRequest, project: str, name: str, attempt: int | None) -> ScopeProgress | None:
    return selectors.of_run(run_of(request, project, name)[0].pk, to_ms(timezone.now()), attempt)


def _prefix(overview: ScopeProgress | None, name: str) -> ProgressBar:
    bar = selectors.prefix(overview, name, to_ms(timezone.now())) if overview is not None else None
    if bar is None:
        raise NotFound(_("there is no prefix %(name)s here") % {"name": repr(name)})
    return bar
