from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from django.utils import timezone
from pytest_django import Settings

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.models import GpuSample, HostSampling
from dstackweb.gpus.window import PolicyAction
from dstackweb.lib.times import to_ms
from dstackweb.runner import nvml
from dstackweb.runner.nvml import Snapshot
from dstackweb.runs.models import Job
from dstackweb.scheduler import hosts, utilization
from dstackweb.scheduler.processes import tasks
from tests.factories import make_host, make_run, place_all, start
from tests.gpus.snapshots import snapshot

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def home(settings: Settings, tmp_path: Path) -> None:
    settings.DSTACKWEB_HOME = tmp_path


def seen(monkeypatch: pytest.MonkeyPatch, found: Snapshot) -> None:
    monkeypatch.setattr(nvml, "read", lambda: found)


def test_a_hosts_gpus_are_sampled(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    make_host(gpus=2)
    seen(monkeypatch, snapshot(g0=10, g1=20))
    hosts.sample_gpus("box-1")
    assert sorted(GpuSample.objects.values_list("utilization", flat=True)) == [10, 20]


def test_a_sample_that_a_slow_driver_took_before_a_job_began_is_not_the_jobs(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host(gpus=1)
    make_run(project, member, resources={"gpu": 1})
    assert place_all() == 1
    began = timezone.now()

    def slow() -> Snapshot:
        start(Job.objects.get())
        return snapshot(g0=0)

    monkeypatch.setattr(nvml, "read", slow)
    hosts.sample_gpus("box-1")
    sample = GpuSample.objects.select_related("series").get()
    assert sample.series.job is None
    assert sample.at_ms <= to_ms(Job.objects.get().started_at or began)


def test_an_unknown_host_is_not_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "read", lambda: pytest.fail("looked"))
    hosts.sample_gpus("box-1")


def test_while_one_worker_hangs_in_the_driver_others_do_not_poll(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host(gpus=1)
    looks = 0

    def hangs() -> Snapshot:
        nonlocal looks
        looks += 1
        hosts.sample_gpus("box-1")  # another worker's, meanwhile
        return snapshot(g0=10)

    monkeypatch.setattr(nvml, "read", hangs)
    hosts.sample_gpus("box-1")
    assert looks == 1
    assert HostSampling.objects.count() == GpuSample.objects.count() == 1


def test_a_failure_for_one_job_does_not_affect_the_others(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host(gpus=2)
    policy = {"min_gpu_utilization": 50, "time_window": "1m"}
    for _ in range(2):
        make_run(project, member, resources={"gpu": 1}, utilization_policy=policy)
    assert place_all() == 2
    for job in Job.objects.all():
        start(job)
    began, asked = timezone.now(), []

    def act(job: Job, now: dt.datetime) -> PolicyAction:
        asked.append(job.pk)
        if len(asked) == 1:
            raise RuntimeError("no")
        return PolicyAction.STOP

    monkeypatch.setattr(utilization, "apply_policy", act)
    seen(monkeypatch, snapshot(g0=0, g1=0))
    for step in range(8):
        moment = began + dt.timedelta(seconds=1 + 10 * step)
        monkeypatch.setattr(timezone, "now", lambda moment=moment: moment)
        hosts.sample_gpus("box-1")
        if done := utilization.judge_jobs(moment):
            break
    assert step == 6
    assert done == {asked[1]: PolicyAction.STOP}
    assert sorted(asked) == sorted(Job.objects.values_list("pk", flat=True))


def test_every_server_samples_its_own_machine_each_interval_and_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DSTACKWEB_SAMPLE_EVERY_S = 7
    settings.DSTACKWEB_HOST_NAME = "box-1"
    job = next(job for job in tasks.host_jobs("box-1") if job.name == "gpus:box-1")
    assert (job.every_s, job.cluster) == (7, settings.DSTACKWEB_CLUSTERS["control"])
    sampled: list[str] = []
    monkeypatch.setattr(hosts, "sample_gpus", sampled.append)
    tasks.tick("gpus:box-1", timezone.now().timestamp())
    assert sampled == ["box-1"]
    # A task of another server's machine that got here does nothing, and says so.
    tasks.tick("gpus:box-2", timezone.now().timestamp())
    assert sampled == ["box-1"]
    assert "this is host box-1; nothing was done" in caplog.text
