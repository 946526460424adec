from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu
from dstackweb.gpus import averages, intake
from dstackweb.gpus.averages import BUCKET_MS
from dstackweb.gpus.models import GpuAverage, GpuSample, GpuSeries
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.runs.models import Job
from dstackweb.scheduler.processes import tasks
from tests.factories import cloud_job, make_host, make_run
from tests.gpus.snapshots import EVERY_MS, START_MS, snapshot

pytestmark = pytest.mark.django_db

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def sampled(job: Job | None, moments: range, used: int = 50, **fields: object) -> GpuSeries:
    """A series with a sample at each of the moments, counted from START_MS."""
    series = GpuSeries.objects.create(
        job=job, uuid="GPU-0", first_ms=START_MS + moments[0], last_ms=START_MS + moments[-1], **fields
    )
    GpuSample.objects.bulk_create(GpuSample(series=series, at_ms=START_MS + at, utilization=used) for at in moments)
    return series


@pytest.fixture
def job(project: Project, member: User) -> Job:
    return cloud_job(make_run(project, member))


def at(ms: int) -> dt.datetime:
    return to_moment(START_MS + ms)


def test_five_minutes_are_averaged_a_minute_after_their_end(job: Job) -> None:
    series = GpuSeries.objects.create(job=job, uuid="GPU-0", first_ms=START_MS, last_ms=START_MS + BUCKET_MS)
    for place, (used, memory, power, hot) in enumerate(
        [(10, 100, 50, 40), (30, 300, 70, 60), (None, None, None, None)]
    ):
        GpuSample.objects.create(
            series=series, at_ms=START_MS + place * EVERY_MS, utilization=used, memory_used_mib=memory, power_w=power,
            temperature_c=hot,
        )  # fmt: skip
    GpuSample.objects.create(series=series, at_ms=START_MS + BUCKET_MS, utilization=99)
    averages.roll(at(BUCKET_MS + 59_999))
    assert not GpuAverage.objects.exists()
    averages.roll(at(BUCKET_MS + 60_000))
    average = GpuAverage.objects.get()
    assert (average.at_ms, average.samples, average.utilization, average.utilization_max) == (START_MS, 3, 20, 30)
    assert (average.memory_used_mib, average.memory_max_mib) == (200, 300)
    assert (average.power_w, average.temperature_max_c) == (60, 60)
    series.refresh_from_db()
    assert series.averaged_ms == START_MS + BUCKET_MS


def test_doing_it_twice_changes_nothing(job: Job) -> None:
    sampled(job, range(0, HOUR_MS, EVERY_MS))
    averages.roll(at(HOUR_MS + 60_000))
    before = list(GpuAverage.objects.order_by("at_ms").values())
    assert len(before) == 12
    GpuSeries.objects.update(averaged_ms=0)  # killed before it was noted
    averages.roll(at(HOUR_MS + 60_000))
    assert list(GpuAverage.objects.order_by("at_ms").values()) == before


def test_a_late_sample_has_its_five_minutes_averaged_again(project: Project) -> None:
    host = make_host(gpus=1)
    intake.add_snapshot(host, snapshot(g0=10), START_MS)
    intake.add_snapshot(host, snapshot(g0=10), START_MS + BUCKET_MS)
    averages.roll(at(2 * BUCKET_MS + 60_000))
    intake.add_snapshot(host, snapshot(g0=90), START_MS + EVERY_MS)
    averages.roll(at(2 * BUCKET_MS + 61_000))
    assert list(GpuAverage.objects.order_by("at_ms").values_list("utilization", "samples")) == [(50, 2), (10, 1)]


def test_samples_are_deleted_after_a_day_and_averages_stay(job: Job) -> None:
    series = sampled(job, range(0, 3 * HOUR_MS, EVERY_MS * 6))
    averages.roll(at(DAY_MS))
    assert GpuSample.objects.count() == 180
    averages.roll(at(DAY_MS + HOUR_MS + 1))
    assert GpuSample.objects.count() == 120
    series.refresh_from_db()
    assert series.first_ms == START_MS + HOUR_MS
    averages.roll(at(DAY_MS + 5 * HOUR_MS))
    series.refresh_from_db()
    assert (GpuSample.objects.count(), series.first_ms, GpuAverage.objects.count()) == (0, None, 36)
    assert not averages.has_samples()


def test_samples_of_long_ended_jobs_are_deleted_too(job: Job) -> None:
    sampled(job, range(0, HOUR_MS, EVERY_MS))
    averages.roll(at(HOUR_MS + 60_000))
    averages.roll(at(9 * DAY_MS))
    assert (GpuSample.objects.count(), GpuAverage.objects.count()) == (0, 12)


def test_no_sample_is_deleted_before_it_is_averaged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled(job, range(0, HOUR_MS, EVERY_MS))
    monkeypatch.setattr(averages, "_average_some", lambda until_ms: False)
    averages.roll(at(3 * DAY_MS))
    assert GpuSample.objects.count() == 360


def test_one_call_does_a_bounded_number_of_steps(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled(job, range(0, 10 * HOUR_MS, EVERY_MS * 30))
    monkeypatch.setattr(averages, "MOST_STEPS", 2)
    averages.roll(at(10 * HOUR_MS + 60_000))
    assert GpuAverage.objects.count() == 24
    for _ in range(4):
        averages.roll(at(10 * HOUR_MS + 60_000))
    assert GpuAverage.objects.count() == 120
    averages.roll(at(3 * DAY_MS))
    assert GpuSample.objects.count() == 8 * 12
    for _ in range(4):
        averages.roll(at(3 * DAY_MS))
    assert not GpuSample.objects.exists()
    assert GpuAverage.objects.count() == 120


def test_after_a_month_averages_are_deleted_and_then_the_series_of_jobs(project: Project, job: Job) -> None:
    gpu = Gpu.objects.get(host=make_host(gpus=1))
    sampled(job, range(0, HOUR_MS, EVERY_MS))
    free = sampled(None, range(0, HOUR_MS, EVERY_MS), gpu=gpu)
    averages.roll(at(DAY_MS + 2 * HOUR_MS))
    assert GpuAverage.objects.count() == 24
    assert averages.forget(at(30 * DAY_MS)) == 0
    assert (GpuAverage.objects.count(), GpuSeries.objects.count()) == (24, 2)
    assert averages.waiting(at(30 * DAY_MS + HOUR_MS), 10) == 10
    assert [averages.forget(at(30 * DAY_MS + HOUR_MS)) for _ in range(3)] == [24, 1, 0]
    assert (GpuAverage.objects.count(), list(GpuSeries.objects.all())) == (0, [free])


def test_the_periodic_work_does_both(job: Job) -> None:
    began = averages.bucket_of(to_ms(timezone.now())) - START_MS - 40 * DAY_MS
    sampled(job, range(began, began + HOUR_MS, EVERY_MS))
    wanted = {one.name for one in tasks.control_jobs() if one.when is None or one.when()}
    assert {"gpu-averages", "retention"} <= wanted
    tasks.tick("gpu-averages", timezone.now().timestamp())
    assert (GpuSample.objects.count(), GpuAverage.objects.count()) == (0, 12)
    tasks.tick("retention", timezone.now().timestamp())
    assert (GpuAverage.objects.count(), GpuSeries.objects.count()) == (0, 0)
