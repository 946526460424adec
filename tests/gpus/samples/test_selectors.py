from __future__ import annotations

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.gpus import averages
from dstackweb.gpus.models import GpuAverage, GpuSample, GpuSeries
from dstackweb.gpus.selectors import Columns, samples_of
from dstackweb.lib.times import to_moment
from dstackweb.runs.models import Job
from tests.factories import cloud_job, make_run
from tests.gpus.snapshots import EVERY_MS, START_MS

pytestmark = pytest.mark.django_db

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def sampled(job: Job, uuid: str = "GPU-0", index: int = 0, **used: list[int | None]) -> GpuSeries:
    """A series of a job with a sample each 10 s from START_MS + 1 s on."""
    series = GpuSeries.objects.create(job=job, uuid=uuid, index=index)
    columns = {"memory_used_mib": used.get("memory", used["utilization"])}
    GpuSample.objects.bulk_create(
        GpuSample(
            series=series, at_ms=START_MS + 1_000 + place * EVERY_MS, utilization=value, power_w=100, temperature_c=50,
            memory_used_mib=columns["memory_used_mib"][place],
        )
        for place, value in enumerate(used["utilization"])
    )  # fmt: skip
    moments = list(series.samples.order_by("at_ms").values_list("at_ms", flat=True))
    GpuSeries.objects.filter(pk=series.pk).update(first_ms=moments[0], last_ms=moments[-1])
    return series


@pytest.fixture
def job(project: Project, member: User) -> Job:
    return cloud_job(make_run(project, member))


def only(found: list[Columns]) -> Columns:
    assert len(found) == 1
    return found[0]


def test_where_there_is_room_each_sample_is_shown_as_it_is(job: Job) -> None:
    sampled(job, utilization=[0, 50, 100, None])
    shown = only(samples_of([job], START_MS, START_MS + 60_000, 100))
    assert shown.at_ms == list(range(START_MS, START_MS + 60_000, EVERY_MS))
    assert shown.utilization == [0, 50, 100, None, None, None]
    assert shown.power_w == [100, 100, 100, 100, None, None]
    assert shown.temperature_c == [50, 50, 50, 50, None, None]


def test_at_most_the_requested_number_of_points_is_returned(job: Job) -> None:
    sampled(job, utilization=[10, 20, 30, 40] * 90)
    for points in (2, 3, 7, 60, 100, 359, 360, 1000):
        shown = only(samples_of([job], START_MS, START_MS + HOUR_MS, points))
        assert len(shown.at_ms) == len(shown.utilization) <= points
        known = [value for value in shown.utilization if value is not None]
        assert 10 <= min(known) <= max(known) <= 40
    assert only(samples_of([job], START_MS, START_MS + HOUR_MS, 91)).utilization[:3] == [25, 25, 25]


def test_a_gap_is_a_gap_and_a_late_tick_is_none(job: Job) -> None:
    series = sampled(job, utilization=[10])
    for at in (10_000, 29_000, 59_000, 90_000):
        GpuSample.objects.create(series=series, at_ms=START_MS + at, utilization=at // 1000)
    shown = only(samples_of([job], START_MS, START_MS + 100_000, 50))
    assert shown.utilization == [10, 10, 29, 59, 59, 59, None, None, None, 90]


def test_all_gpus_of_all_nodes_are_on_one_grid_in_their_order(project: Project, member: User) -> None:
    jobs = [cloud_job(make_run(project, member)) for _ in range(2)]
    Job.objects.filter(pk=jobs[1].pk).update(node=1)
    sampled(jobs[1], "GPU-c", 0, utilization=[3, 3])
    sampled(jobs[0], "GPU-a", 1, utilization=[2, 2])
    sampled(jobs[0], "GPU-b", 0, utilization=[1])
    shown = samples_of(jobs, START_MS, START_MS + 20_000, 10)
    assert [one.series.uuid for one in shown] == ["GPU-b", "GPU-a", "GPU-c"]
    assert [one.utilization for one in shown] == [[1, None], [2, 2], [3, 3]]
    assert len({tuple(one.at_ms) for one in shown}) == 1


def test_averages_cover_the_time_before_the_oldest_sample(job: Job) -> None:
    sampled(job, utilization=[20, 40] * 360)
    now = to_moment(START_MS + 2 * HOUR_MS + 120_000)
    averages.roll(now)
    before = only(samples_of([job], START_MS, START_MS + 2 * HOUR_MS, 1000))
    GpuSample.objects.filter(at_ms__lt=START_MS + HOUR_MS).delete()
    GpuSeries.objects.update(first_ms=START_MS + HOUR_MS + 1_000)
    shown = only(samples_of([job], START_MS, START_MS + 2 * HOUR_MS, 1000))
    assert shown.at_ms == before.at_ms
    assert shown.utilization[:360] == [30] * 360
    assert shown.utilization[360:] == before.utilization[360:] == [20, 40] * 180


def test_long_spans_use_averages_plus_samples_not_yet_averaged(job: Job) -> None:
    sampled(job, utilization=[20, 40] * 390)  # 130 minutes
    averages.roll(to_moment(START_MS + HOUR_MS + 70_000))
    assert GpuAverage.objects.count() == 12
    GpuSample.objects.filter(at_ms__lt=START_MS + HOUR_MS).delete()
    shown = only(samples_of([job], START_MS - DAY_MS, START_MS + DAY_MS, 289))
    assert shown.step_ms == 600_000
    known = [value for value in shown.utilization if value is not None]
    assert known == [30] * 13
    assert shown.at_ms[shown.utilization.index(30)] == START_MS


def test_averages_count_by_how_many_samples_they_are_of(job: Job) -> None:
    series = GpuSeries.objects.create(job=job, uuid="GPU-0", averaged_ms=START_MS + HOUR_MS)
    for place, (samples, used) in enumerate([(30, 10.0), (10, 50.0), (20, None)]):
        GpuAverage.objects.create(
            series=series, at_ms=START_MS + place * 300_000, samples=samples, utilization=used, temperature_max_c=place
        )
    shown = only(samples_of([job], START_MS, START_MS + 30 * 1_800_000, 31))
    assert (shown.step_ms, shown.utilization[0], shown.temperature_c[0]) == (1_800_000, 20, 2)


def test_nothing_is_shown_of_a_job_that_was_never_seen(job: Job) -> None:
    assert samples_of([job], START_MS, START_MS + HOUR_MS, 100) == []


def test_a_day_of_samples_is_shown_by_its_averages(job: Job) -> None:
    sampled(job, utilization=[20, 40] * 360)
    averages.roll(to_moment(START_MS + 2 * HOUR_MS + 120_000))
    GpuSample.objects.all().delete()
    shown = only(samples_of([job], START_MS - 22 * HOUR_MS, START_MS + 2 * HOUR_MS, 360))
    assert (shown.step_ms, len(shown.at_ms)) == (300_000, 288)
    assert shown.utilization == [None] * 264 + [30] * 24
