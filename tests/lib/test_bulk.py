"""Many rows by one statement: whatever a name may hold comes back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection

from dstackweb.accounts.models import Project
from dstackweb.lib import bulk
from dstackweb.progress.counters import ensure_scope
from dstackweb.progress.models import Task, TaskPrefix

NAMES = ["", "a", '"', "\\", '\\"', "{a,b}", "NULL", "None", "it's", "%s", "a\nb\t", "ünï 任务 🚀", "$[0]", "::text"]

pytestmark = pytest.mark.django_db

ROW = {"scope_id": "bigint", "prefix_id": "bigint", "group_id": "bigint", "reporter_id": "bigint", "key": "text",
       "state": "smallint", "seq": "bigint", "since_ms": "bigint"}  # fmt: skip


@pytest.fixture
def scope_id(project: Project) -> int:
    """Any scope."""
    return ensure_scope(project.pk)


def test_names_are_stored_and_found_as_they_are(scope_id: int) -> None:
    bulk.insert("progress_task", ROW, [(scope_id, 1, None, 1, name, 1, at, 2**53) for at, name in enumerate(NAMES)])
    assert list(Task.objects.order_by("seq").values_list("key", flat=True)) == NAMES
    assert set(Task.objects.values_list("group_id", "since_ms")) == {(None, 2**53)}
    found = bulk.find(
        "given.n, t.key",
        "progress_task",
        "t.key = given.key AND t.scope_id = %s",
        {"key": "text", "n": "bigint"},
        [(name, at) for at, name in enumerate([*NAMES, "missing"])],
        scope_id,
    )
    assert sorted(found) == list(enumerate(NAMES))


def test_rows_are_changed_and_deleted_by_their_ids(scope_id: int) -> None:
    bulk.insert("progress_task", ROW, [(scope_id, 1, 7, 1, name, 1, 0, 0) for name in "abc"])
    ids = dict(Task.objects.values_list("key", "pk"))
    bulk.update("progress_task", {"group_id": "bigint", "key": "text"}, [(None, '"', ids["a"]), (8, "y", ids["b"])])
    bulk.delete("progress_task", [ids["c"]])
    assert set(Task.objects.values_list("group_id", "key")) == {(None, '"'), (8, "y")}


@pytest.mark.parametrize("number", [0.0, 0.1, 1e300, 5e-324, 1 / 3])
def test_numbers_are_stored_to_the_last_digit(scope_id: int, number: float) -> None:
    TaskPrefix.objects.create(scope_id=scope_id, name="a")
    bulk.update("progress_taskprefix", {"duration_s": "float8"}, [(number, TaskPrefix.objects.get().pk)])
    assert TaskPrefix.objects.get().duration_s == number


def test_an_empty_list_makes_no_statement(scope_id: int, django_assert_num_queries: object) -> None:
    with django_assert_num_queries(0):
        bulk.insert("progress_task", ROW, [])
        bulk.update("progress_task", ROW, [])
        bulk.delete("progress_task", [])
        assert bulk.find("t.id", "progress_task", "t.key = given.key", {"key": "text"}, []) == []


def test_what_is_written_together_is_seen_by_the_next_read_and_takes_no_message_of_its_own(
    scope_id: int, django_assert_num_queries: Any
) -> None:
    def changed(name: str) -> bulk.Query:
        return "UPDATE progress_scope SET groups = groups + 1 WHERE id = %s RETURNING %s", [scope_id, name]

    of_scope: bulk.Query = ("SELECT groups FROM progress_scope WHERE id = %s", [scope_id])
    with django_assert_num_queries(2 if connection.vendor == "postgresql" else 6), bulk.together():
        bulk.write("UPDATE progress_scope SET groups = %s WHERE id = %s", [4, scope_id])
        with bulk.together():
            bulk.write("UPDATE progress_scope SET groups = groups + %s WHERE id = %s", [1, scope_id])
        assert bulk.read(changed("a%s;"), of_scope) == [[("a%s;",)], [(6,)]]
        bulk.insert("progress_task", ROW, [(scope_id, 1, None, 1, "k", 1, 0, 0)])
        bulk.write("UPDATE progress_scope SET groups = %s WHERE id = %s", [7, scope_id])
    assert bulk.read(of_scope) == [[(7,)]]
    assert Task.objects.count() == 1


@contextmanager
def plans() -> Iterator[list[str]]:
    """How the database goes about the statements of this block."""
    lines: list[str] = []

    def explained(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        with connection.cursor() as cursor:
            cursor.cursor.execute(
                f"EXPLAIN {'QUERY PLAN' if connection.vendor == 'sqlite' else ''} {sql}",
                parameters[0] if many else parameters,
            )
            lines.extend(str(row[-1]) for row in cursor.fetchall())
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(explained):
        yield lines


def test_each_row_is_looked_up_by_the_whole_of_its_key(scope_id: int) -> None:
    """Else a batch would read all tasks of a scope that has filled since PostgreSQL last looked at the table."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")  # of an empty table it may choose anything
    with plans() as found:
        bulk.find(
            "t.id",
            "progress_task",
            "t.key = given.key AND t.scope_id = %s",
            {"key": "text"},
            [("a",), ("b",)],
            scope_id,
        )
    plan = "\n".join(found)
    by_both = "scope_id=? AND key=?" if connection.vendor == "sqlite" else "Index Cond: ((scope_id = "
    assert by_both in plan, plan
    assert "Hash" not in plan, plan


def test_each_row_that_changes_is_looked_up_however_many_do(scope_id: int) -> None:
    """For a thousand changes PostgreSQL would else read tens of thousands of rows, rather than a thousand by index."""
    bulk.insert("progress_task", ROW, [(scope_id, 1, 7, 1, f"key-{at}", 1, 0, 0) for at in range(5_000)])
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE progress_task")  # another test may have left that there are none
    ids = list(Task.objects.values_list("pk", flat=True)[:1_000])
    with plans() as found:
        bulk.update("progress_task", {"seq": "bigint"}, [(at, pk) for at, pk in enumerate(ids)])
    plan = "\n".join(found)
    by_id = "PRIMARY KEY (rowid=?)" if connection.vendor == "sqlite" else "Index Cond: (id = "
    assert by_id in plan, plan
    assert "Seq Scan" not in plan, plan
