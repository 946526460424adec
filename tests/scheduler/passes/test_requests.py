"""Requests for passes: many make few, and those that free something wait for nothing."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import PassRequest, PassState
from dstackweb.scheduler.passes import placement_pass
from tests.factories import make_host, make_run

pytestmark = pytest.mark.django_db


@pytest.fixture
def full(project: Project, member: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is full, and a pass has just placed nothing; the times are long enough for a busy machine."""
    monkeypatch.setattr(placement_pass, "GATHER_S", 250)
    monkeypatch.setattr(placement_pass, "LOOK_S", 50)
    make_host(cpus=1)
    make_run(project, member, "first", resources={"cpu": 1})
    assert placement_pass.run_passes() == 1
    make_run(project, member, "second", resources={"cpu": 1})
    assert placement_pass.run_passes() == 0


def generation() -> int:
    return PassState.objects.get().generation


def test_runs_added_to_a_full_queue_share_a_pass(full: None, project: Project, member: User) -> None:
    before, pauses = generation(), []

    def pause(seconds: float) -> None:
        """Meanwhile another run is submitted."""
        pauses.append(seconds)
        make_run(project, member, f"more-{len(pauses)}", resources={"cpu": 1})
        assert not PassRequest.make(urgent=False), "a pass is queued already"

    assert PassRequest.make(urgent=False), "a pass must be enqueued"
    assert placement_pass.run_requested(pause) == 0
    assert generation() == before + 1
    assert pauses == [50] * 5
    assert not PassRequest.is_waiting()


def test_what_is_freed_is_given_at_once(full: None, project: Project, member: User) -> None:
    running, pauses = project.runs.get(name="first"), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        services.stop(running, member, "member")
        PassRequest.make()

    PassRequest.make(urgent=False)
    assert placement_pass.run_requested(pause) == 1
    assert len(pauses) == 1
    assert project.runs.get(name="second").status == RunStatus.PROVISIONING


@pytest.mark.parametrize("ended_s", [-3600, 250, 6000])
def test_a_pass_long_ago_or_of_a_clock_that_was_put_back_delays_nothing(full: None, ended_s: float) -> None:
    PassState.objects.update(ended_at=timezone.now() - dt.timedelta(seconds=ended_s))
    PassRequest.make(urgent=False)
    placement_pass.run_requested(lambda seconds: pytest.fail(f"waited {seconds} s"))


def test_a_pass_with_nothing_to_place_delays_nothing(project: Project, member: User) -> None:
    make_host(cpus=4)
    assert placement_pass.run_passes() == 0
    make_run(project, member, resources={"cpu": 1})
    PassRequest.make(urgent=False)
    assert placement_pass.run_requested(lambda seconds: pytest.fail(f"waited {seconds} s")) == 1


def test_a_pass_that_placed_something_delays_nothing(project: Project, member: User) -> None:
    make_host(cpus=4)
    make_run(project, member, resources={"cpu": 1})
    assert placement_pass.run_passes() == 1
    make_run(project, member, resources={"cpu": 1})
    PassRequest.make(urgent=False)
    assert placement_pass.run_requested(lambda seconds: pytest.fail(f"waited {seconds} s")) == 1
