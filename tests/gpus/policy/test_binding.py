from __future__ import annotations

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Host
from dstackweb.gpus import binding
from dstackweb.gpus.models import GpuSeries, JobPolicy
from dstackweb.gpus.window import VerdictKind
from dstackweb.profiles.models import Profile
from dstackweb.runs.models import Job, Run
from tests.factories import make_host, make_run, place_all, placed_job
from tests.gpus.snapshots import EVERY_MS, START_MS
from tests.gpus.watching import IDLE, MINUTE, begin, look_at, watch

pytestmark = pytest.mark.django_db


def read(job: Job) -> Job:
    return Job.objects.select_related("run", "policy").get(pk=job.pk)


def change(run: Run, **policy: object) -> None:
    spec = Run.objects.get(pk=run.pk).spec
    spec["utilization_policy"] = (spec["utilization_policy"] or {}) | policy if policy else None
    Run.objects.filter(pk=run.pk).update(spec=spec)


def test_the_first_sample_binds_the_job_to_the_policy_wherever_it_came_from(project: Project, member: User) -> None:
    """R17: here from a default profile that no run file names."""
    policy = {**IDLE, "scope": "all", "warmup": "5m", "action": "notify"}
    Profile.objects.create(project=project, name="p", is_default=True, settings={"utilization_policy": policy})
    job = begin(project, member)
    assert not JobPolicy.objects.exists()
    watch(EVERY_MS)
    bound = JobPolicy.objects.get()
    assert (bound.job_id, bound.min_gpu_utilization, bound.time_window_s, bound.scope, bound.action) == (
        job.pk, 50, 60, "all", "notify",
    )  # fmt: skip
    assert bound.from_ms == START_MS + 5 * MINUTE


def test_a_run_files_policy_comes_before_its_profiles(project: Project, member: User) -> None:
    Profile.objects.create(project=project, name="p", is_default=True, settings={"utilization_policy": IDLE})
    begin(project, member, utilization_policy={"min_gpu_utilization": 7, "time_window": "9m"})
    watch(EVERY_MS)
    bound = JobPolicy.objects.get()
    assert (bound.min_gpu_utilization, bound.time_window_s) == (7, 540)


def test_binding_again_costs_nothing_while_nothing_changes(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    first = binding.bind(read(job))
    job = read(job)
    with CaptureQueriesContext(connection) as queries:
        assert binding.bind(job) == first
    assert len(queries) == 0


def test_another_policy_in_the_spec_is_bound_and_the_stored_samples_judged_by_it(
    project: Project, member: User
) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    watch(2 * MINUTE, lambda uuid, ms: 60)
    JobPolicy.objects.update(noticed_ms=1, acted_ms=1)
    change(job.run, min_gpu_utilization=70)
    with transaction.atomic():
        binding.bind(read(job))
    bound = JobPolicy.objects.get(pk=job.pk)
    assert (bound.min_gpu_utilization, bound.noticed_ms, bound.acted_ms) == (70, None, None)
    series = GpuSeries.objects.get(job=job)
    assert (series.low_since_ms, series.low_last_ms) == (START_MS, START_MS + 2 * MINUTE)
    change(job.run)
    with transaction.atomic():
        assert binding.bind(read(job)).min_gpu_utilization is None
    series.refresh_from_db()
    assert (series.low_since_ms, series.low_last_ms) == (None, None)


def test_another_window_keeps_the_stretch_that_goes_further_back_than_the_samples(
    project: Project, member: User
) -> None:
    job = begin(project, member, utilization_policy={**IDLE, "time_window": "30m"})
    watch(5 * MINUTE)
    GpuSeries.objects.get(job=job).samples.filter(at_ms__lt=START_MS + 4 * MINUTE).delete()
    change(job.run, time_window_s=120)
    with transaction.atomic():
        binding.bind(read(job))
    assert GpuSeries.objects.get(job=job).low_since_ms == START_MS


def test_a_job_that_has_not_started_is_not_bound(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = make_run(project, member, resources={"gpu": 1}, utilization_policy=IDLE)
    place_all()
    with pytest.raises(ValueError, match="has not started"):
        binding.bind(read(placed_job(run)))


def test_samples_that_show_use_contradict_a_stretch(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE - EVERY_MS)
    look_at(Host.objects.get(), lambda uuid, ms: 0, MINUTE)
    series, bound = GpuSeries.objects.get(job=job), JobPolicy.objects.get()
    assert binding.confirmed(bound, job.gpus, [series], START_MS + MINUTE).kind == VerdictKind.STOP
    series.samples.filter(at_ms=START_MS + 30_000).update(utilization=50)
    assert binding.confirmed(bound, job.gpus, [series], START_MS + MINUTE).kind == VerdictKind.KEEP


def test_a_stretch_without_stored_samples_counts_only_where_older_ones_were_pruned(
    project: Project, member: User
) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE - EVERY_MS)
    look_at(Host.objects.get(), lambda uuid, ms: 0, MINUTE)
    series, bound = GpuSeries.objects.get(job=job), JobPolicy.objects.get()
    series.samples.filter(at_ms__lt=START_MS + 30_000).delete()
    assert binding.confirmed(bound, job.gpus, [series], START_MS + MINUTE).kind == VerdictKind.KEEP
    series.first_ms = START_MS + 30_000
    assert binding.confirmed(bound, job.gpus, [series], START_MS + MINUTE).kind == VerdictKind.STOP
