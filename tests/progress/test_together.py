"""Batches that wait for the same scope are applied in one transaction, each by itself if that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dstackweb.lib.errors import Conflict, TooLarge
from dstackweb.progress import ingest
from dstackweb.progress.ingest import Together
from dstackweb.progress.reports import Batch, Event, Receipt
from dstackweb.progress.states import TaskState
from tests.support import eventually


def batch(name: str) -> Batch:
    return Batch(name, (Event("a", TaskState.MEMORY, 1, "a", "a"),))


class Database:
    """In place of `ingest_batches`: the first call waits until it may go on, and `refuse` may raise."""

    def __init__(self, refuse: Callable[[list[str]], None] = lambda names: None) -> None:
        self.calls: list[list[str]] = []
        self.go_on = threading.Event()
        self.refuse = refuse

    def __call__(self, scope_id: int, batches: list[Batch], now_ms: int) -> list[Receipt | TooLarge]:
        names = [one.reporter for one in batches]
        self.calls.append(names)
        if len(self.calls) == 1:
            self.go_on.wait(10)
        self.refuse(names)
        return [TooLarge("no") if name == "late" else Receipt(applied=len(name)) for name in names]


def ingested(monkeypatch: pytest.MonkeyPatch, database: Database, *names: str) -> dict[str, object]:
    """What each thread gets: the first holds the scope until all others wait."""
    monkeypatch.setattr(ingest, "ingest_batches", database)
    group, found = Together(), dict[str, object]()

    def report(name: str) -> None:
        try:
            found[name] = group.ingest(7, batch(name), 0).applied
        except Exception as error:
            found[name] = type(error)

    threads = [threading.Thread(target=report, args=(name,)) for name in names]
    for number, thread in enumerate(threads):
        thread.start()
        eventually(lambda number=number: len(group._waiting.get(7, ())) == number, every=0.001)  # type: ignore[misc]
        eventually(lambda: database.calls, every=0.001)
    database.go_on.set()
    for thread in threads:
        thread.join(10)
    assert not group._waiting
    return found


def test_waiting_batches_are_stored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database()
    found = ingested(monkeypatch, database, "a", "bb", "ccc", "late")
    assert found == {"a": 1, "bb": 2, "ccc": 3, "late": TooLarge}
    assert database.calls == [["a"], ["bb", "ccc", "late"]]


def test_the_size_of_a_joined_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "BATCHES_MAX", 2)
    database = Database()
    ingested(monkeypatch, database, "a", "b", "c", "d")
    assert database.calls == [["a"], ["b", "c"], ["d"]]


def test_one_failing_batch_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(names: list[str]) -> None:
        if "bad" in names:
            raise ZeroDivisionError

    database = Database(refuse)
    found = ingested(monkeypatch, database, "a", "bb", "bad", "ccc")
    assert found == {"a": 1, "bb": 2, "bad": ZeroDivisionError, "ccc": 3}
    assert database.calls == [["a"], ["bb", "bad", "ccc"], ["bb"], ["bad"], ["ccc"]]


def test_all_batches_of_an_ended_attempt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(names: list[str]) -> None:
        raise Conflict("over")

    assert set(ingested(monkeypatch, Database(refuse), "a", "b", "c").values()) == {Conflict}
