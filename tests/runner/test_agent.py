"""Real agents against a real server: a machine's whole life, and what may befall it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import connections

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.runner import tree
from dstackweb.runner.agent import UNREPORTED_S, Agent
from dstackweb.runner.cgroups import Group
from dstackweb.runner.client import Client
from dstackweb.runner.machine import Metadata
from dstackweb.runner.state import runner_lives
from dstackweb.runs.models import Job, RunEvent
from dstackweb.scheduler.cloud import agents
from tests.factories import as_if, cloud_job, join, make_project, make_run, make_user
from tests.runner.conftest import runs
from tests.runner.machines import Gate, Machine, processes_of, short_waits
from tests.support import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def ada(transactional_db: None) -> tuple[Project, User]:
    project = make_project("main")
    return project, join(project, make_user("ada"))


@pytest.fixture
def gate(live_server: Any, settings: Any) -> Iterator[Gate]:
    gate = Gate(int(live_server.url.rpartition(":")[2]))
    settings.DSTACKWEB_API_URL = gate.url
    settings.DSTACKWEB_HEARTBEAT_S = 0.3
    with short_waits():
        yield gate
    gate.shut()


Rent = Callable[..., tuple[Machine, Job]]


@pytest.fixture
def rent(ada: tuple[Project, User], gate: Gate, open_home: Path) -> Iterator[Rent]:
    """A machine with its agent, not yet started, for a job of these commands."""
    machines: list[tuple[Machine, Job]] = []

    def make(*commands: str, **instance: Any) -> tuple[Machine, Job]:
        job = cloud_job(make_run(*ada, commands=list(commands)), **instance)
        assert job.instance is not None
        token, _digest = agents.join_token(job.instance.pk)
        machines.append((Machine(open_home / str(job.pk), gate.url, job.instance.pk, token), job))
        return machines[-1]

    yield make
    for machine, job in machines:
        machine.clear(runs)
        tree.kill(processes_of(job.pk), Group())
    connections.close_all()


def status(job: Job) -> str:
    return Job.objects.get(pk=job.pk).status


def instance_of(job: Job) -> Instance:
    return Instance.objects.get(jobs=job)


def until(job: Job, *statuses: str) -> Job:
    eventually(lambda: status(job) in statuses)
    return Job.objects.get(pk=job.pk)


def test_an_instance_joins_runs_its_job_and_shuts_down_on_order(rent: Rent) -> None:
    machine, job = rent("id -un > who", "exit 3")
    machine.start()
    ended = until(job, "failed")
    assert (ended.exit_code, ended.termination_reason) == (3, "container_exited_with_error")
    run_dir = machine.home / "runs" / str(job.run.uid) / "node-0"
    assert (run_dir / "who").read_text().strip() == ("nobody" if os.getuid() == 0 else os.environ["USER"])
    assert (machine.home / "token").stat().st_mode & 0o777 == 0o600
    Instance.objects.update(status=InstanceStatus.STOPPING)
    assert machine.end() == 0
    assert machine.off == "-h now"


def test_a_killed_agent_resumes_the_job_that_kept_running(rent: Rent) -> None:
    machine, job = rent("echo again >> starts", "until [ -e go ]; do sleep 0.05; done")
    machine.start()
    until(job, "running")
    runner = machine.runner_pid(job.pk)
    machine.kill()
    assert runs(runner)
    beat = instance_of(job).heartbeats
    del machine.env["DSTACKWEB_JOIN_TOKEN"]
    machine.start()
    eventually(lambda: instance_of(job).heartbeats > beat + 3)
    assert machine.runner_pid(job.pk) == runner
    run_dir = machine.home / "runs" / str(job.run.uid) / "node-0"
    (run_dir / "go").touch()
    until(job, "done")
    assert (run_dir / "starts").read_text() == "again\n"


def test_a_restarted_agent_finds_a_job_whose_runner_sent_nothing(rent: Rent) -> None:
    machine, job = rent("until [ -e go ]; do sleep 0.05; done")
    machine.start()
    until(job, "running")
    runner = machine.runner_pid(job.pk)
    os.kill(runner, signal.SIGSTOP)
    machine.kill()
    as_if(Job.objects.all(), silent_s=100)
    beat = instance_of(job).heartbeats
    machine.start()
    eventually(lambda: instance_of(job).heartbeats > beat + 3)
    assert status(job) == "running"
    os.kill(runner, signal.SIGCONT)
    (machine.home / "runs" / str(job.run.uid) / "node-0" / "go").touch()
    until(job, "done")


def test_the_unreported_end_of_a_job_of_a_killed_runner_is_reported_by_its_successor(rent: Rent, gate: Gate) -> None:
    machine, job = rent("until [ -e go ]; do sleep 0.05; done")
    machine.start()
    until(job, "running")
    runner = machine.runner_pid(job.pk)
    gate.shut()
    (machine.home / "runs" / str(job.run.uid) / "node-0" / "go").touch()
    eventually((machine.home / "jobs" / str(job.pk) / "exit").exists)
    os.kill(runner, signal.SIGKILL)
    machine.kill()
    as_if(Job.objects.all(), silent_s=100)
    machine.start()
    gate.open()
    assert until(job, "done", "failed").exit_code == 0


def test_during_an_api_outage_the_job_goes_on_and_its_end_is_reported_later(rent: Rent, gate: Gate) -> None:
    machine, job = rent("until [ -e go ]; do sleep 0.05; done")
    machine.start()
    until(job, "running")
    gate.shut()
    (machine.home / "runs" / str(job.run.uid) / "node-0" / "go").touch()
    eventually((machine.home / "jobs" / str(job.pk) / "exit").exists)
    assert status(job) == "running"
    gate.open()
    until(job, "done")
    assert machine.off is None


def test_the_successor_of_a_killed_runner_reports_the_job_as_failed(rent: Rent) -> None:
    machine, job = rent("sleep 600")
    machine.start()
    until(job, "running")
    os.kill(machine.runner_pid(job.pk), signal.SIGKILL)
    assert until(job, "failed").termination_reason == "instance_unreachable"
    assert not processes_of(job.pk)


def test_a_job_of_which_nothing_is_left_has_ended(rent: Rent) -> None:
    machine, job = rent("sleep 600")
    machine.start()
    until(job, "running")
    runner = machine.runner_pid(job.pk)
    machine.kill()
    os.kill(runner, signal.SIGKILL)
    tree.kill(processes_of(job.pk), Group())
    shutil.rmtree(machine.home / "jobs" / str(job.pk))
    as_if(Job.objects.all(), silent_s=100)
    machine.start()
    assert until(job, "failed").detail == {"code": "runner_gone"}


def test_a_runner_that_cannot_start_is_reported_and_retried(rent: Rent) -> None:
    machine, job = rent("true")
    (machine.home / "jobs").write_text("in the way")
    machine.start()
    eventually(lambda: "FileExistsError" in Job.objects.get(pk=job.pk).message)
    (machine.home / "jobs").unlink()
    until(job, "done")
    assert RunEvent.objects.filter(run=job.run, kind="claimed").count() == 1


@pytest.mark.parametrize("token", ["", "nonsense"])
def test_an_instance_with_an_invalid_token_shuts_down(rent: Rent, token: str) -> None:
    machine, job = rent("true")
    machine.env["DSTACKWEB_JOIN_TOKEN"] = token
    assert machine.start().end() == 0
    assert machine.off == "-h now"
    assert instance_of(job).status == InstanceStatus.STARTING


def test_an_instance_whose_token_was_used_by_another_shuts_down(rent: Rent, gate: Gate, open_home: Path) -> None:
    machine, job = rent("sleep 600")
    machine.start()
    until(job, "running")
    other = Machine(open_home / "other", gate.url, instance_of(job).pk, machine.env["DSTACKWEB_JOIN_TOKEN"])
    assert other.start().end() == 0
    assert other.off == "-h now"
    assert (status(job), machine.off) == ("running", None)


def test_gpus_are_those_that_nvidia_smi_shows(rent: Rent) -> None:
    machine, job = rent('echo "$CUDA_VISIBLE_DEVICES" > gpus', gpu_count=2)
    machine.tool("nvidia-smi", "echo GPU-aaaa; echo GPU-bbbb")
    machine.start()
    assert until(job, "done").gpus == ["GPU-aaaa", "GPU-bbbb"]
    run_dir = machine.home / "runs" / str(job.run.uid) / "node-0"
    assert (run_dir / "gpus").read_text() == "GPU-aaaa,GPU-bbbb\n"


def test_an_instance_without_contact_to_the_server_shuts_down(
    rent: Rent, gate: Gate, settings: Any, monkeypatch: Any
) -> None:
    settings.DSTACKWEB_LOST_AFTER_S = 0.5
    monkeypatch.setattr(agents, "ALONE_MARGIN_S", 0.5)
    machine, job = rent("true")
    machine.start()
    until(job, "done")
    # Its runner, too, has heard that the end was heard.
    eventually(lambda: not runner_lives(str(machine.home / "jobs" / str(job.pk))))
    gate.shut()
    assert machine.end() == 0
    assert machine.off == "-h now"


def test_only_one_agent_is_at_work_in_a_folder(rent: Rent) -> None:
    machine, job = rent("sleep 600")
    machine.start()
    until(job, "running")
    assert machine.start().end() == 1
    assert machine.off is None


def test_plain_http_to_another_machine_is_refused_permanently(rent: Rent) -> None:
    machine, _job = rent("true")
    machine.arguments[1] = "http://gpus.example.org"
    assert machine.start().end() == 2
    assert "plain HTTP is for this machine only" in machine.said()
    assert machine.off is None


class Quiet:
    """Instance jobs in a given state."""

    home = "/nonexistent"

    def __init__(self, *, is_running_any: bool = False, has_unreported_end: bool = False) -> None:
        self._running, self._unreported = is_running_any, has_unreported_end

    def is_running_any(self) -> bool:
        return self._running

    def has_unreported_end(self) -> bool:
        return self._unreported


@pytest.mark.parametrize(
    ("work", "silent_s", "abandoned"),
    [
        (Quiet(), 99, False),
        (Quiet(), 101, True),
        (Quiet(is_running_any=True), 1e6, False),
        (Quiet(has_unreported_end=True), 101 + UNREPORTED_S / 2, False),
        (Quiet(has_unreported_end=True), 101 + UNREPORTED_S, True),
    ],
)
def test_an_instance_without_contact_stays_up_while_it_has_jobs_or_unsent_reports(
    work: Any, silent_s: float, abandoned: bool
) -> None:
    agent = Agent(
        Client("http://127.0.0.1:9", f"instances/{UUID(int=1)}", "", ""), work, Metadata("http://127.0.0.1:9")
    )
    agent.alone_s = 100
    agent.contact -= silent_s
    assert agent._is_abandoned() is abandoned
