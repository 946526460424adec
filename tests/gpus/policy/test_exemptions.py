from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.exemptions import exempt, policies_of
from dstackweb.gpus.models import PolicyExemption, ProjectPolicies
from dstackweb.lib.errors import Conflict, DomainError, Forbidden, Invalid
from dstackweb.runs.models import QueueCount, Run
from dstackweb.wording.events import event_text
from tests.factories import join, make_user
from tests.gpus.watching import IDLE, begin, stopped

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(project: Project, member: User) -> Run:
    return Run.objects.get(pk=begin(project, member, utilization_policy=IDLE).run_id)


def test_the_owner_keeps_a_run_with_a_reason_that_all_members_see(project: Project, run: Run, member: User) -> None:
    version = QueueCount.objects.get(queue=run.queue).version
    made = exempt(run, member, "member", "  it  loads\ndata ")
    assert (made.by, made.reason) == (member, "it loads data")
    assert made.until - made.at == dt.timedelta(minutes=30)
    event = run.events.get(kind="utilization_kept")
    assert (event.actor, event.data["left"], event.data["minutes"]) == (member, 2, 30)
    assert "it loads data" in event_text(event, 1)
    assert QueueCount.objects.get(queue=run.queue).version > version


@pytest.mark.parametrize("reason", ["a\0b", "a\ud800b"])
def test_a_reason_that_no_database_holds_is_refused(run: Run, member: User, reason: str) -> None:
    with pytest.raises(Invalid, match="can't contain") as refused:
        exempt(run, member, "member", reason)
    assert refused.value.errors[0]["loc"] == ["reason"]
    assert not PolicyExemption.objects.exists()


def test_keeping_again_adds_to_the_time(run: Run, member: User) -> None:
    first = exempt(run, member, "member", "one")
    assert exempt(run, member, "member", "two").until == first.until + dt.timedelta(minutes=30)


def test_an_expired_keep_adds_nothing_to_a_new_one(run: Run, member: User) -> None:
    exempt(run, member, "member", "one")
    PolicyExemption.objects.update(until=timezone.now() - dt.timedelta(hours=1))
    made = exempt(run, member, "member", "two")
    assert made.until - made.at == dt.timedelta(minutes=30)


def test_the_number_of_keeps_per_run_is_limited(project: Project, run: Run, member: User) -> None:
    ProjectPolicies.objects.create(project=project, max_exemptions=2, exemption_minutes=10)
    for _ in range(2):
        exempt(run, member, "member", "why")
    with pytest.raises(Conflict, match="kept 2 times already"):
        exempt(run, member, "manager", "why")
    assert PolicyExemption.objects.count() == 2


@pytest.mark.parametrize(
    ("role", "own", "allowed"),
    [("member", True, True), ("member", False, False), ("manager", False, True), ("viewer", True, False)],
)
def test_only_the_owner_or_a_manager_may(
    project: Project, run: Run, member: User, role: str, own: bool, allowed: bool
) -> None:
    who = member if own else join(project, make_user("eve"), role)
    if allowed:
        assert exempt(run, who, role, "why").by == who
    else:
        with pytest.raises(Forbidden, match="belongs to ada"):
            exempt(run, who, role, "why")


@pytest.mark.parametrize(
    ("reason", "minutes", "role", "loc"),
    [
        ("  ", None, "member", "reason"),
        ("x" * 201, None, "member", "reason"),
        ("why", 0, "member", "minutes"),
        ("why", 31, "member", "minutes"),
        ("why", 24 * 60 + 1, "manager", "minutes"),
    ],
)
def test_an_invalid_keep_is_refused_with_its_location(
    run: Run, member: User, reason: str, minutes: int | None, role: str, loc: str
) -> None:
    with pytest.raises(Invalid) as raised:
        exempt(run, member, role, reason, minutes=minutes)
    assert raised.value.errors[0]["loc"] == [loc]
    assert not PolicyExemption.objects.exists()


def test_managers_may_keep_a_run_longer_and_all_may_keep_it_shorter(run: Run, member: User) -> None:
    assert exempt(run, member, "member", "why", minutes=5).until - timezone.now() <= dt.timedelta(minutes=5)
    made = exempt(run, member, "manager", "why", minutes=600)
    assert made.until - made.at > dt.timedelta(minutes=600)


@pytest.mark.parametrize("keys", [{}, {"utilization_policy": {**IDLE, "action": "notify"}}])
def test_a_run_that_no_policy_would_stop_cannot_be_kept(project: Project, member: User, keys: dict[str, Any]) -> None:
    job = begin(project, member, **keys)
    with pytest.raises(Conflict, match=r"no policy would stop it|would not be stopped"):
        exempt(job.run, member, "member", "why")


def test_runs_cannot_be_kept_where_policies_only_observe(project: Project, run: Run, member: User) -> None:
    ProjectPolicies.objects.create(project=project, observe_only=True)
    with pytest.raises(Conflict, match="would not be stopped"):
        exempt(run, member, "member", "why")


def test_an_ended_run_cannot_be_kept(run: Run, member: User) -> None:
    stopped(run)
    with pytest.raises(DomainError, match="is done"):
        exempt(run, member, "member", "why")


def test_a_project_without_settings_has_the_defaults(project: Project) -> None:
    found = policies_of(project)
    assert (found.observe_only, found.max_exemptions, found.exemption_minutes) == (False, 3, 30)
    assert not ProjectPolicies.objects.exists()
