"""Whatever dies, and whenever: no command is executed twice, no output is lost, and the end is reported."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runner.api import Api
from tests.runner.conftest import Box, runs
from tests.runner.test_artifacts import LIMITS
from tests.runner.test_jobs import packed
from tests.support import eventually

MakeBox = Callable[..., Box]
WORK = "while [ ! -e enough ]; do sleep 0.02; done"


def counting(box: MakeBox, *commands: str, **spec: object) -> Box:
    """A job whose first command leaves a line each time it is executed."""
    job = box("echo x >> executed", *commands, **spec)
    job.run_dir.mkdir(parents=True)
    (job.run_dir / "executed").touch()
    (job.run_dir / "executed").chmod(0o666)
    return job


def executions(job: Box) -> int:
    return (job.run_dir / "executed").read_text().count("x")


def hold(job: Box, *names: str) -> None:
    """The API answers none of these calls."""
    job.api.trouble = lambda what: 503 if what in names else None


def test_during_a_server_outage_the_job_continues_and_nothing_is_lost(box: MakeBox) -> None:
    job = counting(box, "echo before", WORK, "echo during")
    job.launch()
    job.wait_for("before")
    job.api.go_down()
    (job.run_dir / "enough").touch()
    eventually(lambda: (job.state / "exit").exists())
    assert job.lives()
    job.api.come_back()
    end = job.end(nudged=True)
    assert (end["exit_code"], end["log_size"], executions(job)) == (0, len(b"before\nduring\n"), 1)
    assert job.lines() == ["before", "during"]


def test_a_failing_api_is_retried_and_no_byte_is_lost_or_duplicated(box: MakeBox) -> None:
    job = counting(box, "for i in $(seq 40); do echo $i; sleep 0.01; done")
    troubles = itertools.cycle([503, b"", None, b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", None])
    job.api.trouble = lambda what: next(troubles)
    job.launch()
    assert job.end(nudged=True)["exit_code"] == 0
    assert job.lines() == [str(number) for number in range(1, 41)]
    assert executions(job) == 1


def make_it_wait(job: Box) -> None:
    job.api.action = {"action": "wait"}


def hold_the_end(job: Box) -> None:
    hold(job, "exit", "logs")
    (job.run_dir / "enough").touch()


STAGES: dict[str, tuple[Callable[[Box], object], Callable[[Box], object]]] = {
    "before the claim": (
        lambda job: hold(job, "claim"),
        lambda job: job.lives() and "can't be reached" in job.said(),
    ),
    "before the spec": (
        lambda job: hold(job, "spec"),
        lambda job: job.api.claimed_by and "can't be reached" in job.said(),
    ),
    "before the code": (
        lambda job: hold(job, "archive"),
        lambda job: job.api.claimed_by and "can't be reached" in job.said(),
    ),
    "at the barrier": (
        make_it_wait,
        lambda job: job.api.count("heartbeat"),
    ),
    "after the started marker": (
        lambda job: job.api.spec.update(setup="echo x > begun; sleep 600"),
        lambda job: (job.run_dir / "begun").exists(),
    ),
    "while the commands run": (
        lambda job: None,
        lambda job: "up" in job.lines(),
    ),
    "after the exit file": (
        hold_the_end,
        lambda job: (job.state / "exit").exists(),
    ),
}
INTERRUPTED = {"after the started marker", "while the commands run"}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_the_successor_of_a_killed_runner_does_the_remaining_steps(box: MakeBox, stage: str) -> None:
    prepare, there = STAGES[stage]
    job = counting(box, "cat code", "echo up", WORK, "echo down")
    job.api.ship(packed({"code": b"code\n"}))
    prepare(job)
    job.launch()
    eventually(lambda: there(job), every=0.02)
    job.kill()
    hold(job)
    job.api.action = {"action": "go"}
    began = executions(job)
    if stage not in INTERRUPTED:
        (job.run_dir / "enough").touch()
    job.launch()
    end = job.end()
    job.launch()  # one more finds all done
    job.wait_until_gone()
    assert all(found == end for found in job.api.exits)
    assert end["log_size"] == len(job.api.log)
    assert job.processes() == set()
    if stage in INTERRUPTED:
        assert (end["reason"], end["exit_code"], executions(job)) == ("instance_unreachable", None, began)
        assert job.lines() == (["code", "up"] if began else [])
    else:
        assert (end["reason"], end["exit_code"], executions(job)) == ("done_by_runner", 0, 1)
        assert job.lines() == ["code", "up", "down"]


def test_output_printed_after_the_runners_death_is_delivered(box: MakeBox) -> None:
    job = counting(box, "echo up", WORK, "echo alone", "sleep 600")
    job.launch()
    job.wait_for("up")
    job.kill()
    (job.run_dir / "enough").touch()
    eventually(lambda: b"alone" in (job.state / "spool").read_bytes())
    job.launch()
    end = job.end()
    assert (end["reason"], executions(job)) == ("instance_unreachable", 1)
    assert job.lines() == ["up", "alone"]


def test_a_job_launched_many_times_concurrently_is_executed_once(box: MakeBox) -> None:
    job = counting(box, "echo up", WORK)
    answers: list[dict[str, object]] = []
    threads = [
        threading.Thread(target=lambda process=process: answers.append(json.loads(job.give_orders(process))))
        for process in [job.start() for _ in range(4)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job.wait_for("up")
    assert sorted(map(str, answers)) == [str({"already": True})] * 3 + [str({"pid": job.pid})]
    (job.run_dir / "enough").touch()
    job.end()
    assert (executions(job), job.api.count("claim")) == (1, 1)


def test_a_runner_that_is_refused_its_claim_executes_nothing_and_ends_nothing(box: MakeBox) -> None:
    """The same job was started twice with different folders: the second leaves the first's processes alone."""
    job = counting(box, "echo up", WORK, "echo done")
    job.launch()
    job.wait_for("up")
    other = Box(job.state.parents[1] / "other", job.api)
    other.orders["run_dir"] = str(job.run_dir)
    other.launch()
    eventually(lambda: "the API rejected this runner: 409" in other.said())
    other.wait_until_gone()
    assert sorted(os.listdir(other.state)) == ["lock", "nonce", "runner.log"]
    (job.run_dir / "enough").touch()
    assert job.end()["exit_code"] == 0
    assert (job.lines(), executions(job)) == (["up", "done"], 1)


