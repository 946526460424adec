from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import attempts, rows, selectors, services
from dstackweb.runs.models import Run
from dstackweb.runs.row_fields import RunPageRow, RunRow
from dstackweb.runs.states import ACTIVE
from dstackweb.scheduler import watch
from tests.factories import make_host, make_run, place_all

pytestmark = pytest.mark.django_db


def test_a_name_that_reads_as_an_id_is_found_too(project: Project, member: User) -> None:
    run = make_run(project, member, "deadbeefdeadbeefdeadbeefdeadbeef")
    assert selectors.find_run(project, run.name) == run
    assert selectors.find_run(project, str(run.uid)) == run


def test_a_list_of_several_statuses_is_the_newest_of_all_of_them_page_by_page(project: Project, member: User) -> None:
    runs = [make_run(project, member) for _ in range(6)]
    for index, status in enumerate(["done", "failed", "done", "submitted", "failed", "done"]):
        Run.objects.filter(pk=runs[index].pk).update(status=status)
    seen, before = [], None
    while True:
        page, before = rows.newest_rows(
            project, statuses=["failed", "done", "done"], before=before, limit=2, kind=RunRow
        )
        seen += [row.pk for row in page]
        if before is None:
            break
    assert seen == [runs[number].pk for number in (5, 4, 2, 1, 0)]


def test_lists_leave_run_files_in_the_database(project: Project, member: User) -> None:
    (listed,) = selectors.listed([make_run(project, member).pk])
    assert set(selectors.TEXTS) <= listed.get_deferred_fields()
    with CaptureQueriesContext(connection) as queries:
        rows.newest_rows(project, kind=RunPageRow)
        rows.queue_page_rows(services.ensure_queue(project), 50, 0)
    assert not any(text in query["sql"] for query in queries for text in selectors.TEXTS)


FILTERS: dict[str, dict[str, Any]] = {
    "status": {"statuses": ["failed"]},
    "member": {"user": "ada"},
    "queue": {"queue": "default"},
    "name": {"text": "run"},
    "member, queue and status": {"user": "ada", "queue": "default", "statuses": ["failed", "done"]},
    "a day": {"since": timezone.now() - dt.timedelta(days=9), "until": timezone.now() - dt.timedelta(days=8)},
    "oldest of a name": {"text": "run", "oldest_first": True},
    "next page": {"user": "ada", "before": 1 << 40},
}


@pytest.mark.both_sides
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_filters_of_a_list_are_answered_by_one_index_without_reading_runs(
    project: Project, member: User, filters: dict[str, Any]
) -> None:
    make_run(project, member, "run-1")
    with CaptureQueriesContext(connection) as queries:
        rows.newest_rows(project, **filters, kind=RunRow)
    searches = [query["sql"] for query in queries if "ORDER BY" in query["sql"] and 'FROM "runs_run"' in query["sql"]]
    assert searches
    if connection.vendor == "postgresql":  # which may take either of two indexes where there is one run
        with connection.cursor() as cursor:
            cursor.execute("DROP INDEX run_newest_in_project")
    for found in map(plan, searches):
        assert re.search(r"(COVERING INDEX|Index Only Scan (Backward )?using) run_newest_of_status", found)
        assert "TEMP B-TREE" not in found, "not sorted either"


def test_a_list_of_an_unknown_member_or_queue_is_empty(project: Project, member: User) -> None:
    make_run(project, member)
    assert rows.newest_rows(project, user="nobody", kind=RunRow) == ([], None)
    assert rows.newest_rows(project, queue="nowhere", kind=RunRow) == ([], None)


def test_no_frequent_query_scans_the_history(project: Project, member: User) -> None:
    """A deployment keeps every run; SQLite's plans say which statements would look at all of them."""
    make_host()
    run = make_run(project, member)
    waiting = make_run(project, member, resources={"cpu": 9})
    place_all()
    asked: dict[str, Callable[[], object]] = {
        "watch": watch.watch,
        "requeue": lambda: attempts.requeue_due(timezone.now()),
        "pass": place_all,
        "position": lambda: selectors.position(waiting),
        "active": lambda: selectors.newest(Run.objects.filter(project=project), 50, ACTIVE),
        "page": lambda: rows.newest_rows(project, kind=RunRow),
        "page of some": lambda: rows.newest_rows(project, statuses=ACTIVE, kind=RunPageRow),
        "queue": lambda: rows.queue_rows(services.ensure_queue(project)),
        "queue page": lambda: rows.queue_page_rows(services.ensure_queue(project), 50, 0),
        "run": lambda: selectors.find_run(project, run.name),
    }
    for what, ask in asked.items():
        with CaptureQueriesContext(connection) as queries:
            ask()
        if connection.vendor == "sqlite":
            for query in queries:
                assert not re.search(r"SCAN runs_(run|job|runevent)\b", plan(query["sql"])), (what, query["sql"])


def plan(sql: str) -> str:
    """How the database would go about a statement; empty for what reads nothing. PostgreSQL as with many rows."""
    if not sql.startswith(("SELECT", "UPDATE", "DELETE")):
        return ""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            for way in ("seqscan", "bitmapscan", "sort"):
                cursor.execute(f"SET LOCAL enable_{way} = off")
            cursor.execute(f"EXPLAIN {sql}".replace("%", "%%"))
            return "\n".join(row[0] for row in cursor.fetchall())
        cursor.execute(f"EXPLAIN QUERY PLAN {sql}".replace("%", "%%"))
        return "\n".join(row[3] for row in cursor.fetchall())
