"""Machines that EC2 really starts and ends, as a backend's code sees them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from dstackweb.backends.aws import ami, config
from dstackweb.backends.aws.backend import AwsBackend
from dstackweb.backends.contract import Machine, MachineOrder, MachineState
from dstackweb.backends.models import Backend
from tests.backends.aws.conftest import REGION
from tests.cloud import Cloud
from tests.cloud.test_cloud import eventually

DEPLOYMENT = "d" * 20
SCRIPT = "#!/bin/sh\nsleep 300\n"


@pytest.fixture(autouse=True)
def nothing_known_of_images() -> None:
    ami.forget()


@pytest.fixture
def code(backend: Backend) -> AwsBackend:
    return AwsBackend(backend)


def configured(backend: Backend, **more: Any) -> AwsBackend:
    """The backend's code under a changed configuration."""
    config.read({**backend.config, **more})
    backend.config = {**backend.config, **more}
    backend.version += 1
    backend.save()
    return AwsBackend(backend)


def order(**more: Any) -> MachineOrder:
    said = {"region": REGION, "instance_type": "t3.small", "spot": False, "user_data": SCRIPT}
    return MachineOrder(**{"instance": str(uuid.uuid4()), "deployment": DEPLOYMENT, **said, **more})


def seen(code: AwsBackend, cloud_id: str) -> Machine:
    return next(each for each in code.machines(REGION, DEPLOYMENT) if each.cloud_id == cloud_id)


def until(code: AwsBackend, cloud_id: str, state: MachineState) -> Machine:
    eventually(lambda: seen(code, cloud_id).state == state, 5)
    return seen(code, cloud_id)


def test_a_machine_starts_runs_and_ends(code: AwsBackend, cloud: Cloud) -> None:
    wanted = order(project="main", run="train-1")
    started = code.launch(wanted)
    assert (started.instance, started.region, started.state) == (wanted.instance, REGION, MachineState.STARTING)
    assert started.launched_at is not None
    assert started.zone.startswith(REGION)
    running = until(code, started.cloud_id, MachineState.RUNNING)
    assert (running.instance, running.why, running.launched_at) == (wanted.instance, "", started.launched_at)
    code.terminate(REGION, [started.cloud_id])
    gone = until(code, started.cloud_id, MachineState.GONE)
    assert (gone.why, gone.instance) == ("cloud", wanted.instance)
    assert "User initiated" in gone.text
