"""/metrics of GPUs, of how their hosts read them, and of what policies stopped."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu, Host
from dstackweb.gpus.models import GpuSeries, HostSampling, PolicyStop
from dstackweb.lib.times import to_ms
from dstackweb.scheduler.models import Retention, RetentionKind
from tests.factories import make_host, scraper
from tests.gpus.past import past_run

pytestmark = pytest.mark.django_db


def scrape() -> dict[str, float]:
    text = scraper().get("/metrics").content.decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_each_gpu_exports_its_newest_sample_with_or_without_a_job(project: Project, member: User) -> None:
    past_run(project, member, "train", [[90] * 3])
    free = Gpu.objects.get(index=1)
    GpuSeries.objects.create(gpu=free, uuid=free.uuid, utilization=0, power_w=60, last_ms=to_ms(timezone.now()))
    found = scrape()
    first, second = '{gpu="0",host="box-1",uuid="GPU-box-1-0"}', '{gpu="1",host="box-1",uuid="GPU-box-1-1"}'
    assert found[f"dstackweb_gpu_utilization_percent{first}"] == 90
    assert found[f"dstackweb_gpu_memory_used_bytes{first}"] == 1 << 30
    assert found[f"dstackweb_gpu_utilization_percent{second}"] == 0
    assert f"dstackweb_gpu_memory_used_bytes{second}" not in found


def test_a_stale_sample_is_none(project: Project, member: User) -> None:
    past_run(project, member, "train", [[90] * 3], ended_ago_s=60)
    assert not any(name.startswith("dstackweb_gpu_") for name in scrape())


def test_the_way_a_host_reads_its_gpus_is_exported() -> None:
    host = make_host()
    at = timezone.now() - dt.timedelta(seconds=30)
    HostSampling.objects.create(host=host, at=at, took_ms=12.5, error="GPU 3 is lost")
    found = scrape()
    assert found['dstackweb_host_sampling_ok{host="box-1"}'] == 0
    assert found['dstackweb_host_nvml{host="box-1"}'] == 1
    assert found['dstackweb_host_sample_duration_ms{host="box-1"}'] == 12.5
    assert found['dstackweb_host_sample_age_seconds{host="box-1"}'] == pytest.approx(30, abs=5)


@pytest.mark.both_sides
def test_what_an_offline_host_said_last_is_not_exported_as_true_now(project: Project, member: User) -> None:
    past_run(project, member, "train", [[90] * 3], now=timezone.now() - dt.timedelta(minutes=30))
    host = Host.objects.get()
    HostSampling.objects.create(host=host, at=timezone.now() - dt.timedelta(minutes=30), took_ms=12.5)
    Host.objects.update(silent_s=1800, offline_since=timezone.now() - dt.timedelta(minutes=29))
    Retention.note(RetentionKind.JOB_FILES, "box-1", waiting=7, pruned=0, now=timezone.now())
    Retention.note(RetentionKind.LOGS, "", waiting=3, pruned=0, now=timezone.now())
    found = {name: value for name, value in scrape().items() if "dstackweb_" in name}
    assert found['dstackweb_host_online{host="box-1"}'] == 0
    assert found['dstackweb_host_sampling_ok{host="box-1"}'] == 0
    assert found['dstackweb_host_sample_age_seconds{host="box-1"}'] == pytest.approx(1800, abs=5)
    last_known = ("host_nvml", "host_sample_duration", "gpu_", "retention_waiting")
    named = [name for name in found if name.startswith(tuple(f"dstackweb_{one}" for one in last_known))]
    assert named == ['dstackweb_retention_waiting{host="",kind="logs"}']


def test_gpus_that_an_online_host_has_not_read_for_long_are_not_read_now() -> None:
    """Its driver hangs, say: nothing fails, and nothing comes."""
    host = make_host(gpus=1)
    HostSampling.objects.create(host=host, at=timezone.now() - dt.timedelta(minutes=5))
    assert scrape()['dstackweb_host_sampling_ok{host="box-1"}'] == 0
    HostSampling.objects.update(at=timezone.now() - dt.timedelta(seconds=70))  # as without GPUs
    assert scrape()['dstackweb_host_sampling_ok{host="box-1"}'] == 1


def test_a_removed_host_has_no_metrics() -> None:
    host = make_host(gpus=1)
    gpu = Gpu.objects.get()
    GpuSeries.objects.create(gpu=gpu, uuid=gpu.uuid, utilization=7, last_ms=to_ms(timezone.now()))
    HostSampling.objects.create(host=host, error="GPU 0 is lost")
    Retention.note(RetentionKind.JOB_FILES, "box-1", waiting=7, pruned=0, now=timezone.now())
    Host.objects.update(draining=True, left_at=timezone.now())
    assert not [name for name in scrape() if "box-1" in name]


def test_stops_are_counted_by_project(project: Project) -> None:
    for observed in (False, False, True):
        PolicyStop.objects.create(
            project=project, run_name="idle", observed=observed, min_gpu_utilization=10, time_window_s=60, scope="any",
            low_since=timezone.now(),
        )  # fmt: skip
    found = scrape()
    assert found['dstackweb_policy_stops_total{observed="false",project="main"}'] == 2
    assert found['dstackweb_policy_stops_total{observed="true",project="main"}'] == 1


def test_a_scrape_costs_the_same_queries_with_more_gpus(project: Project, member: User) -> None:
    counted = []
    for number in range(3):
        past_run(project, member, f"train-{number}", [[90] * 3])
        HostSampling.objects.get_or_create(host=Host.objects.get())
        with CaptureQueriesContext(connection) as queries:
            scrape()
        counted.append(len(queries))
    assert len(set(counted)) == 1
