"""`task` and `waiting`: what they report of a block, and of each call of a function."""

from __future__ import annotations

import asyncio
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

import pytest

from dstackweb.tracking import current, flush, task, track, waiting
from dstackweb.tracking.sender import Sender
from dstackweb.tracking.spool import Spool
from tests.support import REPO
from tests.tracking.ear import Ear


def states(ear: Ear) -> dict[str, str]:
    assert flush()
    return ear.states()


@task
def double(number: int) -> int:
    """Twice as much."""
    return 2 * number


def test_a_block_is_done_when_it_is_left(reporting: Ear) -> None:
    with task("train-17"):
        assert states(reporting) == {"train-17": "processing"}
    assert states(reporting) == {"train-17": "memory"}
    event = reporting.events()["train-17"]
    assert 0 < event["duration_s"] < 5
    assert "prefix" not in event  # which the server finds


def test_names_of_any_kind_are_reported_as_text(reporting: Ear, tmp_path: Path) -> None:
    class Step(StrEnum):
        CLEAN = "clean"

    sender = current.current_sender()
    assert sender is not None
    sender.spool = Spool(tmp_path / "left", "child")
    with task(Step.CLEAN, prefix=Step.CLEAN, group=7):  # type: ignore[arg-type]
        pass
    waiting([("load", 1)], prefix=7)  # type: ignore[arg-type]
    assert list(track([1], prefix=Step.CLEAN)) == [1]
    assert states(reporting) == {"clean": "memory", "('load', 1)": "waiting"}
    event = reporting.events()["clean"]
    assert (event["prefix"], event["group"]) == ("clean", "7")


def test_a_report_during_the_creation_of_the_sender_does_not_deadlock(
    reporting: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = current._make_sender

    def interrupted() -> Sender | None:
        monkeypatch.setattr(current, "_make_sender", made)
        with task("in-the-handler"):
            return made()

    monkeypatch.setattr(current, "_make_sender", interrupted)
    one = threading.Thread(target=task("outside")(double), args=(1,), daemon=True)
    one.start()
    one.join(5)
    assert not one.is_alive()
    assert states(reporting)["in-the-handler"] == "memory"
    assert len(reporting.states()) == 3  # and the function's own


def test_a_block_left_by_an_exception_has_failed_with_message_and_traceback(reporting: Ear) -> None:
    with pytest.raises(ZeroDivisionError), task("train-1"):
        double(1 // 0)
    assert flush()
    event = reporting.events()["train-1"]
    assert event["state"] == "erred"
    assert event["message"].startswith("ZeroDivisionError: integer division or modulo by zero (test_tasks.py:")
    assert event["message"].endswith(" in test_a_block_left_by_an_exception_has_failed_with_message_and_traceback)")


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (KeyboardInterrupt(), "released"),
        (GeneratorExit(), "released"),
        (asyncio.CancelledError(), "released"),
        (SystemExit(), "released"),
        (SystemExit(0), "released"),
        (SystemExit(3), "erred"),
        (SystemExit("no"), "erred"),
        (MemoryError(), "erred"),
    ],
    ids=repr,
)
def test_an_interrupted_block_is_released(reporting: Ear, error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), task("a-1"):
        raise error
    assert states(reporting) == {"a-1": state}


def test_an_exception_that_cannot_be_worded_changes_nothing(reporting: Ear) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    with pytest.raises(Odd), task("a-1"):
        raise Odd
    assert flush()
    assert reporting.events()["a-1"]["message"].startswith("Odd (test_tasks.py:")


def test_blocks_within_blocks_are_tasks_of_their_own(reporting: Ear) -> None:
    with task("outer-1"):
        with pytest.raises(ValueError, match="no"), task("inner-1"):
            raise ValueError("no")
        with task("inner-2"):
            pass
    assert states(reporting) == {"outer-1": "memory", "inner-1": "erred", "inner-2": "memory"}


def test_keys_may_be_tuples_and_prefix_and_group_may_be_set(reporting: Ear) -> None:
    with task(("load-a1", 3)), task("x", prefix="load", group="load-b"):
        pass
    assert flush()
    events = reporting.events()
    assert set(events) == {"('load-a1', 3)", "x"}
    assert events["x"]["prefix"] == "load"
    assert events["x"]["group"] == "load-b"


def test_each_call_of_a_function_is_a_task(reporting: Ear) -> None:
    assert [double(1), double(2)] == [2, 4]
    assert flush()
    events = reporting.events()
    assert len(events) == 2
    assert {(event["state"], event["prefix"], event["group"]) for event in events.values()} == {
        ("memory", "double", "double")
    }


