"""Measure what a progress page costs to read and to update, on SQLite and on PostgreSQL.

    python -m bench.progress_read [sqlite|postgres] [GROUPS…]

Compares the counters of a run's 23 prefixes with: `GROUP BY` over the same tasks (ten per group), the sum of the
counters of all groups, and Dask's two ways on its own objects in memory (the counts kept per prefix today, and the
earlier merge over all groups). A query of one row is the floor. Then prints the bytes of one update of the page by the
number of changed prefixes, and what the pages of a run with 10,000 prefixes cost.
"""

from __future__ import annotations

import gzip
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from bench import sides

GROUPS = (1_000, 10_000, 100_000)
TASKS_PER_GROUP = 10
PREFIXES = 23
SHARES = [
    ("memory", 70),
    ("erred", 2),
    ("released", 3),
    ("processing", 4),
    ("queued", 6),
    ("no_worker", 1),
    ("waiting", 14),
]
"""Of a hundred tasks."""
NUMBERS = "WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < %s)"


def measure(sizes: list[int]) -> None:
    """Prints a table for each size, and one of updates."""
    import django

    django.setup()
    from django.core.management import call_command

    from dstackweb.lib.process import collect_rarely
    from dstackweb.runs import services
    from tests.factories import join, make_project, make_run, make_user

    collect_rarely()  # as the web server's processes do
    call_command("migrate", verbosity=0)
    project = make_project("main")
    ada = join(project, make_user("ada"))
    services.ensure_queue(project)
    for groups in sizes:
        run = make_run(project, ada, f"sweep-{groups}")
        scope = _fill(run, groups)
        _reads(scope, groups)
    now_ms = time.time_ns() // 1_000_000
    with patch("dstackweb.web.progress.views.now_ms", lambda: now_ms):  # rates change with time, too
        _updates(ada, run, scope)
    _many_prefixes(ada, make_run(project, ada, "wide"))


def _fill(run: Any, groups: int) -> Any:
    """A scope of that many groups; its tasks are rows, and their counters what a recount finds."""
    from django.db import connection

    from dstackweb.progress.models import Reporter, Scope, TaskPrefix
    from dstackweb.progress.states import CODES, TaskState

    now_ms = time.time_ns() // 1_000_000
    scope = Scope.objects.create(
        project=run.project, run_id=run.pk, attempt=1, first_ms=now_ms - 600_000, rated_ms=now_ms,
        finished_1m=600, finished_10m=3000,
    )  # fmt: skip
    reporter = Reporter.objects.create(scope=scope, name="bench")
    names = [f"prefix-{chr(97 + number)}" for number in range(PREFIXES)]
    rated = {"first_ms": scope.first_ms, "rated_ms": now_ms, "finished_1m": 25, "finished_10m": 130}
    TaskPrefix.objects.bulk_create(TaskPrefix(scope=scope, name=name, **rated) for name in names)
    first = TaskPrefix.objects.filter(scope=scope).order_by("id").first()
    assert first is not None
    code = "CASE"
    below = 0
    for state, share in SHARES:
        below += share
        code += f" WHEN n %% 100 < {below} THEN {CODES[TaskState(state)]}"
    code += " END"
    counted = {state: f"sum(CASE WHEN state = {CODES[state]} THEN 1 ELSE 0 END)" for state in TaskState}
    rest = ", ".join(["total", "duration_n", "duration_s", "version", "changed_ms"])
    with connection.cursor() as cursor:
        cursor.execute("SELECT coalesce(max(id), 0) + 1 FROM progress_taskgroup")
        (group,) = cursor.fetchone()
        cursor.execute(
            f"{NUMBERS} "
            "INSERT INTO progress_task (scope_id, prefix_id, group_id, reporter_id, key, state, seq, since_ms) "
            f"SELECT %s, %s + n / %s %% {PREFIXES}, %s + n / %s, %s, 'task-' || n, {code}, 1, %s FROM numbers",
            [
                groups * TASKS_PER_GROUP,
                scope.pk,
                first.pk,
                TASKS_PER_GROUP,
                group,
                TASKS_PER_GROUP,
                reporter.pk,
                now_ms,
            ],
        )
        cursor.execute(
            f"INSERT INTO progress_taskgroup (id, prefix_id, name, {', '.join(counted)}, {rest}) "
            f"SELECT group_id, prefix_id, 'group-' || group_id, {', '.join(counted.values())}, count(*), 0, 0, 1, %s "
            "FROM progress_task WHERE scope_id = %s GROUP BY group_id, prefix_id",
            [now_ms, scope.pk],
        )
        if connection.vendor == "postgresql":
            cursor.execute("SELECT setval(pg_get_serial_sequence('progress_taskgroup', 'id'), %s)", [group + groups])
    _sum_up(scope)
    sides.settle()
    return scope