FULL = """import dstackweb.runner.loop as loop, dstackweb.runner.spool as spool
loop.LAST_OUTPUT_S, spool.DISK_FULL_WAIT_S, write = 0.1, 0.02, os.write
full = lambda: os.path.exists(%r)
os.write = lambda file, data: write(os.open("/dev/full", os.O_WRONLY) if full() else file, data)"""


def on_a_full_disk(box: MakeBox) -> Box:
    """A job whose commands have ended, with output for which the disk has no room."""
    job = counting(box, "echo up", WORK, "echo down")
    flag = job.run_dir / "full"
    with job.start(before=f"exec({FULL % str(flag)!r})") as process:
        job.give_orders(process)
    job.wait_for("up")
    flag.touch()
    (job.run_dir / "enough").touch()
    eventually(lambda: not job.processes(), every=0.02)
    return job


def test_output_that_a_full_disk_has_no_room_for_is_waited_for_with_heartbeats(box: MakeBox) -> None:
    job = on_a_full_disk(box)
    heartbeats = job.api.count("heartbeat")
    eventually(lambda: job.api.count("heartbeat") > heartbeats + 5)
    assert job.api.exit is None
    (job.run_dir / "full").unlink()
    assert (job.end()["exit_code"], job.lines()) == (0, ["up", "down"])


def test_a_job_whose_output_waits_for_a_full_disk_can_be_stopped(box: MakeBox) -> None:
    job = on_a_full_disk(box)
    job.api.action = {"action": "stop", "reason": "terminated_by_user", "grace_s": 0}
    assert (job.end()["exit_code"], job.lines()) == (0, ["up"])


def test_a_runner_that_cannot_take_its_lock_on_a_full_disk_reports_it(box: MakeBox) -> None:
    job = box("true")
    job.state.mkdir(parents=True)
    (job.state / "lock").symlink_to("/dev/full")
    assert job.launch() == {"error": "[Errno 28] No space left on device"}
    (job.state / "lock").unlink()  # endless for whoever reads it


@pytest.mark.slow
@pytest.mark.needs("root")
@pytest.mark.parametrize("what", ["inodes", "space"])
def test_a_full_disk_never_fails_a_run_whatever_the_step(small_disk: Callable[..., Path], what: str) -> None:
    """Each number of free inodes, or blocks, ends the start at another step."""
    ends = []
    for free in range(0, 60, 1 if what == "inodes" else 4):
        disk = small_disk(free) if what == "inodes" else small_disk(100, kib=4 * free + 4)
        job = Box(disk, Api("echo up", ": " + "x" * 100_000, artifacts=LIMITS))
        job.api.ship(packed({"a": b"code", "b/c": b"more"}))
        if "pid" not in (answer := job.launch()):
            assert "No space left on device" in str(answer["error"])
            ends.append("not launched")
            job.api.go_down()
            continue
        eventually(lambda job=job: job.api.exit or job.api.count("started"), every=0.02)
        if job.api.count("started"):  # the output of commands waits for space
            subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        end = job.end()
        job.api.go_down()
        ends.append(end["reason"])
        if end["reason"] == "done_by_runner":
            break
        assert (end["reason"], "No space left on device" in end["message"]) == ("not_claimed", True), (free, end)
        assert b"up" not in job.api.log, "no command was executed"
    assert set(ends) == {"not launched", "not_claimed", "done_by_runner"}


def test_on_a_full_disk_the_end_is_still_reported(box: MakeBox) -> None:
    job = counting(box, "echo up", WORK)
    job.launch()
    job.wait_for("up")
    (job.state / ".exit").mkdir()  # nothing can be written under this name
    (job.run_dir / "enough").touch()
    assert job.end()["exit_code"] == 0


def test_a_runner_without_its_directory_and_server_exits(box: MakeBox) -> None:
    job = box("echo up")
    hold(job, "exit")
    job.launch()
    eventually(lambda: (job.state / "exit").exists())
    pid = job.pid
    job.api.go_down()
    shutil.rmtree(job.state)
    os.kill(pid, signal.SIGUSR1)
    eventually(lambda: not runs(pid))
