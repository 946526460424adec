from __future__ import annotations

import uuid

import pytest
from django.core.management import CommandError, call_command

from dstackweb.backends.models import Host
from dstackweb.runs.models import Allocation, Run
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Run:
    project = make_project()
    make_host(gpus=1)
    run = make_run(project, join(project, make_user()), resources={"gpu": 1})
    place_all()
    start(placed_job(run))
    return run


def test_a_run_on_a_machine_that_is_gone_is_given_up_and_its_gpus_are_free(run: Run) -> None:
    Host.objects.update(silent_s=1e6)
    call_command("give_up", str(run.uid))
    run.refresh_from_db()
    assert run.status == "failed"
    assert not Allocation.objects.exists()
    with pytest.raises(CommandError, match="it has no active job"):
        call_command("give_up", str(run.uid))


def test_a_run_on_a_living_machine_is_not_given_up(run: Run) -> None:
    with pytest.raises(CommandError, match="is online, so the job may still use its GPUs"):
        call_command("give_up", str(run.uid))
    assert Allocation.objects.count() == 2


def test_an_unknown_run_is_named() -> None:
    with pytest.raises(CommandError, match="no run with id"):
        call_command("give_up", str(uuid.uuid4()))