def _many_prefixes(ada: Any, run: Any) -> None:
    """Reading pages of a run with as many prefixes as are counted one by one, each with a hundred tasks."""
    from django.test import Client

    from dstackweb.progress import selectors
    from dstackweb.progress.counters import PREFIXES_MAX
    from dstackweb.progress.models import Scope, TaskPrefix

    now_ms = time.time_ns() // 1_000_000
    rates = {"first_ms": now_ms - 600_000, "rated_ms": now_ms, "finished_1m": 2, "finished_10m": 9, "version": 1}
    counts = {**dict(SHARES), "total": 100}
    scope = Scope.objects.create(
        project=run.project, run_id=run.pk, attempt=1, prefixes=PREFIXES_MAX, **rates,
        **{name: number * PREFIXES_MAX for name, number in counts.items()},
    )  # fmt: skip
    TaskPrefix.objects.bulk_create(
        TaskPrefix(scope=scope, name=f"prefix-{number}", groups=1, **rates, **counts) for number in range(PREFIXES_MAX)
    )
    sides.settle()
    last = TaskPrefix.objects.filter(scope=scope).order_by("id").values_list("pk", flat=True)[PREFIXES_MAX - 100]
    client = Client(headers={"HX-Request": "true"}, SERVER_NAME="127.0.0.1")
    client.force_login(ada)
    path = f"/p/main/runs/{run.name}/progress/"
    shown = client.get(path).headers["HX-PTag"]

    def poll() -> None:
        """The answer to a page after one of its prefixes has changed."""
        TaskPrefix.objects.filter(pk=last).update(version=2)
        Scope.objects.filter(pk=scope.pk).update(version=2)
        sides.must_be(client.get(path, headers={"HX-PTag": shown}).status_code, 200)

    orders: dict[selectors.Order, int] = {"active": 0, "failed": -2, "name": 0}
    reads = {}
    for order, place in orders.items():
        for name, after in (("first page", None), ("a page near the end", f"{place}.{last}")):
            read = partial(selectors.prefixes, scope.pk, now_ms, order=order, after=after)
            reads[f"{order}: {name}"] = _timed(read)
    reads["a search that finds 1"] = _timed(lambda: selectors.prefixes(scope.pk, now_ms, find="prefix-9999"))
    reads["poll: nothing has changed"] = _timed(lambda: selectors.of_run(scope.run_id, now_ms))
    reads["the page's response to a poll after a change"] = _timed(poll)
    rows = {name: [_cell(values)] for name, values in reads.items()}
    sides.table(f"{sides.database()}: {PREFIXES_MAX:,} prefixes, 50 a page", ["ms"], rows)


def _sum_up(scope: Any) -> None:
    """The counters of prefixes and of the scope are the sums of its groups'."""
    from django.db.models import Count, Sum

    from dstackweb.progress.models import TaskGroup, TaskPrefix
    from dstackweb.progress.states import TaskState

    sums = {name: Sum(name) for name in (*(state.value for state in TaskState), "total")}
    for row in TaskGroup.objects.filter(prefix__scope=scope).values("prefix").annotate(**sums, groups=Count("id")):
        TaskPrefix.objects.filter(pk=row.pop("prefix")).update(**row, version=1)
    whole = TaskPrefix.objects.filter(scope=scope).aggregate(**sums, groups=Sum("groups"))
    type(scope).objects.filter(pk=scope.pk).update(**whole, prefixes=PREFIXES, tasks=whole["total"], version=1)


