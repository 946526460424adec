"""Idle time of GPUs, from samples: what they cover, and what stays unknown."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from itertools import pairwise

import pytest
from django.utils import timezone
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Host
from dstackweb.gpus import averages, intake
from dstackweb.gpus.models import GpuSample, GpuSeries, interval_ms
from dstackweb.gpus.window import MAX_GAP
from dstackweb.lib.times import to_ms
from dstackweb.runs import attempts
from dstackweb.runs.models import Job, Run, UsageDay
from dstackweb.runs.recount import differences
from dstackweb.runs.states import Reason
from dstackweb.runs.usage import DAY_MS
from tests.factories import make_host, make_run, place_all, placed_job, start
from tests.gpus.snapshots import snapshot

STEP_MS = 10_000
samples = st.lists(st.tuples(st.integers(1, 50_000), st.none() | st.integers(0, 100)), max_size=60)
"""Milliseconds since the sample before, and the utilization."""


def brute_force(taken: list[tuple[int, int | None]]) -> dict[str, list[int]]:
    """Second by second would say the same: each sample's stretch, cut at midnights."""
    found: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for (before_ms, _used), (at_ms, used) in pairwise(taken):
        if used is None or at_ms - before_ms > MAX_GAP * STEP_MS:
            continue
        for day in range(before_ms // DAY_MS, at_ms // DAY_MS + 1):
            covered = min(at_ms, (day + 1) * DAY_MS) - max(before_ms, day * DAY_MS)
            if covered > 0:
                found[str(day)][0] += covered
                found[str(day)][1] += covered if used < averages.IDLE_BELOW else 0
    return dict(found)


@given(st.integers(0, 3 * DAY_MS), samples)
def test_what_is_noted_equals_a_brute_force_reading(first_ms: int, following: list[tuple[int, int | None]]) -> None:
    at_ms, before_ms, noted = first_ms, None, None
    taken: list[tuple[int, int | None]] = []
    for step_ms, used in [(0, 50), *following]:
        at_ms += step_ms
        noted = averages.with_sample(noted, before_ms, at_ms, used, STEP_MS)
        before_ms = at_ms
        taken.append((at_ms, used))
    assert {day: list(numbers) for day, numbers in (noted or {}).items()} == brute_force(taken)


pytestmark = pytest.mark.django_db


def running(project: Project, user: User) -> tuple[Host, Job]:
    host = make_host(gpus=2)
    run = make_run(project, user, resources={"gpu": 2})
    place_all()
    job = start(placed_job(run))
    began = timezone.now() - dt.timedelta(hours=1)
    Job.objects.filter(pk=job.pk).update(placed_at=began, started_at=began)
    job.refresh_from_db()
    return host, job


def test_samples_of_a_job_are_moved_into_its_members_usage(project: Project, member: User) -> None:
    host, job = running(project, member)
    assert job.started_at is not None
    begin_ms, step_ms = to_ms(job.started_at), interval_ms()
    for number, used in enumerate([50, 0, 4, 5, None, 0]):
        intake.add_snapshot(host, snapshot(g0=used, g1=100), begin_ms + number * step_ms)
    assert averages.has_uncounted()
    assert averages.count_idle() == 2
    assert not averages.has_uncounted()
    rows = UsageDay.objects.all()
    assert sum(row.measured_ms for row in rows) == (4 + 5) * step_ms
    assert sum(row.idle_ms for row in rows) == 3 * step_ms
    attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    assert averages.count_idle() == 0
    assert list(differences()) == []
    assert sum(row.gpu_ms for row in UsageDay.objects.all()) > sum(row.measured_ms for row in rows)


def test_a_gap_is_unknown_and_a_late_sample_counts_nothing_twice(project: Project, member: User) -> None:
    host, job = running(project, member)
    assert job.started_at is not None
    begin_ms, step_ms = to_ms(job.started_at), interval_ms()
    for number in (0, 1, 2 + MAX_GAP, 2, 3 + MAX_GAP):
        intake.add_snapshot(host, snapshot(g0=0), begin_ms + number * step_ms)
    averages.count_idle()
    assert sum(row.idle_ms for row in UsageDay.objects.all()) == 2 * step_ms
    assert GpuSample.objects.count() == 5


def test_time_of_a_gpu_that_no_job_holds_is_nobodys(project: Project, member: User) -> None:
    host = make_host(gpus=1)
    for number in range(3):
        intake.add_snapshot(host, snapshot(g0=0), to_ms(timezone.now()) + number * interval_ms())
    assert not averages.has_uncounted()


def test_what_a_removed_run_has_left_is_dropped(project: Project, member: User) -> None:
    host, job = running(project, member)
    assert job.started_at is not None
    for number in range(3):
        intake.add_snapshot(host, snapshot(g0=0), to_ms(job.started_at) + number * interval_ms())
    Run.objects.filter(pk=job.run_id).update(status="done")
    Job.objects.filter(pk=job.pk).update(status="done")
    GpuSeries.objects.filter(job=job).update(job=None, gpu=None)
    assert averages.count_idle() == 1
    assert not UsageDay.objects.exists()
