"""Compare the counters of tasks with the rows they count.

A run's groups are counted again from task rows and the reporters' latest counts. These rows are deleted some time after
an attempt's end; from then on the counters may be larger, but never smaller. A project's groups count runs, which
`runs.recount` compares.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from math import isclose
from operator import add
from typing import Any

from django.db.models import BooleanField, Count, ExpressionWrapper, F, Model, Q, QuerySet, Sum

from dstackweb.progress.models import Reporter, ReporterCount, Scope, Task, TaskGroup, TaskPrefix
from dstackweb.progress.states import GONE, LIVE, LIVE_CODES, SHOWN, STATE_OF, TaskState

STATES = [state.value for state in TaskState]
OVER = ExpressionWrapper(Q(reporter__ended_seq__gte=F("seq")), output_field=BooleanField())
"""Whether the reporter has ended since this report."""


@dataclass(frozen=True)
class Difference:
    """The counter `what` has the value `kept`; a recount gives `counted`. The command `recount --check` prints it."""

    what: str
    kept: float
    counted: float

    def __str__(self) -> str:
        return f"{self.what}: kept {self.kept}, counted {self.counted}"


def differences() -> Iterator[Difference]:
    """All differences. Exact only without concurrent writes, or inside one snapshot."""
    yield from _totals()
    yield from _sums(TaskGroup, TaskPrefix, "prefix", [state.value for state in SHOWN], "groups")
    yield from _sums(TaskPrefix, Scope, "scope", [*STATES, "duration_n", "duration_s", "groups"], "prefixes")
    yield from _rows()
    yield from _unfinished()
    yield from _durations()


def _durations() -> Iterator[Difference]:
    """Histograms with more tasks than were timed."""
    for prefix in TaskPrefix.objects.exclude(durations={}):
        if (counted := sum(prefix.durations.values())) > prefix.duration_n:
            yield Difference(f"durations of {_name(prefix)}", counted, prefix.duration_n)


def _totals() -> Iterator[Difference]:
    """Totals that differ from the sum of their states, and groups that should have been deleted."""
    everything = reduce(add, (F(state) for state in STATES))
    for model in (Scope, TaskPrefix, TaskGroup):
        wrong: QuerySet[Any] = model._default_manager.annotate(everything=everything).exclude(total=F("everything"))
        for row in wrong:
            yield Difference(f"total of {_name(row)}", row.total, row.everything)
    for group in TaskGroup.objects.filter(total=0):
        yield Difference(f"groups called {_name(group)} that have no tasks", 1, 0)


def _sums(
    parts: type[Model], wholes: type[Model], parent: str, columns: list[str], number: str
) -> Iterator[Difference]:
    """Counters of prefixes that differ from the sums of their groups, or of scopes from those of their prefixes."""
    sums = parts._default_manager.order_by().values(parent).annotate(**{f"all_{name}": Sum(name) for name in columns})
    summed = {row[parent]: row for row in sums.annotate(number=Count("pk"))}
    for whole in wholes._default_manager.all():
        row = summed.get(whole.pk, {})
        for name in columns:
            kept, counted = getattr(whole, name), row.get(f"all_{name}", 0)
            if not isclose(kept, counted, rel_tol=1e-9, abs_tol=1e-3):
                yield Difference(f"{name} of {_name(whole)}", kept, counted)
        if getattr(whole, number) != row.get("number", 0):
            yield Difference(f"{number} of {_name(whole)}", getattr(whole, number), row.get("number", 0))


@dataclass
class _Counted:
    """Rows of a scope, counted: tasks by (prefix, group, state), forgotten ones by (prefix, state), numbers of rows."""

    groups: Counter[tuple[int, str, TaskState]] = field(default_factory=Counter)
    forgotten: Counter[tuple[int, TaskState]] = field(default_factory=Counter)
    tasks: int = 0
    reports: int = 0


def _rows() -> Iterator[Difference]:
    """Groups and forgotten tasks of runs' scopes that differ from the rows of tasks and reporters."""
    counted: defaultdict[int, _Counted] = defaultdict(_Counted)
    _count_tasks(counted)
    _count_reports(counted)
    for scope in Scope.objects.filter(run_id__gt=0):
        rows = counted[scope.pk]
        if scope.tasks != rows.tasks:
            yield Difference(f"rows of {scope}", scope.tasks, rows.tasks)
        if scope.counted != rows.reports:
            yield Difference(f"reported counts of {scope}", scope.counted, rows.reports)
        yield from _compare(scope, rows)