def _reads(scope: Any, groups: int) -> None:
    from django.db import connection

    from dstackweb.lib import sql
    from dstackweb.progress import selectors
    from dstackweb.progress.states import STATE_OF

    now_ms = time.time_ns() // 1_000_000

    def page() -> list[selectors.ProgressBar]:
        assert selectors.of_run(scope.run_id, now_ms) is not None
        return selectors.prefixes(scope.pk, now_ms)[1]

    def by_tasks() -> dict[tuple[int, str], int]:
        found = sql.rows(
            "SELECT prefix_id, state, count(*) FROM progress_task WHERE scope_id = %s GROUP BY prefix_id, state",
            [scope.pk],
        )
        return {(prefix, STATE_OF[state]): number for prefix, state, number in found}

    def by_groups() -> dict[tuple[int, str], int]:
        states = [state for state, _ in SHARES]
        found = sql.rows(
            f"SELECT prefix_id, {', '.join(f'sum({state})' for state in states)} FROM progress_taskgroup "
            f"WHERE prefix_id IN ({sql.places(bars)}) GROUP BY prefix_id",
            [bar.id for bar in bars],
        )
        return {(row[0], state): int(number) for row in found for state, number in zip(states, row[1:], strict=True)}

    bars = page()
    kept = {(bar.id, state): number for bar in bars for state, number in bar.counts.items() if number}
    sides.must_be(by_tasks(), kept)
    sides.must_be({place: number for place, number in by_groups().items() if number}, kept)
    today, merged = _dask(kept, groups)
    prefix = bars[-1].id
    with connection.cursor() as cursor:
        cursor.execute("SELECT max(id) FROM progress_taskgroup WHERE prefix_id = %s", [prefix])
        last = f"0.{cursor.fetchone()[0] - 51 * PREFIXES}"
    sides.must_be(len(selectors.groups(prefix, after=last)[0]), min(50, groups // PREFIXES))
    rows = {
        "floor: one row by its key": _timed(
            lambda: sql.rows("SELECT id FROM progress_scope WHERE id = %s", [scope.pk])
        ),
        "page's poll: has anything changed?": _timed(lambda: selectors.of_run(scope.run_id, now_ms)),
        "page's counters: totals and 23 prefixes": _timed(page),
        "50 groups of a prefix, the last ones": _timed(lambda: selectors.groups(prefix, after=last)),
        "its groups with failed tasks": _timed(lambda: selectors.groups(prefix, only="failed")),
        "a search of its groups that finds none": _timed(lambda: selectors.groups(prefix, find="missing")),
        "GROUP BY over all tasks": _timed(by_tasks),
        "sums over all groups' counters": _timed(by_groups),
        "Dask today: counts kept in memory": _timed(today),
        "Dask before: merge over all groups": _timed(merged),
    }
    kept_ms = statistics.median(rows["page's counters: totals and 23 prefixes"])
    cells = {name: [_cell(values), f"{statistics.median(values) / kept_ms:,.3g}"] for name, values in rows.items()}
    heading = f"{sides.database()}: {groups:,} groups, {groups * TASKS_PER_GROUP:,} tasks"
    sides.table(heading, ["ms", "times the counters"], cells)
    connection.close()


def _dask(kept: dict[tuple[int, str], int], groups: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Reading the same counts off a scheduler's own objects, as its dashboard does and as it did."""
    from distributed.scheduler import TaskGroup, TaskPrefix
    from tlz import merge_with

    prefixes = []
    for place in sorted({place for place, _state in kept}):
        prefix: Any = TaskPrefix(f"prefix-{place}")
        counts = {state: number for (of, state), number in kept.items() if of == place}
        its = [TaskGroup(f"prefix-{place}-{number}", prefix) for number in range(max(1, groups // PREFIXES))]
        for state, number in counts.items():
            prefix.states[state.replace("_", "-")] = number
            for index, group in enumerate(its):
                group.states[state.replace("_", "-")] = number // len(its) + (index < number % len(its))
        prefixes.append(prefix)

    def today() -> dict[str, dict[str, int]]:
        return {prefix.name: dict(prefix.states) for prefix in prefixes}

    def merged() -> dict[str, dict[str, int]]:
        return {prefix.name: merge_with(sum, [group.states for group in prefix.groups]) for prefix in prefixes}

    sides.must_be(merged(), today())
    return today, merged


def _updates(ada: Any, run: Any, scope: Any) -> None:
    """Bytes of the page, and of one of its polls, by how many of its prefixes have changed."""
    from django.test import Client

    from dstackweb.progress.models import Scope, TaskPrefix

    client = Client(headers={"HX-Request": "true"}, SERVER_NAME="127.0.0.1")
    client.force_login(ada)
    path = f"/p/main/runs/{run.name}/progress/"
    whole = client.get(path, headers={"HX-Request": "false"})
    rows = {"the page, once": _sizes(whole.content)}
    ids = list(TaskPrefix.objects.filter(scope=scope).order_by("id").values_list("pk", flat=True))
    for number in (0, 1, 5, PREFIXES):
        before = client.get(path)
        version = Scope.objects.get(pk=scope.pk).version + 1
        if number:
            TaskPrefix.objects.filter(pk__in=ids[:number]).update(version=version)
            Scope.objects.filter(pk=scope.pk).update(version=version)
        after = client.get(path, headers={"HX-PTag": before.headers["HX-PTag"]})
        sides.must_be(after.status_code, 200 if number else 204)
        rows[f"an update: {number} of {PREFIXES} prefixes have changed"] = _sizes(after.content)
    sides.table("bytes of bodies", ["plain", "gzip"], rows)


def _sizes(body: bytes) -> list[str]:
    return [f"{len(body):,}", f"{len(gzip.compress(body, 6)) if body else 0:,}"]


def _timed(act: Callable[[], object]) -> list[float]:
    """Milliseconds, of ten calls at least, and of as many as fit into half a second."""
    act()
    values: list[float] = []
    while len(values) < 10 or (sum(values) < 500 and len(values) < 2000):
        values.append(sides.timed(act))
    return values


def _cell(values: list[float]) -> str:
    """The median, and what nine of ten stay below."""
    ninth = sorted(values)[len(values) * 9 // 10]
    return f"{statistics.median(values):,.3f} (p90 {ninth:,.3f})"


if __name__ == "__main__":
    if sides.here():
        measure([int(size) for size in sys.argv[1:]] or list(GROUPS))
    else:
        sides.on_each_side(sys.argv[1:])
