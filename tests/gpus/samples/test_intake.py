from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Gpu, HostEvent
from dstackweb.gpus import binding, intake, window
from dstackweb.gpus.models import GpuSample, GpuSeries, HostSampling, JobPolicy
from dstackweb.lib.times import to_moment
from dstackweb.runner.nvml import Snapshot
from dstackweb.runs.models import Job, Run
from dstackweb.runs.states import JobStatus
from dstackweb.scheduler import utilization
from tests.factories import cloud_job, make_host, make_run, place_all, placed_job, start
from tests.gpus.snapshots import EVERY_MS, START_MS, sample, snapshot

pytestmark = pytest.mark.django_db

LOW = {"min_gpu_utilization": 50, "time_window": "1m"}


def running(project: Project, member: User, gpus: int = 1, **keys: object) -> Job:
    """A job that began at START_MS on the GPUs of `box-1` with the lowest indexes."""
    run = make_run(project, member, resources={"gpu": {"count": gpus}}, **keys)
    assert place_all() == 1
    return begun(placed_job(run))


def begun(job: Job) -> Job:
    start(job)
    Job.objects.filter(pk=job.pk).update(started_at=to_moment(START_MS))
    job.refresh_from_db()
    return job


def test_a_snapshot_is_stored_as_samples_and_the_newest_on_the_series(project: Project, member: User) -> None:
    host = make_host(gpus=2)
    job = running(project, member)
    held = job.gpus[0]
    intake.add_snapshot(host, snapshot(g0=30, g1=5), START_MS)
    intake.add_snapshot(host, snapshot(g0=40, g1=6), START_MS + EVERY_MS)
    series = GpuSeries.objects.get(job=job)
    assert (series.uuid, series.gpu) == (held, Gpu.objects.get(uuid=held))
    assert (series.first_ms, series.last_ms, series.utilization) == (START_MS, START_MS + EVERY_MS, 40)
    assert (series.memory_used_mib, series.power_w, series.power_limit_w, series.temperature_c) == (1000, 90, 400, 40)
    assert list(series.samples.order_by("at_ms").values_list("at_ms", "utilization")) == [
        (START_MS, 30),
        (START_MS + EVERY_MS, 40),
    ]
    free = GpuSeries.objects.get(job=None)
    assert (free.uuid, free.utilization, free.samples.count()) == ("GPU-box-1-1", 6, 2)


def test_a_snapshot_of_eight_gpus_and_jobs_takes_as_many_statements_as_of_one(project: Project, member: User) -> None:
    host = make_host(cpus=32, gpus=8)
    running(project, member, utilization_policy=LOW)
    counts = []
    for at_ms in (START_MS, START_MS + EVERY_MS):
        with CaptureQueriesContext(connection) as queries:
            intake.add_snapshot(host, snapshot(g0=0), at_ms)
        counts.append(len(queries))
    for _ in range(7):
        running(project, member, utilization_policy=LOW)
    everything = snapshot(**{f"g{n}": 0 for n in range(8)})
    intake.add_snapshot(host, everything, START_MS + 2 * EVERY_MS)
    with CaptureQueriesContext(connection) as queries:
        intake.add_snapshot(host, everything, START_MS + 3 * EVERY_MS)
    assert GpuSample.objects.count() == 2 + 8 + 8
    assert len(queries) == counts[1], [query["sql"] for query in queries]


def test_storing_samples_judges_nothing_and_writes_to_no_run(project: Project, member: User) -> None:
    host = make_host(gpus=2)
    job = running(project, member, utilization_policy=LOW)
    for at in range(0, 90_000, EVERY_MS):
        with CaptureQueriesContext(connection) as queries:
            intake.add_snapshot(host, snapshot(g0=10, g1=10), START_MS + at)
    writes = [query["sql"] for query in queries if query["sql"].split()[0] in ("INSERT", "UPDATE", "DELETE", "WITH")]
    assert not [statement for statement in writes if "runs_" in statement or "gpus_jobpolicy" in statement]
    assert (Run.objects.get(pk=job.run_id).status, JobPolicy.objects.get().acted_ms) == ("running", None)
    assert utilization.judge_jobs(to_moment(START_MS + 80_000)) == {job.pk: window.PolicyAction.STOP}