def test_the_name_may_be_set(reporting: Ear) -> None:
    @task("step-2", group="early")
    def step() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        step()
    assert flush()
    (event,) = reporting.events().values()
    assert (event["state"], event["prefix"], event["group"]) == ("erred", "step-2", "early")


def test_a_decorated_function_keeps_its_name_and_docstring_and_can_be_pickled(reporting: Ear) -> None:
    assert double.__name__ == "double"
    assert double.__doc__ == "Twice as much."
    assert pickle.loads(pickle.dumps(double)) is double


def test_a_generator_is_one_task_until_it_ends(reporting: Ear) -> None:
    @task
    def rows(count: int) -> Iterator[int]:
        yield from range(count)

    assert list(rows(3)) == [0, 1, 2]
    left = rows(3)
    next(left)
    assert sorted(states(reporting).values()) == ["memory", "processing"]
    left.close()
    assert sorted(states(reporting).values()) == ["memory", "released"]


def test_coroutines_and_asynchronous_generators_are_tasks(reporting: Ear) -> None:
    @task
    async def fetch(number: int) -> int:
        await asyncio.sleep(0)
        if number == 2:
            raise ValueError("two")
        return number

    @task
    async def lines() -> AsyncIterator[int]:
        yield 1

    async def main() -> list[object]:
        async with task("block-1"):
            got = [line async for line in lines()]
        hanging = asyncio.ensure_future(asyncio.sleep(60))

        async def hang() -> None:
            with task("hang-1"):
                await hanging

        hung = asyncio.ensure_future(hang())
        await asyncio.sleep(0)
        hung.cancel()
        return [*got, *await asyncio.gather(*map(fetch, range(3)), hung, return_exceptions=True)]

    # In a thread: a browser's test in the same process leaves a loop running in this one.
    with ThreadPoolExecutor() as pool:
        results = pool.submit(asyncio.run, main()).result()
    assert results[:3] == [1, 0, 1]
    assert flush()
    by_prefix: dict[str, list[str]] = {}
    for key, event in reporting.events().items():
        by_prefix.setdefault(event.get("prefix", key), []).append(event["state"])
    assert {name: sorted(found) for name, found in by_prefix.items()} == {
        "fetch": ["erred", "memory", "memory"],
        "lines": ["memory"],
        "block-1": ["memory"],
        "hang-1": ["released"],
    }


def test_an_asynchronous_generator_is_sent_to_thrown_into_and_closed_as_if_it_were_bare(reporting: Ear) -> None:
    said: list[object] = []

    @task
    async def serve() -> AsyncGenerator[int, object]:
        try:
            while True:
                try:
                    said.append((yield len(said)))
                except KeyError:
                    said.append("thrown")
        finally:
            await asyncio.sleep(0)
            said.append("closed")

    async def main() -> list[object]:
        items = serve()
        got = [await items.asend(None), await items.asend("sent"), await items.athrow(KeyError())]
        await items.aclose()
        return [*got, *said]

    with ThreadPoolExecutor() as pool:
        assert pool.submit(asyncio.run, main()).result() == [0, 1, 2, "sent", "thrown", "closed"]
    assert list(states(reporting).values()) == ["released"]


def test_announced_tasks_are_waiting(reporting: Ear) -> None:
    waiting([f"train-{number}" for number in range(3)], prefix="train")
    with task("train-1"):
        pass
    assert states(reporting) == {"train-0": "waiting", "train-1": "memory", "train-2": "waiting"}


def test_a_key_must_be_text_or_a_tuple() -> None:
    with pytest.raises(TypeError, match="a string or a tuple, not int"):
        task(17)  # type: ignore[type-var]


def test_without_the_environment_variables_reports_are_skipped_and_that_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DSTACKWEB_TASKS_URL", raising=False)
    current._after_fork()
    caplog.set_level(logging.DEBUG, "dstackweb.tracking")
    for _ in range(2):
        with task("a-1"):
            assert double(2) == 4
    waiting(["a-2"])
    assert flush()
    assert current.current_sender() is None
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    current._after_fork()


def test_an_odd_address_is_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DSTACKWEB_TASKS_URL", "nowhere")
    monkeypatch.setenv("DSTACKWEB_TASKS_TOKEN", "secret")
    current._after_fork()
    for _ in range(2):
        with task("a-1"):
            pass
    url = "'nowhere' is not an http:// or https:// URL"
    assert caplog.messages == [f"tasks are not reported: DSTACKWEB_TASKS_URL: {url}"]
    current._after_fork()


def test_nothing_but_the_standard_library_is_imported() -> None:
    """So that it may be copied into any environment."""
    code = (
        "import sys, dstackweb.tracking; "
        "print({name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'dstackweb', '__main__'})"
    )
    found = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert found.stdout == "set()\n"
