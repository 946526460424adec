"""Placement on a backend whose offers come from sources: a pass takes what is known and never waits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from django.db import connections

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import Availability, Offer
from dstackweb.backends.models import Backend
from dstackweb.lib.models import Lease
from dstackweb.offers import sources
from dstackweb.runs.models import Job, Run
from dstackweb.runs.selectors import why
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