def test_a_missing_or_unreadable_value_is_no_sample_and_stops_no_run(project: Project, member: User) -> None:
    host = make_host(gpus=1)
    running(project, member, utilization_policy=LOW)
    for at in range(0, 120_000, EVERY_MS):
        seen = (
            snapshot(g0=10)
            if at % 40_000 == 0
            else snapshot(g0=None)
            if at % 20_000 == 0
            else Snapshot(error="GPU 0: lost")
        )
        intake.add_snapshot(host, seen, START_MS + at)
        assert not utilization.judge_jobs(to_moment(START_MS + at))
    assert GpuSample.objects.filter(utilization=None).count() == 3
    assert GpuSample.objects.filter(utilization=0).count() == 0


def test_a_gpu_is_its_own_before_its_job_begins_and_after_it_ends(project: Project, member: User) -> None:
    host = make_host(gpus=1)
    run = make_run(project, member, resources={"gpu": 1}, utilization_policy=LOW)
    place_all()
    intake.add_snapshot(host, snapshot(g0=1), START_MS - 2 * EVERY_MS)
    job = begun(placed_job(run))
    intake.add_snapshot(host, snapshot(g0=2), START_MS - EVERY_MS)
    intake.add_snapshot(host, snapshot(g0=3), START_MS)
    job.allocations.all().delete()
    intake.add_snapshot(host, snapshot(g0=4), START_MS + EVERY_MS)
    assert list(GpuSample.objects.filter(series__job=None).values_list("utilization", flat=True)) == [1, 2, 4]
    assert list(GpuSample.objects.filter(series__job=job).values_list("utilization", flat=True)) == [3]


def test_a_stopping_job_is_sampled_but_not_judged(project: Project, member: User) -> None:
    host = make_host(gpus=1)
    job = running(project, member, utilization_policy=LOW)
    Job.objects.filter(pk=job.pk).update(status=JobStatus.TERMINATING)
    for at in range(0, 90_000, EVERY_MS):
        intake.add_snapshot(host, snapshot(g0=10), START_MS + at)
    assert not utilization.has_low_jobs(to_moment(START_MS + 80_000))
    assert GpuSample.objects.filter(series__job=job).count() == 9


def test_two_snapshots_of_the_same_time_are_stored_once(project: Project, member: User) -> None:
    host = make_host(gpus=1)
    running(project, member, utilization_policy=LOW)
    for _ in range(2):
        intake.add_snapshot(host, snapshot(g0=10), START_MS)
    assert GpuSample.objects.count() == 1


def test_a_corrected_clock_that_was_ahead_does_not_protect_an_idle_run(project: Project, member: User) -> None:
    host = make_host(gpus=1)
    job = running(project, member, utilization_policy=LOW)
    a_year = 365 * 24 * 3_600_000
    for at in (START_MS, START_MS + a_year, START_MS + a_year + EVERY_MS):
        intake.add_snapshot(host, snapshot(g0=10), at)
    for at in range(20_000, 90_000, EVERY_MS):
        assert not utilization.judge_jobs(to_moment(START_MS + at))
        intake.add_snapshot(host, snapshot(g0=20), START_MS + at)
    series = GpuSeries.objects.get()
    assert (series.utilization, series.low_since_ms, series.last_ms) == (20, START_MS + 20_000, START_MS + 80_000)
    # What was seen before is no cover.
    assert confirmed_at(job, START_MS + 79_999) == window.VerdictKind.KEEP
    assert confirmed_at(job, START_MS + 80_000) == window.VerdictKind.STOP


def test_use_at_times_repeated_after_a_clock_went_back_prevents_a_stop(project: Project, member: User) -> None:
    host = make_host(gpus=1)
    job = running(project, member, utilization_policy=LOW)
    for at in range(0, 130_000, EVERY_MS):
        intake.add_snapshot(host, snapshot(g0=10 if at < 60_000 else 90), START_MS + at)
    for at in range(55_000, 115_000, EVERY_MS):
        intake.add_snapshot(host, snapshot(g0=10), START_MS + at)
    assert confirmed_at(job, START_MS + 105_000) != window.VerdictKind.STOP


def confirmed_at(job: Job, now_ms: int) -> window.VerdictKind:
    bound = JobPolicy.objects.get(job=job)
    return binding.confirmed(bound, job.gpus, GpuSeries.objects.filter(job=job), now_ms).kind


def test_a_gpu_that_is_not_registered_is_left_out(project: Project) -> None:
    host = make_host(gpus=1)
    intake.add_snapshot(host, Snapshot(samples=(sample("GPU-box-1-0"), sample("GPU-new-7"))), START_MS)
    assert list(GpuSeries.objects.values_list("uuid", flat=True)) == ["GPU-box-1-0"]


