"""Lines that report tasks in what commands write: real runners, and how a line is understood."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.runner import task_lines
from dstackweb.runner.client import Refused, Unreachable
from dstackweb.runner.masking import Masker
from dstackweb.runner.task_lines import LINE_MAX, TaskLines, parse
from tests.runner.conftest import Box
from tests.support import eventually

MakeBox = Callable[..., Box]
TASKS = {"path": "/tasks", "token": "a-token"}
MORE = "while ! test -e go; do sleep 0.02; done"


def reported(box: Box) -> list[tuple[str, str]]:
    return [(event["key"], event["state"]) for event in box.api.events]


def test_task_lines_are_reported_in_order_and_stay_in_the_log(box: MakeBox) -> None:
    job = box("echo ::task key=a-1 state=running", "echo and then", "echo ::task key=a-1 state=done", tasks=TASKS)
    job.launch()
    job.end()
    assert job.api.events == [
        {"key": "a-1", "state": "running", "seq": 1}, {"key": "a-1", "state": "done", "seq": 39},
    ]  # fmt: skip
    assert job.lines()[1:] == ["and then", "::task key=a-1 state=done"]
    names = [call.what for call in job.api.calls]
    assert names.index("tasks") < names.index("exit")


def test_task_lines_are_reported_while_the_commands_run(box: MakeBox) -> None:
    job = box("echo ::task key=a state=running", MORE, "echo ::task key=a state=done", tasks=TASKS)
    job.launch()
    eventually(lambda: reported(job) == [("a", "running")], every=0.02)
    (job.run_dir / "go").touch()
    job.end()
    assert reported(job) == [("a", "running"), ("a", "done")]


def test_the_successor_of_a_killed_runner_reports_the_same_task_lines_again(box: MakeBox) -> None:
    job = box("echo ::task key=a state=running", "sleep 60", tasks=TASKS)
    job.launch()
    eventually(lambda: reported(job) == [("a", "running")], every=0.02)
    job.kill()
    job.launch()
    assert job.end()["reason"] == "instance_unreachable"
    first, again = job.api.events
    assert first == again


def test_failing_task_reports_do_not_delay_output_or_heartbeats(box: MakeBox) -> None:
    job = box("echo ::task key=a state=running", "echo shown", MORE, tasks=TASKS)
    job.api.trouble = lambda what: 503 if what == "tasks" else None
    job.launch()
    job.wait_for("shown")
    seen = job.api.count("heartbeat")
    eventually(lambda: job.api.count("heartbeat") > seen + 3, every=0.02)
    assert not job.api.events
    job.api.trouble = lambda what: None
    (job.run_dir / "go").touch()
    assert job.end()["exit_code"] == 0
    assert reported(job) == [("a", "running")]


def test_a_server_without_task_reports_is_contacted_once(box: MakeBox) -> None:
    job = box("echo ::task key=a state=running", MORE, "echo ::task key=a state=done", tasks=TASKS)
    job.api.trouble = lambda what: 404 if what == "tasks" else None
    job.launch()
    eventually(lambda: "refuses task lines" in job.said(), every=0.02)
    (job.run_dir / "go").touch()
    assert job.end()["exit_code"] == 0
    assert job.said().count("refuses task lines") == 1


def test_invalid_task_lines_are_reported_once_and_skipped(box: MakeBox) -> None:
    job = box("echo ::task key=a", "echo ::task oops", "echo ::task key=b state=done", tasks=TASKS)
    job.launch()
    assert job.end()["exit_code"] == 0
    assert reported(job) == [("b", "done")]
    assert job.said().count("task line") == 1
    assert "state is missing" in job.said()


def test_secrets_in_task_lines_are_masked(box: MakeBox) -> None:
    job = box("echo ::task key=a state=failed message=hunter2", redact=["hunter2"], tasks=TASKS)
    job.launch()
    job.end()
    assert [event["message"] for event in job.api.events] == ["*******"]


class Server:
    """Takes events, unless it is to answer otherwise."""

    def __init__(self, *troubles: Exception) -> None:
        self.troubles = list(troubles)
        self.calls: list[list[dict[str, Any]]] = []

    def post(self, _path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.ended = body.get("ended", False)
        self.calls.append(body.get("events", []))
        if self.troubles:
            raise self.troubles.pop(0)
        return {"refused": []}

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for call in self.calls for event in call]


def follow(tmp_path: Path, output: bytes, server: Server) -> list[dict[str, Any]]:
    """What is reported for some output, from its first byte to its last."""
    spool = tmp_path / "spool"
    spool.write_bytes(output)
    TaskLines(server, str(spool), Masker([])).finish(5)
    return server.events


def test_lines_are_found_at_any_place_in_long_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_lines, "PIECE", 512)
    monkeypatch.setattr(task_lines, "AT_ONCE", 3)
    line, noise = b"::task key=k%d state=done\n", b"x" * 700 + b"::task key=no state=done\n"
    output = b"".join(line % number + noise * (number % 3 == 0) for number in range(100))
    found = follow(tmp_path, output, Server())
    assert [event["key"] for event in found] == [f"k{number}" for number in range(100)]
    assert [event["seq"] for event in found] == [output.index(line % number) + 1 for number in range(100)]


def test_task_lines_are_found_in_any_split_of_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_lines, "EVERY_S", 0.001)
    spool, server = tmp_path / "spool", Server()
    lines = TaskLines(server, str(spool), Masker([]))
    lines.start()
    with spool.open("wb", buffering=0) as output:
        for number in range(50):
            output.write(b"::task key=k%d st" % number)
            output.write(b"ate=done\nand ")
            output.write(b"more ::task key=no state=done\n")
    lines.finish(5)
    assert [event["key"] for event in server.events] == [f"k{number}" for number in range(50)]


def test_the_end_of_the_output_ends_its_reporter_if_it_sent_any_report(tmp_path: Path) -> None:
    server, silent = Server(), Server()
    follow(tmp_path, b"::task key=k state=running\n", server)
    assert server.ended
    follow(tmp_path, b"nothing of the kind\n", silent)
    assert not silent.calls


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_last_line_needs_no_end(tmp_path: Path, end: bytes) -> None:
    assert len(follow(tmp_path, b"::task key=k state=done" + end, Server())) == 1


@pytest.mark.parametrize("other", [b" ::task key=k state=a", b"::tasks key=k state=a", b"a::task key=k state=a"])
def test_only_whole_lines_count(tmp_path: Path, other: bytes) -> None:
    assert follow(tmp_path, other, Server()) == []


def test_an_unanswered_report_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_lines, "backoff", lambda failures: 0.001)
    server = Server(Unreachable("away"), Unreachable("busy", 0.01))
    found = follow(tmp_path, b"::task key=k state=done\n", server)
    assert [event["key"] for event in found] == ["k", "k", "k"]


def test_no_more_reports_are_sent_for_an_ended_attempt(tmp_path: Path) -> None:
    server = Server(Refused(409, {"detail": "over"}))
    follow(tmp_path, b"::task key=k state=done\n", server)
    assert len(server.calls) == 1


def test_the_end_does_not_wait_for_a_server_that_is_busy(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.write_bytes(b"::task key=k state=done\n")
    server = Server(Unreachable("busy", 3600.0))
    lines = TaskLines(server, str(spool), Masker([]))
    lines.finish(0.05)
    assert len(server.calls) == 1


def test_task_lines_that_could_not_be_sent_in_time_are_counted_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(task_lines, "say", said.append)
    monkeypatch.setattr(task_lines, "AT_ONCE", 1)
    spool, answer = tmp_path / "spool", threading.Event()
    spool.write_bytes(b"::task key=k state=done\n" * 2)

    class Slow(Server):
        def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            if self.calls:
                answer.wait(10)
            return super().post(path, body)

    TaskLines(Slow(), str(spool), Masker([])).finish(0.2)
    answer.set()
    assert said == ["task lines from byte 24 of the output on could not be sent in 0.2 s"]


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ("::task key=a state=done", {"key": "a", "state": "done"}),
        ("::task\tkey='a b'  state=failed message=\"it \\\"broke\\\"\"\r",
         {"key": "a b", "state": "failed", "message": 'it "broke"'}),
        ("::task key=a state=done prefix=p group=g duration=1.5",
         {"key": "a", "state": "done", "prefix": "p", "group": "g", "duration_s": 1.5}),
        ("::task key=lr=1e-4 state=done", {"key": "lr=1e-4", "state": "done"}),
    ],
)  # fmt: skip
def test_a_line_is_read_as_a_shell_would(line: str, event: dict[str, Any]) -> None:
    assert parse(line.encode()) == event


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("::task", "key is missing"), ("::task key=a", "state is missing"), ("::task key= state=a", "key is missing"),
        ("::task key=a state=done lr=3", "unknown field 'lr'"), ("::task key=a key=b state=done", "twice"),
        ("::task key=a state=done extra", "is not name=value"), ("::task key='a state=done", "quotation"),
        ("::task key=a state=a duration=soon", "a duration"), ("::task key=a state=a duration=-1", "a duration"),
        ("::task key=a state=a duration=nan", "a duration"), ("::task key=a state=a duration=inf", "a duration"),
        ("::task key=a duration=1 duration=2 state=done", "twice"), (f"::task key={'a' * LINE_MAX}", "longer"),
    ],
)  # fmt: skip
def test_a_line_that_can_not_be_read_is_named(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(line.encode())


@given(st.binary(max_size=200))
def test_no_line_breaks_the_reader(rest: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse(b"::task " + rest)
