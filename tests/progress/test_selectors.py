"""What is read of counters, and that it is a few rows by index however many there are."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dstackweb.accounts.models import Project
from dstackweb.progress import selectors, task_lists
from dstackweb.progress.counters import Delta
from dstackweb.progress.models import Reporter, Scope, Task, TaskFailure, TaskPrefix
from dstackweb.progress.selectors import Order, ProgressBar, Stuck
from dstackweb.progress.states import CODES, TaskState
from dstackweb.progress.task_lists import FailedTask, TaskRow
from dstackweb.progress.time_left import Left
from tests.browser.task_demo import shift
from tests.factories import make_project
from tests.progress.rows import SEEN_S, add_group, make_scope

pytestmark = pytest.mark.django_db
NOW = 1_800_000_000_000


@pytest.fixture
def project() -> Project:
    return make_project("main")


@pytest.fixture
def scope(project: Project) -> Scope:
    return make_scope(project)


def all_of(page: Callable[..., tuple[list[Any], str | None]], limit: int) -> list[Any]:
    """All pages, one after the other."""
    items, after = page(after=None, limit=limit)
    while after is not None:
        more, after = page(after=after, limit=limit)
        assert more
        items += more
    return items


def names(scope: Scope, limit: int = 50, **asked: Any) -> list[str]:
    return [bar.name for bar in all_of(lambda **page: selectors.prefixes(scope.pk, NOW, **asked, **page)[1:], limit)]


def test_a_bar_has_all_states_sums_and_the_estimate(scope: Scope) -> None:
    add_group(scope, "train", "train-a", NOW - 60_000, memory=30, erred=2, processing=4, queued=3, no_worker=1)
    add_group(scope, "train", "train-b", NOW, waiting=5, released=1, forgotten=7)
    TaskPrefix.objects.update(duration_n=4, duration_s=10, duration_ewma_s=1.5)
    totals, [bar], following = selectors.prefixes(scope.pk, NOW)
    assert totals is not None
    assert (totals.bar.total, totals.prefixes, totals.version) == (53, 1, 2)
    assert following is None
    assert bar.counts == {
        "memory": 30, "erred": 2, "released": 1, "processing": 4, "queued": 3, "no_worker": 1, "waiting": 5,
        "forgotten": 7,
    }  # fmt: skip
    assert {state: n for state, n in bar.states.items() if n} == {state: n for state, n in bar.counts.items() if n}
    assert (bar.name, bar.total, bar.finished, bar.live, bar.groups) == ("train", 53, 40, 13, 2)
    assert (bar.mean_s, bar.recent_s) == (2.5, 1.5)
    assert bar.rate is not None
    assert bar.left is not None
    # One of the 13 has nobody to run it. The others take as long as the 40 before them.
    assert bar.left.seconds == pytest.approx(SEEN_S * 12 / 40, rel=0.2)
    assert bar.left.high == math.inf
    assert (bar.version, bar.changed_ms) == (2, NOW)


def test_totals_take_at_least_as_long_as_their_slowest_prefix(scope: Scope) -> None:
    add_group(scope, "fast", "fast-1", NOW - 60_000, memory=600, queued=1)
    add_group(scope, "slow", "slow-1", NOW, memory=2, queued=50)
    orders: tuple[selectors.Order, ...] = ("active", "name")
    for order in orders:
        totals, _bars, _next = selectors.prefixes(scope.pk, NOW, order=order, limit=1)
        assert totals is not None
        assert totals.bar.rate is not None
        assert totals.bar.left is not None
        slow = selectors.prefix(totals, "slow", NOW)
        assert slow is not None
        assert slow.left is not None
        assert totals.bar.left.seconds == pytest.approx(slow.left.seconds, abs=0.001)
        assert totals.bar.left.seconds > totals.bar.live / totals.bar.rate.per_s


def test_impossible_tasks_are_left_out_of_the_time_left_and_paused_ones_leave_it_unknown(scope: Scope) -> None:
    add_group(scope, "train", "train-1", NOW - 60_000, memory=30, queued=10)

    def left(paused: int, impossible: int) -> Left | None:
        stuck = Stuck(paused, impossible)
        [bar] = selectors.prefixes(scope.pk, NOW, stuck=lambda bar: stuck)[1]
        return bar.left

    whole, some = left(0, 0), left(0, 4)
    assert whole is not None
    assert some is not None
    assert some.seconds == pytest.approx(whole.seconds * 6 / 10, rel=0.1)
    assert left(1, 0) is None
    assert left(0, 10) is None


def test_released_and_forgotten_tasks_stay_done_or_failed(scope: Scope) -> None:
    add_group(scope, "odd", "odd-a", memory=1, released_done=2, forgotten_done=3, released=4, forgotten=5)
    add_group(scope, "odd", "odd-b", released_failed=1)
    add_group(scope, "odd", "odd-c", forgotten_failed=1)
    add_group(scope, "even", "even", forgotten_done=1)
    _, [first, _second], _ = selectors.prefixes(scope.pk, NOW, order="failed")
    assert {state: n for state, n in first.counts.items() if n} == {
        "memory": 6, "erred": 2, "released": 4, "forgotten": 5,
    }  # fmt: skip
    assert (first.name, first.total, first.finished) == ("odd", 17, 17)
    assert [bar.name for bar in selectors.groups(first.id, only="failed")[0]] == ["odd-b", "odd-c"]


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_totals_are_the_sums_of_prefixes_while_others_write(project: Project) -> None:
    scope_id, stop = make_scope(project, 7, 1).pk, threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            shift(scope_id, {(f"p{number % 7}", "g"): Delta({TaskState.WAITING: 1})}, NOW)
        connection.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(400):
            totals, bars, _ = selectors.prefixes(scope_id, NOW)
            assert totals is not None
            assert totals.bar.total == sum(bar.total for bar in bars)
    finally:
        stop.set()
        writer.join()


def test_an_overview_is_the_scopes_own_row(project: Project, scope: Scope) -> None:
    add_group(scope, "train", "train-a", NOW, memory=3)
    add_group(scope, "eval", "eval", NOW, erred=1, processing=1)
    with CaptureQueriesContext(
        connection,
    ) as seen:
        found = selectors.of_project(project.pk, NOW)
    assert len(seen) == 1
    assert found is not None
    assert (found.scope_id, found.version, found.prefixes, found.attempt, found.ended) == (scope.pk, 2, 2, 0, False)
    assert (found.bar.total, found.bar.finished, found.bar.groups) == (5, 4, 2)
    assert selectors.of_project(project.pk + 1, NOW) is None


def test_without_heartbeats_of_a_reporter_of_unfinished_tasks_the_time_left_is_unknown(project: Project) -> None:
    scope = make_scope(project, 7, 1)
    add_group(scope, "train", "train", NOW - 1000, memory=30, processing=2)
    made = [
        Reporter(scope=scope, name="killed", last_ms=NOW - 90_000, due_ms=NOW - 45_000, unfinished=2),
        Reporter(scope=scope, name="alive", last_ms=NOW - 90_000, due_ms=NOW + 1, unfinished=1),
        Reporter(scope=scope, name="through", last_ms=1, due_ms=2),
        Reporter(scope=scope, name="promised nothing", last_ms=1, unfinished=1),
    ]
    for reporter in made:
        reporter.save()
    found = selectors.of_run(7, NOW)
    totals, [bar], _ = selectors.prefixes(scope.pk, NOW)
    assert found == totals
    assert found is not None
    assert found.silence == (1, NOW - 90_000)
    assert found.bar.rate is not None
    assert (found.bar.left, bar.left) == (None, None)
    made[0].due_ms = NOW + 1
    made[0].save()
    found = selectors.of_run(7, NOW)
    assert found is not None
    assert found.silence is None
    assert found.bar.left is not None
    Scope.objects.update(ended_ms=NOW)
    assert selectors.running_runs(project.pk, NOW, 5) == []


def test_the_newest_attempt_of_a_run_is_reported_unless_another_is_requested(project: Project, scope: Scope) -> None:
    first, second = make_scope(project, 7, 1, ended_ms=5), make_scope(project, 7, 2)
    found = [selectors.of_run(7, NOW), selectors.of_run(7, NOW, attempt=1), selectors.of_run(7, NOW, attempt=3)]
    assert [one and (one.scope_id, one.attempt, one.ended) for one in found] == [
        (second.pk, 2, False), (first.pk, 1, True), None,
    ]  # fmt: skip
    assert selectors.of_run(8, NOW) is None


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("active", ["b", "d", "a", "c", "f", "E"]),
        ("failed", ["c", "d", "f", "b", "a", "E"]),
        ("name", ["E", "a", "b", "c", "d", "f"]),
    ],
)
def test_prefixes_are_listed_in_the_requested_order_page_by_page(
    scope: Scope, order: Order, expected: list[str], limit: int
) -> None:
    add_group(scope, "b", "b", processing=1)
    add_group(scope, "a", "a", memory=1)
    add_group(scope, "d", "d", erred=1, waiting=1)
    add_group(scope, "c", "c", erred=1, released_failed=5, forgotten_failed=3, memory=1)
    add_group(scope, "f", "f", forgotten_failed=1)
    add_group(scope, "E", "E", forgotten=1)
    assert names(scope, limit, order=order) == expected


def test_they_keep_their_places_while_counts_move(scope: Scope) -> None:
    for name in ("x", "y", "z"):
        add_group(scope, name, name, processing=1)
    before = names(scope)
    add_group(scope, "z", "z-2", processing=50)
    assert names(scope) == before == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("find", "expected"),
    [
        ("TRAIN", ["train_1", "pretrain"]),
        ("n_1", ["train_1"]),
        ("%", ["50%"]),
        ("\\", ["a\\b"]),
        ("'", []),
        ("q", []),
        ("n" * 60_000, []),
    ],
)
def test_the_name_filter_matches_literally(scope: Scope, find: str, expected: list[str]) -> None:
    for name in ("train_1", "pretrain", "50%", "a\\b"):
        add_group(scope, name, name, memory=1)
    assert names(scope, find=find) == expected
    for name in ("train_1", "pretrain", "50%", "a\\b"):
        add_group(scope, "all", name, memory=1)
    of = TaskPrefix.objects.get(name="all")
    assert [bar.name for bar in selectors.groups(of.pk, find=find)[0]] == expected


@pytest.mark.parametrize("after", ["", "1", "x.y", "1.2.3", f"0.{2**63}", "0.-", "0.1e3"])
def test_an_invalid_cursor_is_refused(scope: Scope, after: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  int() says it in its own words
        selectors.prefixes(scope.pk, NOW, after=after)


def test_groups_page_by_page_all_failed_or_running(scope: Scope) -> None:
    for number in range(7):
        add_group(scope, "fit", f"fit-{number}", memory=1, erred=number % 2, processing=number // 4)
    totals = selectors.of_run(scope.run_id, NOW)
    assert totals is not None
    of = selectors.prefix(totals, "fit", NOW)
    assert of is not None

    def found(**asked: Any) -> list[str]:
        return [bar.name[-1] for bar in all_of(lambda **page: selectors.groups(of.id, **asked, **page), 2)]

    assert "".join(found()) == "0123456"
    assert "".join(found(only="failed")) == "135"
    assert "".join(found(only="running")) == "456"
    assert "".join(found(only="running", find="-5")) == "5"
    one = selectors.group(of.id, "fit-3")
    assert one is not None
    assert (one.counts[TaskState.ERRED], one.rate, one.left) == (1, None, None)
    assert selectors.group(of.id, "fit-9") is None
    assert selectors.prefix(totals, "no", NOW) is None


def test_failures_newest_first_of_all_or_of_one_prefix(scope: Scope) -> None:
    for number in range(6):
        name = "even" if number % 2 == 0 else "odd"
        of, _ = TaskPrefix.objects.get_or_create(scope=scope, name=name)
        TaskFailure.objects.create(
            scope=scope, prefix=of, key=f"{name}-{number}", group=name, message="no", seq=1, at_ms=NOW - number // 3
        )
    everywhere = all_of(lambda **page: task_lists.failures(scope.pk, **page), 2)
    assert [failed.key[-1] for failed in everywhere] == ["2", "1", "0", "5", "4", "3"]
    assert everywhere[0] == FailedTask(everywhere[0].id, "even-2", "even", "even", "no", NOW)
    odd = all_of(lambda **page: task_lists.failures(scope.pk, TaskPrefix.objects.get(name="odd").pk, **page), 2)
    assert [failed.key for failed in odd] == ["odd-1", "odd-5", "odd-3"]


def test_the_tasks_of_a_group(scope: Scope) -> None:
    of = add_group(scope, "fit", "fit", processing=3)
    reporter = Reporter.objects.create(scope=scope, name="r")
    for number in range(3):
        Task.objects.create(
            scope=scope, prefix=of.prefix, group=of, reporter=reporter, key=f"fit-{number}",
            state=CODES[TaskState.PROCESSING], seq=1, since_ms=NOW,
        )  # fmt: skip
    found = all_of(lambda **page: task_lists.tasks(of.pk, **page), 2)
    assert found[1] == TaskRow(found[1].id, "fit-1", TaskState.PROCESSING, NOW, "")
    assert [task.key for task in found] == ["fit-0", "fit-1", "fit-2"]


def plan(statement: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {'QUERY PLAN' if connection.vendor == 'sqlite' else ''} {statement}")
        return " ".join(str(row) for row in cursor.fetchall())


def test_pages_are_one_statement_by_index_each(scope: Scope) -> None:
    for number in range(400):
        add_group(scope, f"fit-{number % 8}", f"fit-{number}", memory=1, erred=number % 50 == 3)
    of: ProgressBar = selectors.prefixes(scope.pk, NOW, order="failed")[1][0]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE progress_taskgroup; ANALYZE progress_task; SET LOCAL enable_seqscan = off")
    asked: dict[str, Callable[[], object]] = {
        "progress_prefix_once|autoindex_progress_taskprefix": lambda: selectors.prefixes(scope.pk, NOW),
        "progress_group_page": lambda: selectors.groups(of.id, after="0.120"),
        "progress_group_erred": lambda: selectors.groups(of.id, only="failed"),
        "progress_failure_of_scope": lambda: task_lists.failures(scope.pk),
        "progress_failure_newest": lambda: task_lists.failures(scope.pk, of.id),
        "progress_failure_newest.*prefix_id=": lambda: task_lists.with_failures([of.id]),
        "progress_task_of_group": lambda: task_lists.tasks(1),
        "progress_scope_of_run": lambda: selectors.of_run(7, NOW),
    }
    for index, ask in asked.items():
        with CaptureQueriesContext(connection) as seen:
            ask()
        [query] = seen.captured_queries
        shown = plan(query["sql"])
        # Of tables as small as these PostgreSQL chooses any index.
        assert re.search(index, shown) if connection.vendor == "sqlite" else "Seq Scan" not in shown
