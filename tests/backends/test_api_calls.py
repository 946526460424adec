"""Counts of requests to clouds and clusters: added up in memory, written every few seconds, none lost."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.backends import api_calls
from dstackweb.backends.api_calls import Api
from dstackweb.backends.contract import SourceFailed
from dstackweb.backends.dask.scheduler import Scheduler
from dstackweb.backends.models import ApiCount
from dstackweb.backends.ray.dashboard import Dashboard
from dstackweb.backends.slurm.commands import Commands
from dstackweb.lib import sql
from tests.offers.cloud_stub import Clock

RUN = Api("aws", "ec2.RunInstances", "us-east-1")

pytestmark = [pytest.mark.django_db]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(monkeypatch)
    clock.now = dt.datetime(2026, 5, 4, 13, 55, tzinfo=dt.UTC)
    return clock


@pytest.mark.both_sides
def test_ten_minutes_have_a_row_and_a_day_its_hours(clock: Clock) -> None:
    for _ in range(3):
        api_calls.add(RUN, requests=1)
        api_calls.flush()
    api_calls.add(RUN, requests=1, retries=1)
    clock.pass_s(600)
    api_calls.add(RUN, throttles=1, requests=2)
    api_calls.flush()
    assert list(ApiCount.objects.order_by("at").values_list("requests", "retries", "throttles")) == [
        (4, 1, 0),
        (2, 0, 1),
    ]
    [figures] = api_calls.last_day(clock.now).values()
    assert (figures.requests, figures.by_hour[-2:]) == (6, [4, 2])
    assert api_calls.lately(clock.now)[RUN].requests == 6
    clock.pass_s(600)
    assert api_calls.lately(clock.now)[RUN].requests == 2
    clock.pass_s(23 * 3600)
    assert api_calls.last_day(clock.now)[RUN].requests == 2
    api_calls.prune(clock.now + api_calls.KEPT)
    assert not ApiCount.objects.exists()


def test_counts_that_fail_to_be_stored_are_stored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise DatabaseError("away")

    api_calls.add(RUN, requests=1)
    with monkeypatch.context() as patched:
        patched.setattr(sql, "shift", away)
        api_calls.flush()
    api_calls.add(RUN, requests=1)
    api_calls.flush()
    assert ApiCount.objects.get().requests == 2


def test_a_request_to_the_server_writes_them_a_few_seconds_later(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_calls.add(RUN, requests=1)
    client.get("/healthz")
    assert not ApiCount.objects.exists()
    monkeypatch.setattr(api_calls, "FLUSH_S", 0.0)
    client.get("/healthz")
    assert ApiCount.objects.get().requests == 1


def test_calls_of_clusters_are_counted_with_their_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (("squeue", "echo"), ("sbatch", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    Commands().run("squeue")
    failing: list[Any] = [
        lambda: Commands().run("sbatch"),
        lambda: Dashboard("http://127.0.0.1:9").call("POST", "api/jobs/u-1/stop"),
        lambda: Scheduler("tcp://127.0.0.1:9").ask("instances", list[Any]),
    ]
    for call in failing:
        with pytest.raises(SourceFailed):
            call()
    api_calls.flush()
    rows = ApiCount.objects.order_by("pk").values_list("kind", "api", "region", "requests", "failures")
    assert sorted(rows) == [
        ("dask", "instances", "tcp://127.0.0.1:9", 1, 1),
        ("ray", "POST api/jobs/ID/stop", "127.0.0.1:9", 1, 1),
        ("slurm", "sbatch", "", 1, 1),
        ("slurm", "squeue", "", 1, 0),
    ]


def test_the_health_page_lists_the_busiest_and_sums_up_the_others(
    project: Project, member: User, client: Client
) -> None:
    for number in range(30):
        api_calls.add(Api("aws", f"ec2.Describe{number}", "us-east-1"), requests=number + 1)
    api_calls.add(Api("aws", "ec2.Describe0", "us-east-1"), throttles=1)
    api_calls.flush()
    client.force_login(member)
    page = client.get("/p/main/health/").content.decode().split('id="api-requests"')[1].split("</section>")[0]
    names = [row.split('"')[0] for row in page.split('data-api="')[1:]]
    assert names[:3] == ["ec2.Describe0 us-east-1", "ec2.Describe29 us-east-1", "ec2.Describe28 us-east-1"]
    assert len(names) == 21
    assert "10 more" in page