def _count_tasks(counted: defaultdict[int, _Counted]) -> None:
    tasks = Task.objects.order_by().values("scope", "prefix", "group__name", "state", over=OVER).annotate(n=Count("pk"))
    for row in tasks:
        into, state = counted[row["scope"]], STATE_OF[row["state"]]
        into.tasks += row["n"]
        if state in GONE:
            into.forgotten[row["prefix"], state] += row["n"]
        else:
            into.groups[row["prefix"], row["group__name"] or "", _folded(state, row["over"])] += row["n"]


def _count_reports(counted: defaultdict[int, _Counted]) -> None:
    reports = ReporterCount.objects.order_by().values_list("reporter__scope", "prefix", "group", OVER)
    sums_of = {f"all_{state}": Sum(state) for state in STATES}
    for scope_id, prefix_id, group, over, number, *sums in reports.annotate(n=Count("pk"), **sums_of):
        into = counted[scope_id]
        into.reports += number
        for state, tasks in zip(TaskState, sums, strict=True):
            if state in GONE:
                into.forgotten[prefix_id, state] += tasks
            else:
                into.groups[prefix_id, group, _folded(state, over)] += tasks


def _unfinished() -> Iterator[Difference]:
    """Numbers of unfinished tasks of reporters, in attempts that go on, that differ from their rows."""
    found: Counter[int] = Counter()
    live = Task.objects.filter(state__in=LIVE_CODES)
    found.update(dict(live.order_by().values_list("reporter").annotate(n=Count("pk"))))
    counts = ReporterCount.objects.order_by().values_list("reporter")
    found.update(dict(counts.annotate(n=Sum(reduce(add, (F(state) for state in LIVE))))))
    for reporter in Reporter.objects.filter(scope__ended_ms=None).select_related("scope__project"):
        if reporter.unfinished != found[reporter.pk]:
            what = f"unfinished tasks of reporter {reporter.name!r} of {reporter.scope}"
            yield Difference(what, reporter.unfinished, found[reporter.pk])


def _folded(state: TaskState, over: bool | None) -> TaskState:
    return TaskState.RELEASED if over and state in LIVE else state


def _compare(scope: Scope, rows: _Counted) -> Iterator[Difference]:
    """Counters of a run's scope that differ from its rows. Tasks that were live at the attempt's end are released."""
    over = scope.ended_ms is not None
    kept: Counter[tuple[int, str, TaskState]] = Counter()
    for group in TaskGroup.objects.filter(prefix__scope=scope):
        for state in SHOWN:
            kept[group.prefix_id, group.name, _folded(state, over)] += getattr(group, state)
    found: Counter[tuple[int, str, TaskState]] = Counter()
    for (prefix_id, name, state), number in rows.groups.items():
        found[prefix_id, name, _folded(state, over)] += number
    for key in sorted(kept.keys() | found.keys()):
        if found[key] > kept[key] or (found[key] != kept[key] and not over):
            yield Difference(f"{key[2]} of group {key[1]!r} of {scope}", kept[key], found[key])
    for prefix in TaskPrefix.objects.filter(scope=scope):
        for state in sorted(GONE):
            number, stored = rows.forgotten[prefix.pk, state], getattr(prefix, state)
            if number > stored or (number != stored and not over):
                yield Difference(f"{state} of {_name(prefix)}", stored, number)


def _name(row: Model) -> str:
    match row:
        case TaskPrefix():
            return f"prefix {row.name!r} of {row.scope}"
        case TaskGroup():
            return f"group {row.name!r} of {row.prefix.scope}"
    return str(row)
