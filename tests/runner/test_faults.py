"""Servers that go away, answers that get lost, runners that are killed: nothing runs twice, and no line is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.runner.conftest import Job, lives
from tests.support import eventually

MakeJob = Callable[..., Job]


def executed(job: Job) -> int:
    """How often the commands have begun, by the lines they appended."""
    file = job.run_dir / "executed"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_server_that_is_down_costs_no_line_and_stops_nothing(make_job: MakeJob) -> None:
    job = make_job("echo x >> executed; for i in 1 2 3 4 5 6; do echo line $i; sleep 0.1; done")
    job.launch()
    eventually(lambda: b"line 1" in job.api.log, every=0.01)
    job.api.down()
    eventually(lambda: not job.processes())
    assert job.runner_lives()
    job.api.up()
    job.nudge()
    assert job.end()["exit_code"] == 0
    assert bytes(job.api.log) == b"".join(b"line %d\n" % i for i in range(1, 7))
    assert executed(job) == 1


def test_a_server_that_is_down_from_the_beginning_is_waited_for(make_job: MakeJob) -> None:
    job = make_job("echo x >> executed")
    job.api.down()
    job.launch()
    assert job.runner_lives()
    job.api.up()
    job.nudge()
    assert job.end()["exit_code"] == 0


@pytest.mark.parametrize("how", ["fail", "lose its answer"])
def test_each_call_may_fail_or_lose_its_answer(make_job: MakeJob, how: str) -> None:
    """Repeated until it is answered, and nothing happens twice: neither commands nor log bytes."""
    job = make_job("echo x >> executed; echo output")
    for what in ("claim", "spec", "heartbeat", "started", "logs", "exit"):
        if how == "fail":
            failures = iter([(500, {"detail": "locked"})])
            job.api.answers[what] = partial(next, failures, None)
        else:
            job.api.drops[what] = 2  # the first is repeated at once
    job.launch()
    assert job.end()["exit_code"] == 0
    assert bytes(job.api.log) == b"output\n"
    assert executed(job) == 1


def test_an_archive_that_fails_to_come_is_asked_for_again_with_heartbeats_meanwhile(make_job: MakeJob) -> None:
    job = make_job("echo never", archive={"sha256": "0" * 64, "size": 1})
    job.api.heartbeat_s = 0.1
    job.api.answers["archive"] = lambda: (500, {"detail": "no disk"})
    job.launch()
    eventually(lambda: job.api.count("heartbeat"))
    job.api.action = {"action": "stop", "grace_s": 0, "reason": "failed_to_start_due_to_no_capacity"}
    assert job.end()["reason"] == "failed_to_start_due_to_no_capacity"


def test_a_server_that_lost_the_end_of_its_log_gets_it_again(make_job: MakeJob) -> None:
    job = make_job("echo first; sleep 0.3; echo second")
    job.launch()
    eventually(lambda: b"first" in job.api.log, every=0.01)
    job.api.log.clear()
    job.end()
    assert bytes(job.api.log) == b"first\nsecond\n"


def test_another_runners_job_is_left_alone(make_job: MakeJob) -> None:
    """A start was doubled on two machines: the API gives the job to one."""
    job = make_job("echo x >> executed")
    job.api.nonce = "another runner's"
    job.launch()
    eventually(lambda: not job.runner_lives())
    assert executed(job) == 0
    assert job.api.calls == ["claim"]


def test_two_runners_launched_at_once_are_one(make_job: MakeJob) -> None:
    job = make_job("echo x >> executed; sleep 2")
    answers: list[dict[str, object]] = []
    threads = [threading.Thread(target=lambda: answers.append(job.launch())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job.end()
    assert sorted(map(str, answers)) == sorted([str({"pid": job.runner}), *[str({"already": True})] * 3])
    assert executed(job) == 1


def test_a_silence_of_lost_after_stops_the_job_and_the_end_is_told_later(make_job: MakeJob) -> None:
    job = make_job("echo ready; sleep 60", lost_after_s=0.6)
    job.api.heartbeat_s = 0.1
    job.launch()
    eventually(lambda: b"ready" in job.api.log)
    job.api.down()
    eventually(lambda: not job.processes(), deadline=3)
    job.api.up()
    job.nudge()
    end = job.end()
    assert end["reason"] == "instance_unreachable"
    assert "without contact" in end["message"]


def test_a_server_that_answers_but_hears_no_heartbeat_is_no_contact(make_job: MakeJob) -> None:
    """It counts the job's silence by heartbeats, so the runner must too."""
    job = make_job("while :; do echo on; sleep 0.05; done", lost_after_s=0.6)
    job.api.heartbeat_s = 0.1
    job.launch()
    eventually(lambda: b"on" in job.api.log)
    job.api.answers["heartbeat"] = lambda: (500, {"detail": "locked"})
    eventually(lambda: not job.processes(), deadline=3)


