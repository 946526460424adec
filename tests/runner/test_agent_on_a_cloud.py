"""User data on the machines of a cloud: from the first boot to the agent, the job, and the machine's end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from dstackweb.backends.models import Instance, InstanceStatus
from dstackweb.backends.user_data import user_data
from dstackweb.runner.pyz import pyz
from dstackweb.runs.models import Job
from dstackweb.scheduler.cloud.agents import join_token
from standins.aws import Cloud
from tests.factories import cloud_job, join, make_project, make_run, make_user
from tests.runner.machines import processes_of, short_waits
from tests.standins.fixtures import cloud
from tests.support import eventually

__all__ = ["cloud"]
pytestmark = pytest.mark.django_db(transaction=True)
AGAIN = "    sleep 5\n  done\n"
"""The wait before the agent is started again, which the tests shorten."""
SPOT = {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time"}}


@pytest.fixture
def server(cloud: Cloud, live_server: Any, settings: Any) -> Iterator[str]:
    settings.DSTACKWEB_API_URL = live_server.url
    settings.DSTACKWEB_HEARTBEAT_S = 0.3
    with short_waits():
        yield live_server.url
    cloud.reset()
    connections.close_all()


def place(*commands: str, image: str | None = None, **instance: Any) -> Job:
    project = make_project("main")
    keys = {"image": image} if image else {}
    return cloud_job(make_run(project, join(project, make_user()), commands=list(commands), **keys), **instance)


def instance_of(job: Job) -> Instance:
    return Instance.objects.get(jobs=job)


def boot(cloud: Cloud, job: Job, url: str, *, path: str = "", **more: Any) -> str:
    """Start a machine with the job's user data; the cloud's ID for it. `path` replaces this machine's programs."""
    instance = instance_of(job).pk
    script = user_data(
        api_url=url, instance=str(instance), join_token=join_token(instance)[0], pyz_sha256=pyz()[1], insecure=False
    )
    assert script.count(AGAIN) == 1
    script = script.replace(AGAIN, "    sleep 0.2\n  done\n")
    if path:
        script = script.replace("\n", f'\nPATH="${{PATH%%:*}}:{path}"\n', 1)
    asked = {"ImageId": cloud.image(), "InstanceType": "m7i.large", "MinCount": 1, "MaxCount": 1} | more
    started = cloud.client("ec2").run_instances(UserData=script, InstanceInitiatedShutdownBehavior="terminate", **asked)
    return str(started["Instances"][0]["InstanceId"])


def test_an_instance_boots_runs_its_job_and_terminates_when_unneeded(cloud: Cloud, server: str) -> None:
    job = place("echo hello > greeting")
    cloud_id = boot(cloud, job, server)
    eventually(lambda: Job.objects.get(pk=job.pk).status == "done")
    machine = cloud.machine(cloud_id)
    assert machine["exit"] == 0
    home = Path(machine["folder"]) / "root/.dstackweb" / str(instance_of(job).pk)
    run_dir = home / "runs" / str(job.run.uid) / "node-0"
    assert (run_dir / "greeting").read_text() == "hello\n"
    assert instance_of(job).status == InstanceStatus.RUNNING
    Instance.objects.update(status=InstanceStatus.STOPPING)
    eventually(lambda: cloud.machine(cloud_id)["state"] == "terminated")
    said = cloud.machine(cloud_id)["console"]
    assert "joined with 0 GPUs" in said
    assert "powering off" in said


def test_a_job_has_the_gpus_of_its_machine(cloud: Cloud, server: str) -> None:
    job = place("true", gpu_count=4)
    cloud_id = boot(cloud, job, server, InstanceType="g5.12xlarge")
    eventually(lambda: Job.objects.get(pk=job.pk).status == "done")
    assert Job.objects.get(pk=job.pk).gpus == [f"GPU-{cloud_id}-{number}" for number in range(4)]


def test_a_dead_agent_is_restarted(cloud: Cloud, server: str) -> None:
    job = place("until [ -e go ]; do sleep 0.05; done")
    cloud_id = boot(cloud, job, server)
    eventually(lambda: Job.objects.get(pk=job.pk).status == "running")
    kill_agent(str(instance_of(job).pk))
    beat = instance_of(job).heartbeats
    eventually(lambda: "starting it again" in cloud.machine(cloud_id)["console"])
    eventually(lambda: instance_of(job).heartbeats > beat + 2)
    assert Job.objects.get(pk=job.pk).status == "running"


@pytest.mark.slow
def test_an_interruption_is_reported_at_once(cloud: Cloud, server: str) -> None:
    job = place("sleep 600", is_spot=True)
    cloud_id = boot(cloud, job, server, InstanceMarketOptions=SPOT)
    eventually(lambda: Job.objects.get(pk=job.pk).status == "running")
    cloud.interrupt(cloud_id, notice_s=60)
    at = eventually(lambda: instance_of(job).interrupted_at)
    assert at.timestamp() == int(cloud.machine(cloud_id)["interruption"])


def test_no_process_of_an_instance_outlives_it(cloud: Cloud, server: str) -> None:
    job = place("sleep 600")
    cloud_id = boot(cloud, job, server)
    eventually(lambda: Job.objects.get(pk=job.pk).status == "running")
    assert processes_of(job.pk)
    cloud.client("ec2").terminate_instances(InstanceIds=[cloud_id])
    eventually(lambda: cloud.machine(cloud_id)["state"] == "terminated")
    assert not processes_of(job.pk)


def kill_agent(instance: str) -> None:
    """SIGKILL to the agent of an instance, found by its arguments. Runners, its forks, have the same: it is older."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"agent" in words and instance.encode() in words:
            found.append(int(process.name))
    os.kill(min(found), signal.SIGKILL)
