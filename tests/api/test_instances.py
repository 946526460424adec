"""The agent's side of the API, without an agent: who is let in, and what each call does."""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import zipfile
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.runs import attempts
from dstackweb.runs.launch import job_of_token
from dstackweb.runs.models import Job
from dstackweb.runs.states import JobStatus
from dstackweb.scheduler.cloud.agents import agent_token, join_token
from dstackweb.wording import statuses
from tests.factories import as_if, cloud_job, make_run

NOTICE = timezone.now().replace(microsecond=0) + dt.timedelta(minutes=2)


class Agent:
    """What an agent sends, by hand."""

    def __init__(self, instance: Instance, nonce: str = "n1") -> None:
        self.instance, self.nonce = instance, nonce
        self.token = agent_token(instance.pk)

    def join(self, token: str | None = None, **more: Any) -> HttpResponse:
        body = {"token": token or join_token(self.instance.pk)[0], "nonce": self.nonce, **more}
        return self._post("join", body)

    def next(self, **said: Any) -> HttpResponse:
        return self._post("next", said, Authorization=f"Bearer {self.token}")

    def _post(self, what: str, body: Any, **headers: str) -> HttpResponse:
        return Client().post(
            f"/api/v1/runner/instances/{self.instance.pk}/{what}",
            body,
            content_type="application/json",
            headers=headers,
        )


@pytest.fixture
def instance(project: Project, member: User) -> Instance:
    """The machine of a run's one job, started by its cloud."""
    instance = cloud_job(make_run(project, member)).instance
    assert instance is not None
    return instance


@pytest.fixture
def agent(instance: Instance) -> Agent:
    return Agent(instance)


def job_of(instance: Instance) -> Job:
    return Job.objects.get(instance=instance)