def test_killed_before_the_claim(make_job: MakeJob) -> None:
    job = make_job("echo x >> executed; echo output")
    job.api.hold("claim")
    job.launch()
    eventually(lambda: job.api.count("claim"))
    job.kill_runner()
    job.api.release("claim")
    job.launch()
    assert job.end()["exit_code"] == 0
    assert executed(job) == 1


@pytest.mark.parametrize("what", ["spec", "heartbeat"])
def test_killed_between_the_claim_and_the_start(make_job: MakeJob, what: str) -> None:
    job = make_job("echo x >> executed; echo output")
    job.api.hold(what)
    job.launch()
    eventually(lambda: job.api.count(what))
    job.kill_runner()
    job.api.release(what)
    job.launch()
    assert job.end()["exit_code"] == 0
    assert (executed(job), bytes(job.api.log)) == (1, b"output\n")


def test_killed_between_the_started_mark_and_the_spawn(make_job: MakeJob) -> None:
    """Whether the commands had begun can't be known, so they are not begun again."""
    job = make_job("echo x >> executed")
    job.api.action = {"action": "wait", "heartbeat_s": 5}
    job.launch()
    eventually(lambda: job.api.count("heartbeat"))
    job.kill_runner()
    (job.state_dir / "started").touch()
    job.launch()
    end = job.end()
    assert (end["reason"], end["exit_code"], end["log_size"]) == ("instance_unreachable", None, 0)
    assert executed(job) == 0


DAEMON = "(setsid sh -c 'echo $$; trap \"\" TERM; while :; do sleep 0.05; done' 2>/dev/null &)"


def test_killed_while_the_commands_run(make_job: MakeJob) -> None:
    """What they wrote after the runner's death is in the log too, and the next runner leaves none of them alive."""
    job = make_job("echo x >> executed", DAEMON, "for i in 1 2 3 4 5; do echo line $i; sleep 0.1; done; sleep 60")
    job.launch()
    eventually(lambda: b"line 1" in job.api.log, every=0.01)
    job.kill_runner()
    assert job.processes()
    eventually(lambda: b"line 5" in (job.state_dir / "spool").read_bytes())
    job.launch()
    end = job.end()
    assert (end["reason"], end["exit_code"]) == ("instance_unreachable", None)
    lines = job.api.log.splitlines()
    assert [line for line in lines if line.startswith(b"line")] == [b"line %d" % i for i in range(1, 6)]
    assert not any(lives(int(line)) for line in lines if line.isdigit())
    assert (executed(job), end["log_size"]) == (1, len(job.api.log))


def test_killed_with_its_relay_while_the_commands_write(make_job: MakeJob) -> None:
    """Worse than any single fault: the output up to it is there, and nothing runs on."""
    job = make_job("echo x >> executed", "echo begun", "while echo more; do sleep 0.05; done")
    job.launch()
    eventually(lambda: b"more" in job.api.log, every=0.01)
    spool = str(job.state_dir / "spool")
    holders = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if spool in _open_files(pid)]
    os.kill(job.runner, signal.SIGKILL)
    for pid in holders:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not job.runner_lives())
    job.launch()
    assert job.end()["reason"] == "instance_unreachable"
    assert job.api.log.startswith(b"begun\nmore\n")
    assert executed(job) == 1


def _open_files(pid: int) -> list[str]:
    try:
        return [str(Path(f"/proc/{pid}/fd/{fd}").readlink()) for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


@pytest.mark.parametrize("what", ["logs", "exit"])
def test_killed_after_the_end_before_it_was_told(make_job: MakeJob, what: str) -> None:
    job = make_job("echo x >> executed; echo output; exit 3", redact=["output"])
    job.api.answers[what] = lambda: (500, {"detail": "locked"})
    job.launch()
    eventually(lambda: (job.state_dir / "exit").exists() and job.api.count(what))
    job.kill_runner()
    del job.api.answers[what]
    job.launch()
    end = job.end()
    assert (end["reason"], end["exit_code"], end["log_size"]) == ("container_exited_with_error", 3, 7)
    assert (executed(job), bytes(job.api.log)) == (1, b"******\n")


def test_a_told_end_is_told_again_and_changes_nothing(make_job: MakeJob) -> None:
    job = make_job("echo x >> executed")
    job.launch()
    first = job.end()
    job.api.exit = None
    job.launch()
    assert job.end() == first
    assert executed(job) == 1


def test_a_runner_that_is_no_longer_wanted_after_the_end_ends_too(make_job: MakeJob) -> None:
    job = make_job("echo x >> executed")
    job.api.answers["exit"] = lambda: (404, {"detail": "no such job"})
    job.launch()
    eventually(lambda: (job.state_dir / "exit").exists() and not job.runner_lives())
    assert executed(job) == 1
