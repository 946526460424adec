"""`track`: the counts of a loop."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

from dstackweb.tracking import current, flush, tasks, track
from dstackweb.tracking.sender import Sender
from tests.tracking.ear import Ear


def counts(ear: Ear, prefix: str = "items") -> dict[str, int]:
    assert flush()
    return ear.counts(prefix)


def test_items_wait_are_worked_on_and_are_done(reporting: Ear) -> None:
    seen = []
    for item in track(["a", "b", "c"]):
        seen.append((item, counts(reporting)))
    assert seen == [
        ("a", {"processing": 1, "waiting": 2}),
        ("b", {"memory": 1, "processing": 1, "waiting": 1}),
        ("c", {"memory": 2, "processing": 1}),
    ]
    assert counts(reporting) == {"memory": 3}
    last = reporting.bodies[-1]["counts"][-1]
    assert (last["prefix"], last["group"], last["duration_n"]) == ("items", "items", 3)
    assert last["duration_s"] > 0


def test_an_iterable_without_a_length_may_get_an_explicit_one(reporting: Ear) -> None:
    walk = track((number for number in range(2)), 3, prefix="rows")
    next(walk)
    assert counts(reporting, "rows") == {"processing": 1, "waiting": 2}
    assert list(walk) == [1]
    assert counts(reporting, "rows") == {"memory": 2}  # there were two after all
    unknown = track((number for number in range(2)), prefix="more")
    next(unknown)
    assert counts(reporting, "more") == {"processing": 1}
    assert list(unknown) == [1]
    assert counts(reporting, "more") == {"memory": 2}


def test_an_unusable_length_does_not_break_the_loop(reporting: Ear) -> None:
    class Rows:
        def __len__(self) -> int:
            raise NotImplementedError

        def __iter__(self) -> Iterator[int]:
            return iter(range(2))

    assert list(track(Rows(), prefix="rows")) == [0, 1]
    for total in (Fraction(4, 2), 2.5, float("nan"), float("inf"), "many"):
        assert list(track(range(2), total, prefix="odd")) == [0, 1]  # type: ignore[arg-type]
    assert counts(reporting, "rows") == {"memory": 2}
    assert counts(reporting, "odd") == {"memory": 10}


def test_more_items_than_the_given_length_are_counted(reporting: Ear) -> None:
    assert list(track(range(5), 3)) == [0, 1, 2, 3, 4]
    assert counts(reporting) == {"memory": 5}


def test_leaving_the_loop_releases_the_rest(reporting: Ear) -> None:
    for item in track(range(10)):
        if item == 3:
            break
    assert counts(reporting) == {"memory": 3, "released": 7}


def test_an_exception_in_the_loop_releases_the_rest(reporting: Ear) -> None:
    def loop() -> None:
        for item in track(range(10)):
            if item == 3:
                raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        loop()
    assert counts(reporting) == {"memory": 3, "released": 7}


def test_an_exception_of_the_iterable_counts_as_a_failed_item(reporting: Ear) -> None:
    def rows() -> Iterator[int]:
        yield 1
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        list(track(rows(), 5))
    assert counts(reporting) == {"memory": 1, "erred": 1, "released": 3}


def test_loops_with_one_name_are_counted_together(reporting: Ear) -> None:
    list(track(range(3)))
    assert counts(reporting) == {"memory": 3}
    first, second = track(range(4)), track(range(5))
    next(first)
    next(second)
    assert counts(reporting) == {"memory": 3, "processing": 2, "waiting": 7}
    list(first)
    list(second)
    list(track(range(2), group="others"))
    assert counts(reporting) == {"memory": 14}


def test_loops_within_loops_and_in_threads(reporting: Ear) -> None:
    def work() -> None:
        for _epoch in track(range(3), prefix="epochs"):
            for _batch in track(range(100), prefix="batches"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(reporting, "epochs") == {"memory": 12}
    assert counts(reporting, "batches") == {"memory": 1200}


def test_a_garbage_collected_loop_is_ended(reporting: Ear) -> None:
    walk = track(range(3))
    next(walk)
    cycle = [walk]
    cycle.append(cycle)  # type: ignore[arg-type]
    del walk, cycle
    gc.collect()
    assert counts(reporting) == {"released": 3}


def test_a_loop_that_ends_amid_another_threads_report_does_not_deadlock(
    reporting: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does when the garbage collector ends it there."""
    walk = track(range(3))
    next(walk)
    sender = current.current_sender()
    assert sender is not None
    entered, reporter, count = threading.Event(), threading.Event(), sender.count

    def counting(*values: Any) -> bool:
        entered.set()
        reporter.wait(0.2)  # has the lock meanwhile, where it can
        return count(*values)

    def report() -> None:
        entered.wait(5)
        with sender.lock:
            reporter.set()
            walk.close()

    monkeypatch.setattr(sender, "count", counting)
    one = threading.Thread(target=report, daemon=True)
    one.start()
    one.join(5)
    assert not one.is_alive()
    assert counts(reporting) == {"released": 3}


def test_starting_a_loop_within_the_start_of_another_does_not_deadlock(
    reporting: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tasks._LoopCounts

    class Interrupted(original):
        def __init__(self, sender: Sender, place: tuple[str, str]) -> None:
            super().__init__(sender, place)
            monkeypatch.setattr(tasks, "_LoopCounts", original)
            list(track(range(2), prefix="inner"))

    monkeypatch.setattr(tasks, "_LoopCounts", Interrupted)
    one = threading.Thread(target=lambda: list(track(range(3))), daemon=True)
    one.start()
    one.join(5)
    assert not one.is_alive()
    assert (counts(reporting), counts(reporting, "inner")) == ({"memory": 3}, {"memory": 2})


def test_a_loop_that_was_never_begun_is_not_reported(reporting: Ear) -> None:
    track(range(3))
    assert counts(reporting) == {}


def test_after_the_last_loop_the_sender_is_idle(reporting: Ear) -> None:
    list(track(range(3)))
    assert counts(reporting) == {"memory": 3}
    assert flush()
    sender = current.current_sender()
    assert sender is not None
    assert not sender._sources


def test_without_the_environment_the_iterator_is_the_iterables_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSTACKWEB_TASKS_URL", raising=False)
    current._after_fork()
    assert type(track([1])) is type(iter([1]))
    current._after_fork()
