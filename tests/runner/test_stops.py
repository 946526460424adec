"""How a job is ended, by whom, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from dstackweb.runner import tree
from dstackweb.runner.jobs import LocalJobs
from tests.runner.conftest import Box, runs
from tests.runner.test_machine import AT, Service, service
from tests.support import eventually

__all__ = ["service"]
MakeBox = Callable[..., Box]
WORK = "while :; do sleep 0.02 || :; done"
"""A stop ends the sleep as well, and the shell would leave with its first command that fails, before its own trap."""
DEAF = f"trap '' TERM; echo up; {WORK}"


def stop(reason: str = "terminated_by_user", grace_s: float = 20) -> dict[str, object]:
    """What a heartbeat answers to have a job end."""
    return {"action": "stop", "reason": reason, "grace_s": grace_s}


def phase(job: Box) -> str:
    """What the last heartbeat said."""
    said: str = [call for call in job.api.calls if call.what == "heartbeat"][-1].said["phase"]
    return said


def test_max_duration_ends_a_job_in_the_name_of_its_limit(box: MakeBox) -> None:
    job = box("trap 'echo stopping; exit 0' TERM", "echo up", WORK, max_duration_s=600)
    job.launch()
    job.wait_for("up")
    job.api.action = {"action": "go", "max_duration_s": 0.1}
    end = job.end()
    assert (end["reason"], end["exit_code"]) == ("max_duration_exceeded", 0)
    assert job.lines()[-1] == "stopping"


def test_a_stop_sends_sigterm_and_waits_for_the_grace_period(box: MakeBox) -> None:
    """The shell dies of TERM at once; the program that it started has the whole grace to save its work."""
    job = box(f"sh -c 'trap \"sleep 2.3; echo saved; exit\" TERM; echo up; {WORK}'", "echo never")
    job.launch()
    job.wait_for("up")
    job.api.action = stop()
    assert job.end()["reason"] == "terminated_by_user"
    assert (job.lines()[0], job.lines()[-1]) == ("up", "saved")
    assert phase(job) == "stopping"


def test_a_command_that_ignores_term_is_killed_after_its_grace(box: MakeBox) -> None:
    job = box(DEAF)
    job.launch()
    job.wait_for("up")
    before = time.monotonic()
    job.api.action = stop(grace_s=0.5)
    end = job.end()
    assert (end["reason"], end["exit_code"]) == ("terminated_by_user", 137)
    assert time.monotonic() - before >= 0.5
    assert job.processes() == set()


def test_an_abort_waits_for_nothing_and_cuts_a_running_grace_short(box: MakeBox) -> None:
    job = box(DEAF)
    job.launch()
    job.wait_for("up")
    job.api.action = stop(grace_s=600)
    eventually(lambda: phase(job) == "stopping")
    job.api.action = stop("aborted_by_user", grace_s=0)
    end = job.end()
    assert (end["reason"], end["exit_code"]) == ("terminated_by_user", 137)


def test_a_nudged_runner_polls_at_once(box: MakeBox) -> None:
    job = box("echo up", WORK)
    job.api.heartbeat_s = 600
    job.launch()
    job.wait_for("up")
    job.api.action = stop(grace_s=1)
    job.nudge()
    assert job.end()["reason"] == "terminated_by_user"


DAEMON = "sh -c 'echo $$ > daemon; exec sleep 600' > /dev/null 2>&1"
DEAF_DAEMON = DAEMON.replace("echo", 'trap "" TERM; echo')
UNTIL_IT_RUNS = "while [ ! -s daemon ]; do sleep 0.01; done"


@pytest.mark.parametrize(
    "how",
    [f"({DAEMON} &)", f"(env -i setsid {DAEMON} &)", f"(env -i setsid {DEAF_DAEMON} &)"],
    ids=["an orphan", "a daemon without the marker", "a daemon that ignores TERM"],
)
def test_the_end_is_reported_once_the_last_process_has_exited(box: MakeBox, how: str) -> None:
    job = box(how, UNTIL_IT_RUNS, "echo left one")
    left: list[bool] = []

    def look(what: str) -> None:
        if what == "exit":
            left.append(runs(int((job.run_dir / "daemon").read_text())))

    job.api.trouble = look
    job.launch()
    assert job.end()["reason"] == "done_by_runner"
    assert left == [False]


def test_a_stop_that_comes_after_the_end_does_not_change_it(box: MakeBox) -> None:
    job = box(f"(setsid {DEAF_DAEMON} &)", UNTIL_IT_RUNS, "exit 3")
    job.launch()
    eventually(lambda: phase(job) == "stopping")
    job.api.action = stop(grace_s=0)
    end = job.end()
    assert (end["reason"], end["exit_code"]) == ("container_exited_with_error", 3)


def test_without_contact_a_job_that_would_be_retried_stops_itself(box: MakeBox) -> None:
    """Heartbeats are the contact that counts: the API judges by them whether somebody looks after the job."""
    job = box("echo up", "trap 'echo alone; exit 0' TERM", WORK, lost_after_s=0.5)
    job.launch()
    job.wait_for("up")
    job.api.trouble = lambda what: 503 if what in ("heartbeat", "exit") else None
    job.wait_for("alone")
    eventually(lambda: not job.processes())
    assert job.lives()
    job.api.trouble = lambda what: None
    assert job.end(nudged=True)["reason"] == "instance_unreachable"


def test_an_unwanted_job_is_killed_without_further_reports(box: MakeBox) -> None:
    job = box(DEAF)
    job.launch()
    job.wait_for("up")
    job.api.trouble = lambda what: 404
    job.wait_until_gone()
    assert job.processes() == set()
    assert job.api.exit is None


def test_proxy_errors_during_an_api_outage_end_no_job(box: MakeBox) -> None:
    text, other = b"404 page not found\n", b'{"message": "gone"}'
    page = b"HTTP/1.1 %s\r\nContent-Length: 19\r\n\r\n%s"
    pages = [page % (b"404 Not Found", text), page % (b"401 No", other), page % (b"200 OK", text)]
    job = box("echo up", "while [ ! -e enough ]; do sleep 0.02; done", "echo done")
    job.launch()
    job.wait_for("up")
    job.api.trouble = lambda what: pages.pop() if pages else None
    eventually(lambda: job.nudge() and not pages)
    (job.run_dir / "enough").touch()
    assert job.end()["reason"] == "done_by_runner"
    assert job.lines() == ["up", "done"]


def test_nodes_wait_for_one_another_before_the_first_command(box: MakeBox) -> None:
    job = box("echo together", nodes=2)
    job.api.action = {"action": "wait"}
    job.launch()
    eventually(lambda: job.api.count("heartbeat") >= 3)
    assert {call.said["phase"] for call in job.api.calls if call.what == "heartbeat"} == {"waiting"}
    assert not (job.state / "started").exists()
    job.api.action = {"action": "go"}
    assert job.end()["exit_code"] == 0
    assert job.lines() == ["together"]


def test_a_stop_before_the_first_command_executes_nothing(box: MakeBox) -> None:
    job = box("echo never", nodes=2)
    job.api.action = {"action": "wait"}
    job.launch()
    eventually(lambda: job.api.count("heartbeat"))
    job.api.action = stop()
    end = job.end()
    assert (end["reason"], end["exit_code"], end["log_size"]) == ("terminated_by_user", None, 0)


def test_a_term_ends_a_runner_that_waits_and_none_that_has_commands(box: MakeBox) -> None:
    waiting, working = box("echo never"), box("echo up", "while [ ! -e enough ]; do sleep 0.02; done")
    waiting.api.action = {"action": "wait"}
    for job in (waiting, working):
        job.launch()
    working.wait_for("up")
    eventually(lambda: waiting.api.count("heartbeat"))
    for job in (waiting, working):
        os.kill(job.pid, signal.SIGTERM)
    waiting.wait_until_gone()
    (working.run_dir / "enough").touch()
    assert working.end()["reason"] == "done_by_runner"


def test_a_runner_that_also_got_the_signal_reports_it_with_the_end(box: MakeBox) -> None:
    """As when the machine is shut down: whatever the commands make of the signal."""
    job = box("trap 'exit 3' TERM", "echo up", WORK)
    job.launch()
    job.wait_for("up")
    os.kill(job.pid, signal.SIGTERM)
    tree.send(job.processes(), signal.SIGTERM)
    end = job.end()
    assert (end["reason"], end["exit_code"], end["signalled"]) == ("container_exited_with_error", 3, True)
    assert "after this runner got SIGTERM" in job.said()


def test_a_failed_job_on_a_cloud_checks_the_metadata_once_more(box: MakeBox, service: Service) -> None:
    service.notice = json.dumps({"action": "terminate", "time": AT}).encode()
    job = box("exit 3")
    job.orders["metadata"] = service.url
    job.launch()
    assert job.end()["interruption"] == {"at": AT}


def test_a_job_on_a_cloud_ends_also_without_metadata(box: MakeBox) -> None:
    job = box("exit 3")
    job.orders["metadata"] = "http://127.0.0.1:9"
    job.launch()
    end = job.end()
    assert (end["exit_code"], "interruption" in end, "signalled" in end) == (3, False, False)


def test_a_job_lives_until_its_last_process_has_ended_whatever_became_of_its_runner(box: MakeBox) -> None:
    job = box(DEAF)
    jobs = LocalJobs(str(job.state.parents[1]))
    assert not jobs.has_living()
    job.launch()
    job.wait_for("up")
    assert jobs.has_living()
    job.kill()
    assert jobs.has_living()
    eventually(lambda: jobs.kill(job.api.job))
    assert not jobs.has_living()
