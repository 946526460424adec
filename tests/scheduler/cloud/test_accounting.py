"""What an engine's accounting says of ended instances, and what it waits for before it starts them."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.backends import registry
from dstackweb.backends.contract import InstanceUsage, SourceFailed
from dstackweb.backends.models import Instance
from dstackweb.runs import services
from dstackweb.runs.attempts import end_job
from dstackweb.runs.models import Run
from dstackweb.runs.states import Reason
from dstackweb.scheduler.cloud import instances, watch as cloud_watch
from tests.api.conftest import Api
from tests.backends.kinds import use_driver
from tests.factories import make_run, place_all
from tests.scheduler.cloud.cloud_fake import THROTTLED, FakeCloud, job_of, joined, running

pytestmark = pytest.mark.django_db
USED = InstanceUsage(elapsed_s=3600, cpu_reserved_s=28800, cpu_used_s=10800.0, memory_peak_mib=11264)


class Accounts:
    """`answer` is what the engine says when it is asked for these instances, or raises."""

    def __init__(self) -> None:
        self.answer: Mapping[str, InstanceUsage] | SourceFailed | None = {}
        self.asked: list[list[str]] = []

    def say(self, cloud_ids: Sequence[str]) -> Mapping[str, InstanceUsage] | None:
        self.asked.append(list(cloud_ids))
        if isinstance(self.answer, SourceFailed):
            raise self.answer
        return self.answer


@pytest.fixture
def fake(db: None, monkeypatch: pytest.MonkeyPatch) -> FakeCloud:
    return FakeCloud(monkeypatch)


@pytest.fixture
def accounts(fake: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> Accounts:
    books = Accounts()

    class Driver(registry.KINDS["aws"].driver_class):
        def accounting(self, region: str, cloud_ids: Sequence[str]) -> Mapping[str, InstanceUsage] | None:
            assert region == "eu"
            return books.say(cloud_ids)

    use_driver(monkeypatch, "aws", Driver)
    return books


def over(project: Project, member: User, fake: FakeCloud) -> Run:
    """A run whose instance is confirmed gone."""
    run = make_run(project, member, backends=["aws"], idle_duration="off")
    end_job(running(run, fake).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    fake.tick(10)
    fake.settle()
    assert Instance.objects.get().status == "gone"
    return run


def from_api(member: User, run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Api(member)("GET", f"projects/main/runs/{run.name}").content)
    return found


def test_accounting_is_asked_until_it_knows(
    project: Project, member: User, fake: FakeCloud, accounts: Accounts
) -> None:
    over(project, member, fake)
    assert accounts.asked
    assert Instance.objects.get().usage is None, "it lags"
    assert instances.has_work()
    accounts.answer = {"i-0": USED, "i-77": InstanceUsage(elapsed_s=1)}
    fake.tick(35)
    known = {"elapsed_s": 3600, "cpu_reserved_s": 28800, "cpu_used_s": 10800.0, "memory_peak_mib": 11264}
    assert Instance.objects.get().usage == known
    asked = len(accounts.asked)
    assert not instances.has_work()
    fake.tick(90)
    assert len(accounts.asked) == asked
    assert set(map(tuple, accounts.asked)) == {("i-0",)}


@pytest.mark.slow
def test_what_accounting_does_not_say_in_time_stays_unknown(
    project: Project, member: User, fake: FakeCloud, accounts: Accounts
) -> None:
    accounts.answer = THROTTLED
    over(project, member, fake)
    fake.tick(instances.USAGE_ASKED_FOR.total_seconds(), step_s=30)
    asked = len(accounts.asked)
    assert 5 <= asked <= 21
    assert Instance.objects.get().usage is None
    assert not instances.has_work()
    fake.tick(90)
    assert len(accounts.asked) == asked


def test_an_engine_without_accounting_is_asked_once(
    project: Project, member: User, fake: FakeCloud, accounts: Accounts
) -> None:
    accounts.answer = None
    over(project, member, fake)
    fake.tick(90)
    assert (Instance.objects.get().usage, len(accounts.asked)) == ({}, 1)


def test_the_runs_page_and_the_api_show_what_it_used_and_the_page_waits_for_it(
    project: Project, member: User, fake: FakeCloud, accounts: Accounts, client: Client
) -> None:
    run = over(project, member, fake)
    client.force_login(member)
    address = f"/p/main/runs/{run.name}/"
    page = client.get(address).content.decode()
    assert "run-over" not in page
    assert "CPU-h" not in page
    [job] = from_api(member, run)["jobs"]
    assert job["accounting"] is None
    accounts.answer = {"i-0": USED}
    fake.tick(35)
    page = client.get(address).content.decode()
    assert "used 3 CPU-h of 8 CPU-h reserved, at most 11 GB" in page
    assert "run-over" in page
    [job] = from_api(member, run)["jobs"]
    assert job["accounting"] == {
        "elapsed_s": 3600, "cpu_reserved_s": 28800, "cpu_used_s": 10800.0, "memory_peak_mib": 11264,
        "billed_h": None, "energy_j": None, "detail": "used 3 CPU-h of 8 CPU-h reserved, at most 11 GB",
    }  # fmt: skip


def test_the_run_page_does_not_wait_longer_than_accounting_is_asked(
    project: Project, member: User, fake: FakeCloud, accounts: Accounts
) -> None:
    run = Run.objects.get(pk=over(project, member, fake).pk)
    assert instances.awaits_usage(run, fake.now)
    assert not instances.awaits_usage(run, fake.now + instances.USAGE_ASKED_FOR)
    assert not instances.awaits_usage(run, fake.now + dt.timedelta(days=1))


def pending(project: Project, member: User, fake: FakeCloud, waits: str = "Resources") -> Run:
    """A run whose engine has accepted its instance, and keeps it waiting."""
    run = make_run(project, member, backends=["aws"])
    assert place_all()
    cloud_watch.poll_all()
    fake.set("i-0", waits=waits)
    fake.tick(35)
    return run


def test_what_the_engine_waits_for_is_shown_until_it_starts(
    project: Project, member: User, fake: FakeCloud, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pending(project, member, fake)
    assert job_of(run).detail == {"code": "engine_waits", "kind": "aws", "waits_for": "Resources"}
    client.force_login(member)
    monkeypatch.setattr(registry.KINDS["aws"], "wait_reason", lambda code: f"words for {code}", raising=False)
    address = f"/p/main/runs/{run.name}/"
    for page in (address, f"{address}why/"):
        assert "words for Resources" in client.get(page).content.decode()
    fake.set("i-0", waits="Priority")
    fake.tick(35)
    assert "words for Priority" in from_api(member, run)["status_message"]
    joined()
    assert job_of(run).detail == {}
    fake.tick(35)
    assert job_of(run).detail == {}, "the engine's answer may be older than the agent's call"


def test_an_engine_that_starts_it_is_no_longer_waited_for(project: Project, member: User, fake: FakeCloud) -> None:
    run = pending(project, member, fake)
    fake.set("i-0", waits="")
    fake.tick(35)
    assert job_of(run).detail == {}


def test_a_run_stopped_while_its_engine_waits_says_only_that_it_was_stopped(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = pending(project, member, fake)
    services.stop(run, member, "member")
    ended = job_of(run)
    assert (ended.status, ended.detail, ended.message) == ("terminated", {}, "")
