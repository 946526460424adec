"""Backends at which all jobs belong to one user, as on a cluster: only the projects that its admin named use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.backends import registry
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import Job
from dstackweb.runs.selectors import why
from dstackweb.scheduler.cloud.instances import _other_offer
from dstackweb.scheduler.passes.decision import decide_now
from dstackweb.wording.waiting import reason
from tests.factories import join, make_project, make_run, make_user, place_all
from tests.scheduler.passes.backend_offers_stub import StubMarket, offer

pytestmark = pytest.mark.django_db
NAMED: dict[str, Any] = {"backends": ["cluster"], "resources": {"gpu": 1}}


def cluster(monkeypatch: pytest.MonkeyPatch, *projects: str) -> None:
    market = StubMarket(monkeypatch)
    market.has("cluster", offer(backend="cluster"), offer("2.0", backend="cluster", region="us"))
    monkeypatch.setattr(registry.KINDS["aws"], "projects", lambda config: projects, raising=False)


def test_a_run_of_a_project_that_is_not_named_gets_nothing_there(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job could read those of the projects that are."""
    other = make_project("others")
    cluster(monkeypatch, other.name)
    run = make_run(project, member, **NAMED)
    assert place_all() == 0
    code, data = why(run)
    assert code == WaitReason.BACKEND_UNAVAILABLE
    assert reason(code, data).text == "these backends take no runs of its project: cluster"
    assert [one.code for one in decide_now(run).candidates] == ["other_project"]
    allowed = make_run(other, join(other, member), **NAMED)
    assert place_all() == 1
    assert Job.objects.get().run == allowed


@pytest.mark.parametrize(
    ("shared_with", "least", "placed"),
    [((), "project", 1), ((), "sandbox", 0), (("others",), "user", 1), (("others",), "project", 0)],
)
def test_what_a_project_requires_holds_there_too(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch, shared_with: Sequence[str], least: str, placed: int
) -> None:
    cluster(monkeypatch, project.name, *shared_with)
    Project.objects.update(least_isolation=least)
    run = make_run(project, member, **NAMED)
    assert place_all() == placed
    if not placed:
        assert "less than its project requires" in reason(*why(run)).text


def test_the_next_offer_after_a_refusal_keeps_to_it(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, project.name)
    make_run(project, member, **NAMED)
    assert place_all() == 1
    job = Job.objects.select_related("backend").get()
    assert _other_offer(job) is not None
    monkeypatch.setattr(registry.KINDS["aws"], "projects", lambda config: ("others",), raising=False)
    assert _other_offer(job) is None


def test_pages_say_who_shares_a_user(project: Project, monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    cluster(monkeypatch, project.name, "others")
    client.force_login(make_user("root", is_superuser=True))
    health = client.get(f"/p/{project.name}/health/").content.decode()
    assert f"Jobs of {project.name}, others have one user there" in health
    assert "with those of others (on cluster)" in client.get(f"/p/{project.name}/secrets/").content.decode()
