"""Placement on a backend whose offers come from sources: a pass takes what is known and never waits."""

from __future__ import annotations

import datetime as dt
import threading
from pathlib import Path

import pytest
from django.db import connections
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import Availability, Offer, SourceFailed
from dstackweb.backends.models import Backend
from dstackweb.lib.models import Lease
from dstackweb.offers import sources
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import Job, Run
from dstackweb.runs.selectors import why
from dstackweb.runs.services import Submission
from dstackweb.scheduler.passes import decision
from dstackweb.scheduler.placement.hosts import Wait
from tests.factories import make_host, make_run, place_all
from tests.offers.cloud_stub import SPOT, TYPES, TYPES_US, Cloud

pytestmark = [pytest.mark.django_db]


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cloud:
    return Cloud(monkeypatch, tmp_path / "asked")


def test_a_pass_calls_no_cloud_and_uses_cached_offers(project: Project, member: User, cloud: Cloud) -> None:
    backend = Backend.objects.create(name="cloud", kind="aws")
    run = make_run(project, member, backends=["cloud"])
    assert place_all() == 0
    assert why(Run.objects.select_related("queue").get(pk=run.pk))[0] == "backend_unavailable"
    assert cloud.asked == []
    for key in sorted(cloud.says):
        sources.refresh(backend, key)
    assert place_all() == 1
    assert len(cloud.asked) == 3


@pytest.mark.django_db(transaction=True)
def test_a_pass_continues_while_a_cloud_is_slow(project: Project, member: User, cloud: Cloud) -> None:
    backend = Backend.objects.create(name="cloud", kind="aws")
    for key in (TYPES, SPOT):
        sources.refresh(backend, key)
    make_host("own", cpus=2)
    answers, asked = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        assert answers.wait(60)

    cloud.during = hang
    refresh = threading.Thread(target=_refresh, args=(backend,))
    refresh.start()
    try:
        assert asked.wait(30)
        runs = [make_run(project, member, backends=["cloud"]), make_run(project, member)]
        assert place_all() == 2
    finally:
        answers.set()
        refresh.join()
    places = [Job.objects.select_related("backend").get(run=run).backend.name for run in runs]
    assert places == ["cloud", "hosts"]
    assert cloud.asked == ["types eu", "spot eu", "types us"]


def _refresh(backend: Backend) -> None:
    sources.refresh(backend, TYPES_US)
    connections.close_all()


def test_a_pass_does_not_wait_for_a_backend_call_in_progress(
    project: Project, member: User, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    Backend.objects.create(name="cluster", kind="plain")
    cloud.answer = [Offer("cluster", "worker", 4, 8192, Availability.AVAILABLE)]
    make_run(project, member, backends=["cluster"])
    tries: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(Lease, "take", lambda name, *_: tries.append(name))
        assert place_all() == 0
    assert len(tries) == 1
    assert cloud.asked == []
    assert place_all() == 1


def half_read(cloud: Cloud) -> None:
    """A backend that is known in one region, and throttled in the other since its first call."""
    backend = Backend.objects.create(name="cloud", kind="aws")
    cloud.says[TYPES_US] = SourceFailed("throttled", until=(timezone.now() + dt.timedelta(minutes=2)).isoformat())
    for key in sorted(cloud.says):
        sources.refresh(backend, key)


def test_a_region_throttled_before_it_was_read_never_means_that_there_are_no_offers(
    project: Project, member: User, cloud: Cloud
) -> None:
    half_read(cloud)
    config = "{type: task, name: big, commands: [x], backends: [cloud], regions: [us]}"
    planned = decision.plan(project, member, "member", Submission(config))
    assert planned.waits == Wait(WaitReason.BACKEND_UNAVAILABLE, {"code": "partly_read", "backends": ["cloud"]})
    assert not planned.impossible
    there = make_run(project, member, backends=["cloud"], regions=["us"])
    elsewhere = make_run(project, member, backends=["cloud"], regions=["nowhere"])
    assert place_all() == 0
    reasons = [why(Run.objects.select_related("queue").get(pk=run.pk))[0] for run in (there, elsewhere)]
    assert reasons == ["backend_unavailable", "impossible"]
    (partly,) = [one for one in decision.decide_now(there).candidates if not one.where]
    assert (partly.backend, partly.code) == ("cloud", "partly_read")


def test_what_is_known_of_a_half_read_backend_is_used(project: Project, member: User, cloud: Cloud) -> None:
    half_read(cloud)
    make_run(project, member, backends=["cloud"])
    assert place_all() == 1
    assert Job.objects.get().region == "eu"
