"""From a profile in the database to the stop of a run that leaves its GPU unused, on a joined host and on an EC2
instance: what agents and runners send over HTTP, judged by a worker (R16, R17)."""

from __future__ import annotations

import datetime as dt
from typing import Any
from uuid import UUID

import pytest
from django.utils import timezone
from pytest_django import Settings

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import SourceKey
from dstackweb.backends.models import Backend, Instance
from dstackweb.gpus.models import JobPolicy, PolicyStop
from dstackweb.lib.secrets import digest
from dstackweb.offers import sources
from dstackweb.profiles.models import Profile
from dstackweb.runs.models import Job, Run
from dstackweb.scheduler import host_agents
from dstackweb.scheduler.cloud import watch as cloud_watch
from dstackweb.scheduler.models import PeriodicJob
from dstackweb.scheduler.processes import tasks
from standins.aws import Cloud
from tests.api.conftest import Api
from tests.api.test_host_agents import Agent as HostAgent
from tests.api.test_instances import Agent as InstanceAgent
from tests.api.test_runner_api import Runner
from tests.backends.aws.conftest import REGION, as_a_new_process, backend
from tests.factories import make_host, place_all, placed_job
from tests.standins.fixtures import cloud

__all__ = ["as_a_new_process", "backend", "cloud"]

pytestmark = pytest.mark.django_db
POLICY = {"min_gpu_utilization": 50, "time_window": "1m"}
AGES = range(70, -1, -10)


@pytest.fixture(autouse=True)
def nightly(project: Project, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """A profile with a policy; and each call of an agent reads the hosts again."""
    monkeypatch.setattr(host_agents, "REFRESH_S", 0.0)
    monkeypatch.setattr(host_agents, "_known", host_agents.KnownHosts())
    return Profile.objects.create(project=project, name="nightly", settings={"utilization_policy": POLICY})


def submitted(member: User, **keys: Any) -> Run:
    config = {"type": "task", "commands": ["python train.py"], "resources": {"gpu": 1}, "profile": "nightly", **keys}
    answer = Api(member)("POST", "projects/main/runs", {"config": config})
    assert answer.status_code == 201, answer.content
    return Run.objects.get(uid=answer.json()["id"])


def running(run: Run) -> Runner:
    """The runner of its job, whose commands started two minutes ago."""
    runner = Runner(placed_job(run))
    assert runner.claim().status_code == 200
    assert runner.post("started").json()["action"] == "go"
    began = timezone.now() - dt.timedelta(minutes=2)
    Job.objects.filter(run=run).update(started_at=began)
    return runner


def seen(uuid: str, used: int) -> list[dict[str, Any]]:
    """What was read of a GPU in the last 70 s."""
    return [{"age_s": age_s, "gpus": [{"uuid": uuid, "memory_mib": 8192, "utilization": used}]} for age_s in AGES]


def judge() -> None:
    """A tick of the one task that judges, as the ticker and a worker do it."""
    policies = [job for job in tasks.control_jobs() if job.name == "policies"]
    tasks.ensure_rows(policies)
    PeriodicJob.objects.update(due_at=timezone.now())
    tasks.enqueue_due(policies, timezone.now())
    assert tasks.enqueue_due(policies, timezone.now() + dt.timedelta(seconds=3)) == 0, "one is outstanding"
    tasks.tick("policies", timezone.now().timestamp())


def is_stopped_by_its_policy(run: Run, runner: Runner) -> None:
    """The run is stopped once its samples are judged, and its runner, page and API learn why."""
    run.refresh_from_db()
    assert run.status == "running", "the request only stored the samples"
    bound = JobPolicy.objects.get(job__run=run)
    assert (bound.min_gpu_utilization, bound.time_window_s, bound.action) == (50, 60, "terminate")
    judge()
    answer = runner.post("heartbeat", {"beat": 1}).json()
    assert (answer["action"], answer["reason"]) == ("stop", "terminated_due_to_utilization_policy")
    judge()
    assert PolicyStop.objects.get().run == run
    assert run.events.get(kind__startswith="utilization").kind == "utilization_stop"
    assert runner.post("exit", {"exit_code": 143, "reason": answer["reason"]}).status_code == 200
    run.refresh_from_db()
    assert (run.status, run.termination_reason) == ("terminated", "terminated_due_to_utilization_policy")
    said = Api(run.user)("GET", f"projects/main/runs/{run.name}").json()
    assert said["status_message"] == "GPU 0 was below 50 % for 1 min."


def test_a_run_on_a_joined_host_is_stopped_by_its_profiles_policy(project: Project, member: User) -> None:
    make_host("far", gpus=1, token_digest=digest("dwh_far"))
    agent, run = HostAgent("far", "dwh_far"), submitted(member)
    assert place_all() == 1
    (order,) = agent.poll()["start"]
    runner = running(run)
    job = placed_job(run)
    assert UUID(order["job"]) == job.pk
    agent.poll(samples=seen(job.gpus[0], 80))
    judge()
    run.refresh_from_db()
    assert run.status == "running"
    later = timezone.now() + dt.timedelta(seconds=80)
    with pytest.MonkeyPatch.context() as clock:
        clock.setattr(timezone, "now", lambda: later)
        agent.poll(samples=seen(job.gpus[0], 3))
        is_stopped_by_its_policy(run, runner)


@pytest.mark.slow
def test_a_run_on_an_ec2_instance_is_stopped_by_its_profiles_policy(
    project: Project, member: User, cloud: Cloud, backend: Backend, settings: Settings
) -> None:
    settings.DSTACKWEB_PUBLIC_URL = settings.DSTACKWEB_API_URL = "https://gpus.example.org"
    for source in ("instance_types", "prices", "quotas", "spot_prices"):
        sources.refresh(backend, SourceKey(source, REGION))
    run = submitted(member, backends=["cloud"], instance_types=["g4dn.xlarge"])
    assert place_all() == 1
    cloud_watch.poll_all()
    assert InstanceAgent(Instance.objects.get()).join(gpus=["GPU-ec2-0"]).status_code == 200
    runner = running(run)
    assert placed_job(run).gpus == ["GPU-ec2-0"]
    assert runner.post("samples", {"samples": seen("GPU-ec2-0", 3)}).status_code == 200
    is_stopped_by_its_policy(run, runner)


def test_a_lost_task_is_found_by_the_next_tick_and_a_doubled_one_stops_nothing_twice(
    project: Project, member: User
) -> None:
    make_host("far", gpus=1, token_digest=digest("dwh_far"))
    agent, run = HostAgent("far", "dwh_far"), submitted(member)
    place_all()
    running(run)
    policies = [job for job in tasks.control_jobs() if job.name == "policies"]
    tasks.ensure_rows(policies)
    now = timezone.now()
    assert tasks.enqueue_due(policies, now) == 0, "nothing is low"
    agent.poll(samples=seen(placed_job(run).gpus[0], 3))
    PeriodicJob.objects.update(due_at=now)
    assert tasks.enqueue_due(policies, now) == 1
    # That one is lost with its worker: the next is enqueued when it must have ended.
    assert tasks.enqueue_due(policies, now + dt.timedelta(seconds=tasks.OUTSTANDING_S - 1)) == 0
    assert tasks.enqueue_due(policies, now + dt.timedelta(seconds=tasks.OUTSTANDING_S + 1)) == 1
    for _ in range(2):
        tasks.tick("policies", timezone.now().timestamp())
    run.refresh_from_db()
    assert (run.status, PolicyStop.objects.count()) == ("terminating", 1)
