"""Ends that somebody asked for: nothing of the job's processes survives them."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable

from tests.runner.conftest import Job, lives
from tests.support import eventually

MakeJob = Callable[..., Job]
DEAF = ("trap '' TERM", "echo ready", "while :; do sleep 0.05; done")
STOP = {"action": "stop", "grace_s": 20, "reason": "terminated_by_user"}


def running(make_job: MakeJob, *commands: str, **spec: object) -> Job:
    """A job that has said `ready`."""
    job = make_job(*commands, **spec)
    job.launch()
    eventually(lambda: b"ready" in job.api.log, every=0.01)
    return job


def test_a_nudged_runner_asks_at_once_and_a_stop_reaches_all_of_a_pipeline(make_job: MakeJob) -> None:
    job = running(make_job, "trap 'echo bye; exit 0' TERM; echo ready; (sleep 60 | sleep 61) & wait")
    job.api.action = STOP
    before = time.monotonic()
    job.nudge()
    end = job.end()
    assert time.monotonic() - before < 2
    assert end["reason"] == "terminated_by_user"
    assert job.api.log.endswith(b"bye\n")


def test_a_stop_leaves_its_grace_to_what_saves_its_work(make_job: MakeJob) -> None:
    """The shell dies of the signal at once; its child is adopted and may finish."""
    worker = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.4), print('saved'), exit(0)))\n"
        "print('ready')\n"
        "time.sleep(60)"
    )
    job = running(make_job, f"{sys.executable} -S -c {shlex.quote(worker)}; echo")
    job.api.action = STOP
    job.nudge()
    assert job.end()["reason"] == "terminated_by_user"
    assert bytes(job.api.log).splitlines()[:2] == [b"ready", b"saved"]


def test_a_child_that_ignores_term_is_killed_after_the_grace(make_job: MakeJob) -> None:
    job = running(make_job, *DEAF)
    job.api.action = STOP | {"grace_s": 0.5}
    before = time.monotonic()
    job.nudge()
    end = job.end()
    assert 0.5 <= time.monotonic() - before < 2
    assert (end["reason"], end["exit_code"]) == ("terminated_by_user", 137)


def test_an_abort_ends_a_stop_that_takes_its_time(make_job: MakeJob) -> None:
    job = running(make_job, *DEAF)
    job.api.action = STOP
    job.nudge()
    eventually(lambda: job.api.count("heartbeat") >= 2)
    job.api.action = {"action": "stop", "grace_s": 0, "reason": "aborted_by_user"}
    job.nudge()
    assert job.end(deadline=2)["exit_code"] == 137


def test_max_duration_is_kept_without_the_server(make_job: MakeJob) -> None:
    job = running(make_job, *DEAF, max_duration_s=0.6, stop_duration_s=0.3)
    job.api.down()
    eventually(lambda: not job.processes(), deadline=3)
    job.api.up()
    job.nudge()
    end = job.end()
    assert (end["reason"], end["exit_code"]) == ("max_duration_exceeded", 137)
    assert "0.6 s" in end["message"]


def test_daemons_that_commands_leave_behind_end_with_them(make_job: MakeJob) -> None:
    """In a session of their own, without an environment, deaf to TERM, or simply in the background."""
    daemons = (
        "(setsid sh -c 'sleep 60' >/dev/null 2>&1 &)",
        "(env -i setsid sh -c 'sleep 60' >/dev/null 2>&1 &)",
        "(setsid sh -c 'trap \"\" TERM; sleep 60; sleep 61' >/dev/null 2>&1 &)",
        "sleep 60 &",
    )
    job = make_job(*daemons, "sleep 0.1; pgrep -P $PPID; pgrep -P $$ sleep", stop_duration_s=0.2)
    job.launch()
    end = job.end()
    assert (end["exit_code"], end["reason"]) == (0, "done_by_runner")
    left = list(map(int, job.api.log.split()))
    assert len(left) == 5  # the three that were adopted, the shell, its own
    assert not any(map(lives, left))


def test_what_reads_the_last_output_may_write_it_out(make_job: MakeJob) -> None:
    """`tee` as bash starts it outlives the shell by an instant."""
    job = make_job("exec > >(sleep 0.3; tee copy)", "echo last words", shell="/bin/bash")
    job.launch()
    assert job.end()["exit_code"] == 0
    assert bytes(job.api.log) == b"last words\n"


def test_a_fork_storm_is_ended(make_job: MakeJob) -> None:
    job = running(make_job, "f() { sleep 0.02; f & }; for i in 1 2 3; do f; done; echo ready; sleep 60")
    job.api.action = {"action": "stop", "grace_s": 0, "reason": "aborted_by_user"}
    job.nudge()
    job.end()


def test_a_job_that_is_wanted_no_more_is_killed_and_told_to_nobody(make_job: MakeJob) -> None:
    job = running(make_job, *DEAF)
    job.api.wanted = False
    job.nudge()
    eventually(lambda: not job.runner_lives(), deadline=3)
    assert job.processes() == []
    assert job.api.exit is None
    assert "wants this job no more" in job.notes()


def test_term_ends_a_runner_without_a_child_and_no_other(make_job: MakeJob) -> None:
    job = running(make_job, "echo ready; sleep 0.3; echo done")
    os.kill(job.runner, signal.SIGTERM)
    assert job.end()["exit_code"] == 0
    assert bytes(job.api.log) == b"ready\ndone\n"
    idle = make_job("echo once")
    idle.api.action = {"action": "wait", "heartbeat_s": 5}
    idle.launch()
    eventually(lambda: idle.api.count("heartbeat"))
    os.kill(idle.runner, signal.SIGTERM)
    eventually(lambda: not idle.runner_lives(), deadline=2)
    idle.api.action = {"action": "go"}
    idle.launch()
    idle.end()
    assert bytes(idle.api.log) == b"once\n"
