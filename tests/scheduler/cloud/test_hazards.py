"""Failures that would cost money or lose a run: orphans, slow clouds, answers of another account."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dstackweb.accounts.models import Project, User
from dstackweb.backends.contract import CloudInstance, InstanceState
from dstackweb.backends.models import Backend, Instance
from dstackweb.lib.models import Watch
from dstackweb.runs import attempts
from dstackweb.runs.models import Job
from dstackweb.runs.states import JobStatus, Reason, RunStatus
from dstackweb.scheduler import watch
from dstackweb.scheduler.cloud import instances, watch as cloud_watch
from tests.factories import place_all
from tests.runs.test_selectors import plan
from tests.scheduler.cloud.cloud_fake import FakeCloud, begin, job_of, running
from tests.scheduler.cloud.test_watch import done, fake, fresh, paid, the_machine

__all__ = ["fake"]

pytestmark = pytest.mark.django_db


@pytest.mark.slow
def test_an_instance_with_heartbeats_is_alive_even_if_the_cloud_does_not_list_it(
    project: Project, member: User, fake: FakeCloud
) -> None:
    """The answer may be that of another account, whose credentials were set meanwhile."""
    run = paid(project, member)
    running(run, fake)
    fake.there.clear()
    for _ in range(20):
        Instance.objects.update(heartbeats=the_machine().heartbeats + 1)
        fake.tick(30)
    assert (the_machine().status, fresh(run).status) == ("running", RunStatus.RUNNING)
    fake.tick(120)
    assert (the_machine().status, fresh(run).status) == ("gone", RunStatus.FAILED)


def test_orphans_of_a_deleted_backend_or_an_unused_region_are_ended_too(
    project: Project, member: User, fake: FakeCloud
) -> None:
    done(running(paid(project, member, idle_duration="off"), fake))
    fake.tick(20)
    fake.settle()
    assert the_machine().status == "gone"
    long_ago = fake.now - dt.timedelta(minutes=11)
    fake.there["i-lost"] = CloudInstance(str(uuid4()), "i-lost", "eu", InstanceState.RUNNING, launched_at=long_ago)
    fake.regions = ["us"]
    Backend.objects.update(deleted_at=fake.now, enabled=False)
    fake.terminated.clear()
    assert instances.has_cloud_backends()
    cloud_watch.end_orphans()
    assert fake.terminated == ["i-lost"]
    fake.now += dt.timedelta(days=2)
    assert not instances.has_cloud_backends()


def test_slow_regions_do_not_starve_others(
    project: Project, member: User, fake: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.regions = [f"region-{n}" for n in range(20)]
    seen: set[str] = set()

    def slow(backend: Backend, region: str) -> None:
        seen.add(region)
        fake.monotonic += 20

    monkeypatch.setattr(cloud_watch, "poll_region", slow)
    cloud_watch.end_orphans()
    assert len(seen) < 5
    for _ in range(100):
        cloud_watch.end_orphans()
    assert len(seen) == 20


def test_slow_launches_do_not_delay_terminations(project: Project, member: User, fake: FakeCloud) -> None:
    done(running(paid(project, member, idle_duration="off"), fake))
    for _ in range(5):
        paid(project, member)
    place_all()
    fake.before = lambda: setattr(fake, "monotonic", fake.monotonic + 20)
    fake.tick(10)
    assert fake.terminated == ["i-0"]


@pytest.mark.slow
def test_a_runner_that_claims_a_job_and_never_starts_it_is_ordered_to_stop(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member)
    begin(fake)
    attempts.claim_job(job_of(run).pk, "n", "there")
    for _ in range(25):
        Instance.objects.update(heartbeats=the_machine().heartbeats + 1)
        Job.objects.update(heard_at_s=Watch.now_s())
        fake.tick(15)
    assert (job_of(run).status, job_of(run).stop_reason) == (JobStatus.TERMINATING, Reason.NO_CAPACITY)


@pytest.mark.slow
def test_a_runner_that_waits_for_another_nodes_instance_is_not_late(
    project: Project, member: User, fake: FakeCloud
) -> None:
    run = paid(project, member, nodes=2)
    begin(fake)
    first, second = Job.objects.filter(run=run).order_by("node")
    attempts.claim_job(first.pk, "n", "there")
    Instance.objects.filter(pk=second.instance_id).update(status="starting", ready_at=None)
    for _ in range(25):
        Instance.objects.update(heartbeats=fake.monotonic)
        fake.tick(15)
    assert Job.objects.get(pk=first.pk).status == JobStatus.PROVISIONING
    Instance.objects.filter(pk=second.instance_id).update(status="running", ready_at=fake.now, status_s=0)
    attempts.claim_job(second.pk, "m", "there")
    fake.tick(30)
    assert Job.objects.get(pk=first.pk).status == JobStatus.PROVISIONING


def test_an_instance_without_heartbeats_is_not_reused(project: Project, member: User, fake: FakeCloud) -> None:
    done(running(paid(project, member, idle_duration="10m"), fake))
    fake.tick(5)
    idle = the_machine()
    fake.tick(90)
    again = paid(project, member)
    place_all()
    assert job_of(again).instance != idle


def test_frequent_queries_do_not_scan_past_instances_and_jobs(project: Project, member: User, fake: FakeCloud) -> None:
    """Rows of machines are kept as long as their jobs'; SQLite's plans say what would look at all of them."""
    running(paid(project, member), fake)
    paid(project, member)
    place_all()
    asked: dict[str, Callable[[], object]] = {
        "whether there is work": instances.has_work,
        "clouds": cloud_watch.poll_all,
        "watch": watch.watch,
        "orphans": cloud_watch.end_orphans,
        "pass": lambda: (paid(project, member), place_all()),
    }
    for what, ask in asked.items():
        with CaptureQueriesContext(connection) as queries:
            ask()
        for query in queries if connection.vendor == "sqlite" else ():
            scans = re.findall(r"SCAN (?:runs_run|runs_job|runs_runevent|backends_instance)\b.*", plan(query["sql"]))
            assert all("instance_there" in scan for scan in scans), (what, query["sql"])