def test_the_runner_is_one_file_whose_etag_is_its_sha256(db: None) -> None:
    answer = Client().get("/api/v1/runner/pyz")
    etag = answer["ETag"]
    assert etag == f'"{hashlib.sha256(answer.content).hexdigest()}"'
    assert "dstackweb/runner/agent.py" in zipfile.ZipFile(io.BytesIO(answer.content)).namelist()
    again = Client().get("/api/v1/runner/pyz", headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")


def test_an_agent_joins_once_and_a_repeated_join_gets_the_same_answer(instance: Instance, agent: Agent) -> None:
    answer = agent.join(gpus=["GPU-1"], address="10.0.0.7")
    assert answer.json()["token"] == agent_token(instance.pk)
    assert agent.join().json() == answer.json()
    assert answer.json()["next"] == agent.next().json(), "the first order needs no call of its own"
    instance.refresh_from_db()
    assert (instance.status, instance.gpus, instance.address) == ("running", ["GPU-1"], "10.0.0.7")
    assert instance.ready_at is not None


def test_a_used_token_is_refused_to_another_agent(instance: Instance, agent: Agent) -> None:
    agent.join()
    assert Agent(instance, "n2").join().status_code == 409


@pytest.mark.parametrize("make", [lambda: "nonsense", lambda: agent_token(uuid4()), lambda: join_token(uuid4())[0]])
def test_a_wrong_token_is_refused(agent: Agent, make: Callable[[], str]) -> None:
    token = make()
    assert agent.join(token).status_code == 403
    agent.token = token
    assert agent.next().status_code in (401, 403)


def test_an_agent_that_joins_before_its_launch_is_stored_gets_425(instance: Instance, agent: Agent) -> None:
    Instance.objects.update(status=InstanceStatus.REQUESTED, cloud_id="")
    assert agent.join().status_code == 425
    Instance.objects.update(status=InstanceStatus.STARTING)
    assert agent.join().status_code == 200


@pytest.mark.parametrize("status", [InstanceStatus.STOPPING, InstanceStatus.GONE])
def test_a_stopping_instance_cannot_join_and_is_shut_down(
    instance: Instance, agent: Agent, status: InstanceStatus
) -> None:
    Instance.objects.update(status=status)
    assert agent.join().status_code == 409
    assert agent.next().json() == {"do": "off"}


def test_start_orders_are_repeated_while_the_runner_does_not_live(instance: Instance, agent: Agent) -> None:
    agent.join(gpus=["GPU-1", "GPU-2"])
    job = job_of(instance)
    first = agent.next().json()
    assert (first["do"], first["job"]) == ("run", str(job.pk))
    assert job_of_token(first["orders"]["token"]) == job.pk
    assert first["orders"]["run_uid"] == str(job.run.uid)
    assert agent.next().json() == first
    assert job_of(instance).gpus == ["GPU-1", "GPU-2"]
    assert agent.next(job=str(job.pk)).json()["do"] == "wait"
    attempts.claim_job(job.pk, "runner", "there")
    assert agent.next().json()["do"] == "run"


def test_each_call_counts_as_a_heartbeat(instance: Instance, agent: Agent) -> None:
    agent.join()
    Instance.objects.update(silent_s=100)
    agent.next()
    agent.next()
    instance.refresh_from_db()
    assert (instance.heartbeats, instance.silent_s) == (4, 0)
    assert instance.seen_at is not None


def test_an_idle_instance_waits_and_learns_how_long_it_may_go_without_the_server(
    instance: Instance, agent: Agent, settings: Any
) -> None:
    settings.DSTACKWEB_LOST_AFTER_S = 600
    agent.join()
    Instance.objects.update(holder=None, idle_until=timezone.now() + dt.timedelta(hours=1))
    answer = agent.next().json()
    assert answer["do"] == "wait"
    assert 3600 < answer["alone_s"] < 3700
    Instance.objects.update(idle_until=timezone.now() + dt.timedelta(minutes=1))
    assert agent.next().json()["alone_s"] == 660


def test_an_interruption_is_stored_once_and_no_job_starts_after_it(instance: Instance, agent: Agent) -> None:
    agent.join()
    answer = agent.next(interruption={"at": NOTICE.isoformat()})
    assert answer.json()["do"] == "wait"
    agent.next(interruption={"at": (NOTICE + dt.timedelta(minutes=1)).isoformat()})
    instance.refresh_from_db()
    assert instance.interrupted_at == NOTICE


@pytest.mark.parametrize("at", ["9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"])
def test_the_time_of_an_interruption_out_of_range_is_clamped(instance: Instance, agent: Agent, at: str) -> None:
    agent.join()
    assert agent.next(interruption={"at": at}).status_code == 200
    instance.refresh_from_db()
    assert instance.interrupted_at is not None
    assert abs(instance.interrupted_at - timezone.now()) < dt.timedelta(days=2)


def test_an_instance_with_too_few_gpus_fails_its_job_and_gets_no_other(instance: Instance, agent: Agent) -> None:
    Instance.objects.update(gpu_count=8, instance_type="p5.48xlarge")
    agent.join(gpus=["GPU-1"])
    assert agent.next().json()["do"] == "off"
    job = job_of(instance)
    assert job.termination_reason == "executor_error"
    assert "p5.48xlarge shows 1 of its 8 GPUs" in statuses.message(job.detail, job.message)
    instance.refresh_from_db()
    assert (instance.status, instance.why) == ("stopping", "no_gpus")


def test_a_job_whose_instance_installs_an_engine_has_the_time_for_it(instance: Instance, agent: Agent) -> None:
    agent.join()
    as_if(Job.objects.all(), status_s=1000)
    job = str(job_of(instance).pk)
    assert agent.next(engine={"job": job}).json()["do"] == "run"
    found = Job.objects.timed().get(pk=job)
    assert (found.status_s, statuses.message(found.detail, "")) == (0, "Docker is being installed on its instance")


def test_a_job_whose_instance_has_no_engine_fails_with_the_installers_words(instance: Instance, agent: Agent) -> None:
    agent.join()
    job = str(job_of(instance).pk)
    failed = {"job": job, "fault": "install_failed", "text": "E: no such package\0"}
    assert agent.next(engine=failed | {"job": str(uuid4())}).json()["do"] == "run"
    assert agent.next(engine=failed).json()["do"] == "wait"
    found = job_of(instance)
    assert (found.status, found.termination_reason) == ("failed", "creating_container_error")
    assert statuses.message(found.detail, found.message) == (
        "Docker could not be installed on its instance. Use a machine image that has it. E: no such package?"
    )
    assert agent.next(engine=failed).json()["do"] in ("wait", "off")


def test_the_error_of_a_runner_that_does_not_start_is_stored_on_the_job(instance: Instance, agent: Agent) -> None:
    agent.join()
    agent.next(error="no space left on device\0")
    assert job_of(instance).message == "no space left on device?"


def test_a_claimed_job_without_runner_and_files_ends_after_a_grace(instance: Instance, agent: Agent) -> None:
    agent.join()
    job = job_of(instance)
    attempts.claim_job(job.pk, "runner", "there")
    as_if(Job.objects.all(), silent_s=61)
    assert agent.next(left=True).json()["do"] == "run"
    assert agent.next(job=str(job.pk)).json()["do"] == "wait"
    assert job_of(instance).status == JobStatus.PROVISIONING
    assert agent.next().json()["do"] == "wait"
    assert job_of(instance).termination_reason == "instance_unreachable"


def test_a_job_of_another_instance_is_never_handed_out(instance: Instance, agent: Agent) -> None:
    agent.join()
    Job.objects.update(instance=None)
    assert agent.next().json()["do"] == "wait"


def test_invalid_reports_of_an_agent_are_refused(instance: Instance, agent: Agent) -> None:
    agent.join()
    assert agent.next(interruption={"at": "2026-11-21T12:00:00"}).status_code == 422
    assert agent.join(gpus=["<script>"]).status_code == 422
    Job.objects.update(instance=None)
    Instance.objects.all().delete()
    assert agent.next().status_code == 404