def test_a_changed_policy_judges_the_samples_that_are_kept(project: Project, member: User) -> None:
    host = make_host(gpus=1)
    job = running(project, member, utilization_policy=LOW)
    for at in range(0, 50_000, EVERY_MS):
        intake.add_snapshot(host, snapshot(g0=60), START_MS + at)
    assert GpuSeries.objects.get().low_since_ms is None
    run = Run.objects.get(pk=job.run_id)
    run.spec["utilization_policy"]["min_gpu_utilization"] = 70
    run.save()
    binding.rebind(job)
    intake.add_snapshot(host, snapshot(g0=60), START_MS + 50_000)
    assert (GpuSeries.objects.get().low_since_ms, JobPolicy.objects.get().min_gpu_utilization) == (START_MS, 70)
    intake.add_snapshot(host, snapshot(g0=60), START_MS + 60_000)
    assert utilization.judge_jobs(to_moment(START_MS + 60_000)) == {job.pk: window.PolicyAction.STOP}


def test_a_runners_samples_may_arrive_late_in_bulk_and_in_any_order(project: Project, member: User) -> None:
    job = cloud_of(project, member)
    heap = [(START_MS + at, [sample("GPU-i-0", 10)]) for at in range(0, 70_000, EVERY_MS)]
    for order in (list(reversed(heap)), heap):
        intake.add_samples(job, order, START_MS + 61_000)
        assert GpuSample.objects.count() == 7
        assert confirmed_at(job, START_MS + 61_000) == window.VerdictKind.STOP
    # One that shows use, late, changes what is known.
    intake.add_samples(job, [(START_MS + 55_000, [sample("GPU-i-0", 90)])], START_MS + 63_000)
    assert not utilization.judge_jobs(to_moment(START_MS + 63_000))


def test_a_runners_samples_of_other_gpus_times_and_of_an_ended_job_are_left_out(project: Project, member: User) -> None:
    job = cloud_of(project, member)
    mine, other = sample("GPU-i-0"), sample("GPU-i-9")
    now_ms = START_MS + 2 * 24 * 3_600_000
    intake.add_samples(job, [(START_MS - 1, [mine])], START_MS)
    intake.add_samples(job, [(START_MS, [other])], START_MS)
    intake.add_samples(job, [(START_MS, [mine])], now_ms)
    Job.objects.filter(pk=job.pk).update(status=JobStatus.DONE)
    job.refresh_from_db()
    intake.add_samples(job, [(START_MS, [mine])], START_MS)
    assert not GpuSeries.objects.exists()


def cloud_of(project: Project, member: User) -> Job:
    """A running job of a cloud with one GPU under the policy LOW."""
    job = cloud_job(make_run(project, member, utilization_policy=LOW))
    Job.objects.filter(pk=job.pk).update(gpus=["GPU-i-0"])
    return begun(job)


def test_a_host_without_nvml_is_recorded_once(project: Project) -> None:
    host = make_host()
    for at in range(0, 50_000, EVERY_MS):
        intake.add_snapshot(host, Snapshot(library=False), START_MS + at)
    assert list(HostEvent.objects.values_list("kind", flat=True)) == ["nvml_missing"]
    sampling = HostSampling.objects.get(host=host)
    assert (sampling.library, sampling.at) == (False, to_moment(START_MS + 40_000))


def test_intermittent_errors_are_recorded_with_a_bounded_number_of_events(project: Project) -> None:
    host = make_host(gpus=1)
    for number, error in enumerate(("", "GPU 0: lost", "GPU 0: lost", "")):
        intake.add_snapshot(host, Snapshot(error=error), START_MS + number * EVERY_MS)
    assert list(HostEvent.objects.order_by("id").values_list("kind", "data")) == [
        ("sampling_fails", {"error": "GPU 0: lost"}),
        ("sampling_works", {}),
    ]
    for number in range(100):
        intake.add_snapshot(host, Snapshot(error="GPU 0: lost" * (number % 2)), START_MS + (10 + number) * EVERY_MS)
    assert HostEvent.objects.count() == 12
    assert HostSampling.objects.get(host=host).error == "GPU 0: lost"


def test_a_host_without_gpus_that_answer_costs_one_statement(project: Project) -> None:
    host = make_host()
    intake.add_snapshot(host, Snapshot(), START_MS)
    with CaptureQueriesContext(connection) as queries:
        intake.add_snapshot(host, Snapshot(), START_MS + EVERY_MS)
    assert len([query for query in queries if "POINT" not in query["sql"]]) == 1
