"""Samples that a job's runner posts: kept by age, and only what may be its own."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.models import GpuSample, GpuSeries
from dstackweb.lib.times import to_ms
from dstackweb.runs.launch import runner_spec
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler import utilization
from tests.api.test_runner_api import Runner
from tests.factories import cloud_job, make_host, make_run, place_all, placed_job, start

A = "GPU-a"
READING = {
    "uuid": A, "index": 0, "name": "NVIDIA L4", "memory_mib": 23034, "memory_used_mib": 500, "utilization": 88,
    "power_w": 70, "power_limit_w": 72, "temperature_c": 61, "throttle": 4,
    "processes": [{"pid": 7, "user": "anna", "memory_mib": 400}, {"pid": 8, "user": None, "memory_mib": None}],
}  # fmt: skip


def on_a_cloud(project: Project, member: User, **spec: Any) -> Job:
    """A job that has run for an hour on one GPU of a cloud's machine."""
    job = cloud_job(make_run(project, member, **spec))
    Job.objects.filter(pk=job.pk).update(gpus=[A])
    start(job, "n1")
    Job.objects.filter(pk=job.pk).update(started_at=timezone.now() - dt.timedelta(hours=1))
    job.refresh_from_db()
    return job


@pytest.fixture
def job(project: Project, member: User) -> Job:
    return on_a_cloud(project, member)


def sample(age_s: float, **more: Any) -> dict[str, Any]:
    return {"age_s": age_s, "gpus": [READING | more]}


def test_a_runners_sample_is_stored_at_the_time_given_by_its_age(job: Job) -> None:
    before_ms = to_ms(timezone.now())
    answer = Runner(job).post("samples", {"samples": [sample(20), sample(10, utilization=None), sample(0)]})
    assert (answer.status_code, answer.json()) == (200, {})
    series = GpuSeries.objects.get(job=job)
    assert (series.uuid, series.name, series.memory_mib, series.power_limit_w) == (A, "NVIDIA L4", 23034, 72)
    assert series.processes == READING["processes"]
    rows = GpuSample.objects.filter(series=series).order_by("at_ms")
    assert list(rows.values_list("utilization", flat=True)) == [88, None, 88]
    after_ms = to_ms(timezone.now())
    for row, age_s in zip(rows, (20, 10, 0), strict=True):
        assert before_ms <= row.at_ms + age_s * 1000 <= after_ms


def test_the_gpus_of_a_run_that_leaves_them_unused_stop_it(project: Project, member: User) -> None:
    job = on_a_cloud(project, member, utilization_policy={"min_gpu_utilization": 50, "time_window": "1m"})
    ages = range(70, -1, -10)
    used = [sample(age, utilization=90 if age == 30 else 0) for age in ages]
    Runner(job).post("samples", {"samples": used})
    other = on_a_cloud(project, member, utilization_policy={"min_gpu_utilization": 50, "time_window": "1m"})
    Runner(other).post("samples", {"samples": [sample(age, utilization=0) for age in ages]})
    assert [run.status for run in Run.objects.all()] == [RunStatus.RUNNING] * 2, "a request only stores them"
    utilization.judge_jobs(timezone.now())
    assert Run.objects.get(pk=job.run_id).status == RunStatus.RUNNING
    assert Run.objects.get(pk=other.run_id).status == RunStatus.TERMINATING


def test_another_jobs_gpu_is_refused(job: Job) -> None:
    answer = Runner(job).post("samples", {"samples": [sample(0), sample(0, uuid="GPU-b")]})
    assert answer.status_code == 422
    assert "GPU-b" in answer.json()["detail"]
    assert not GpuSample.objects.exists()


@pytest.mark.parametrize(
    "odd",
    [
        {"memory_mib": None}, {"memory_mib": 2**31}, {"index": -1}, {"uuid": "x" * 81}, {"name": "x" * 121},
        {"processes": [{"pid": 2**31}]}, {"processes": [{"pid": 1}] * 65},
        {"processes": [{"pid": 1, "user": "x" * 121}]},
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_be_is_refused(job: Job, odd: dict[str, Any]) -> None:
    assert Runner(job).post("samples", {"samples": [sample(0, **odd)]}).status_code == 422
    assert not GpuSample.objects.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("utilization", 101), ("utilization", -1), ("utilization", "much"), ("utilization", True),
        ("memory_used_mib", 2**31), ("memory_used_mib", 2**44 - 1), ("power_w", 2**15), ("power_limit_w", -1),
        ("temperature_c", 2000), ("throttle", 2**63), ("throttle", 1e300), ("power_w", [1]),
    ],
)  # fmt: skip
def test_an_impossible_value_is_unknown_by_itself(job: Job, name: str, value: object) -> None:
    whole = {"utilization": 50, "memory_used_mib": 1, "power_w": 2, "temperature_c": 4, "throttle": 5}
    assert Runner(job).post("samples", {"samples": [sample(0, **whole | {name: value})]}).status_code == 200
    stored = GpuSample.objects.values(*whole).get()
    assert stored == whole | ({name: None} if name in whole else {})


@pytest.mark.parametrize("samples", [[sample(-1)], [sample(86_401)], [sample(0)] * 101, [{"age_s": 1}], "x", None])
def test_moments_and_amounts_are_bounded(job: Job, samples: object) -> None:
    assert Runner(job).post("samples", {"samples": samples}).status_code == 422


def test_characters_that_a_database_cannot_store_are_replaced(job: Job) -> None:
    assert Runner(job).post("samples", {"samples": [sample(0, name="a\0b\ud800")]}).status_code == 200
    assert GpuSeries.objects.get(job=job).name == "a?b?"


def test_only_the_runner_that_claimed_the_job_may_send_samples(job: Job) -> None:
    assert Runner(job, "n2").post("samples", {"samples": [sample(0)]}).status_code == 409


def test_a_host_reads_its_own_gpus(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = make_run(project, member, resources={"gpu": 1})
    place_all()
    job = start(placed_job(run), "n1")
    assert job.gpus
    answer = Runner(job).post("samples", {"samples": [sample(0, uuid=job.gpus[0])]})
    assert answer.status_code == 409
    assert runner_spec(Job.objects.select_related("run__project", "host").get(pk=job.pk))["sample_every_s"] is None


def test_on_a_cloud_instance_the_runner_gets_its_sampling_interval(job: Job, settings: Any) -> None:
    settings.DSTACKWEB_SAMPLE_EVERY_S = 7
    assert Runner(job).get("spec").json()["sample_every_s"] == 7
    Job.objects.filter(pk=job.pk).update(gpus=[])
    assert Runner(job).get("spec").json()["sample_every_s"] is None
