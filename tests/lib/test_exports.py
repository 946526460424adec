"""Tables as files: nothing in them is a formula, and both forms have the same values."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import re
import tracemalloc
from collections.abc import Iterator
from decimal import Decimal
from threading import BoundedSemaphore
from typing import Any

import pytest
from django.core.signals import request_finished
from hypothesis import given, strategies as st

from dstackweb.lib import exports
from dstackweb.lib.errors import NotFound, TooMany
from dstackweb.lib.exports import AT_ONCE, FORMULA, as_csv, as_json, harmless, response

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from("=;\n "), max_size=20)


@given(st.lists(st.tuples(texts, st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none())))
def test_both_forms_have_every_value_and_no_text_is_a_formula(found: list[tuple[str, Any]]) -> None:
    rows = [{"name": name, "value": value} for name, value in found]
    table = list(csv.DictReader(io.StringIO("".join(as_csv(["name", "value"], rows)), newline="")))
    for (name, value), row in zip(found, table, strict=True):
        assert row["name"].replace("'", "") == name.replace("'", "")
        assert not any(cell.strip().startswith(FORMULA) for cell in re.split("[;\t\r\n]", row["name"]))
        assert row["value"] == ("" if value is None else str(value))
    assert json.loads("".join(as_json(["name", "value"], rows))) == rows


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=1", "'=1"),
        ("a;=1", "a;'=1"),
        ("a\n -1", "a\n '-1"),
        ("a =1; b", "a =1; b"),
        ("x; \t" * 20_000 + "y", "x; \t" * 20_000 + "y"),
    ],
)
def test_what_begins_a_cell_in_any_language_is_no_formula(text: str, shown: str) -> None:
    """Where semicolons are between cells, quotes inside of a line say nothing."""
    assert harmless(text) == shown


def test_moments_money_and_lists_are_written_for_programs() -> None:
    at = dt.datetime(2026, 11, 26, 13, tzinfo=dt.timezone(dt.timedelta(hours=1)))
    rows = [{"at": at, "usd": Decimal("1.50"), "more": ["=a"], "left": None, "ignored": 1}]
    columns = ["at", "usd", "more", "left"]
    assert "".join(as_csv(columns, rows)).splitlines()[1] == '2026-11-26T12:00:00Z,1.5,"[""=a""]",'
    assert json.loads("".join(as_json(columns, rows))) == [
        {"at": "2026-11-26T12:00:00Z", "usd": 1.5, "more": ["=a"], "left": None}
    ]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows() -> None:
    def peak(number: int) -> int:
        rows: Iterator[dict[str, Any]] = ({"name": f"run-{place}", "text": "x" * 100} for place in range(number))
        tracemalloc.start()
        sent = sum(len(block) for block in as_csv(["name", "text"], rows))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sent > 100 * number
        return most

    peak(1000)
    assert peak(20_000) < 1.5 * peak(1000)


def test_what_the_reading_of_a_table_raises_comes_before_its_file() -> None:
    """Such as PostgreSQL's refusal of a filter: a file that has begun can only break off."""

    def broken() -> Iterator[dict[str, Any]]:
        raise ValueError("a NUL")
        yield {}

    with pytest.raises(ValueError, match="a NUL"):
        response("runs", "csv", ["name"], broken())
    rows: Iterator[dict[str, Any]] = ({"name": place} for place in range(3))
    assert response("runs", "csv", ["name"], rows).getvalue() == b"name\r\n0\r\n1\r\n2\r\n"


def test_few_files_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread, which others wait for: a file can take minutes."""
    monkeypatch.setattr(exports, "_places", BoundedSemaphore(AT_ONCE))
    monkeypatch.setattr(request_finished, "send", lambda **_values: [])  # closes connections of the database
    files = [response("runs", "csv", ["name"], []) for _number in range(AT_ONCE)]
    with pytest.raises(TooMany):
        response("runs", "csv", ["name"], [])
    with pytest.raises(NotFound):
        response("runs", "xml", ["name"], [])
    files[0].close()
    files[0].close()
    response("runs", "csv", ["name"], []).close()
    del files[1:]  # of a request that failed on its way out
    response("runs", "csv", ["name"], []).close()
