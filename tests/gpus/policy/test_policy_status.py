from __future__ import annotations

import datetime as dt

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.models import GpuSeries, PolicyExemption, ProjectPolicies
from dstackweb.gpus.policy_status import PolicyStatus, policy_status, policy_statuses
from dstackweb.gpus.window import VerdictKind
from dstackweb.lib.times import to_moment
from dstackweb.profiles.models import Profile
from dstackweb.runs.models import Job, Run
from dstackweb.runs.selectors import without_texts
from tests.factories import make_host, make_run, place_all, placed_job
from tests.gpus.snapshots import START_MS
from tests.gpus.watching import IDLE, MINUTE, begin, stopped, watch

pytestmark = pytest.mark.django_db

SLOW = {"min_gpu_utilization": 50, "time_window": "8m"}


def moment(ms: int) -> dt.datetime:
    return to_moment(START_MS + ms)


def of(job: Job, ms: int) -> PolicyStatus:
    found = policy_status(Run.objects.get(pk=job.run_id), moment(ms))
    assert found is not None
    return found


def test_the_status_has_the_low_gpu_its_start_and_the_time_of_the_stop(project: Project, member: User) -> None:
    job = begin(project, member, gpus=2, utilization_policy=SLOW)
    watch(3 * MINUTE, lambda uuid, ms: 5 if uuid == job.gpus[1] else 90)
    idle = GpuSeries.objects.get(job=job, uuid=job.gpus[1])
    found = of(job, 3 * MINUTE)
    assert (found.verdict.kind, found.gpu_index, found.node) == (VerdictKind.KEEP, idle.index, 0)
    assert (found.low_since, found.stops_at) == (moment(0), moment(8 * MINUTE))
    assert (found.badge, found.noticed) == (False, False)
    assert found.policy.min_gpu_utilization == 50
    assert found.source["source"] == "run_file"


def test_the_badge_and_the_notice_appear_over_time(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=SLOW)
    watch(4 * MINUTE)
    assert (of(job, 4 * MINUTE).badge, of(job, 4 * MINUTE).noticed) == (True, False)
    watch(6 * MINUTE, from_ms=4 * MINUTE)
    assert (of(job, 6 * MINUTE).badge, of(job, 6 * MINUTE).noticed) == (True, True)
    watch(6 * MINUTE + 10_000, lambda uuid, ms: 80, from_ms=6 * MINUTE + 10_000)
    used = of(job, 6 * MINUTE + 10_000)
    assert (used.badge, used.noticed, used.low_since, used.stops_at) == (False, False, None, None)


def test_old_samples_give_an_unknown_status(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=SLOW)
    watch(6 * MINUTE)
    found = of(job, 7 * MINUTE)
    assert (found.verdict.kind, found.badge, found.stops_at) == (VerdictKind.UNKNOWN, False, None)


def test_the_status_has_the_exemption_and_the_remaining_keeps(project: Project, member: User) -> None:
    ProjectPolicies.objects.create(project=project, max_exemptions=2)
    job = begin(project, member, utilization_policy=SLOW)
    watch(5 * MINUTE)
    kept = PolicyExemption.objects.create(
        run=job.run, by=member, at=moment(0), until=moment(20 * MINUTE), reason="data"
    )
    found = of(job, 5 * MINUTE)
    assert (found.exemption, found.paused_until, found.exemptions_left) == (kept, kept.until, 1)
    assert (found.stops_at, found.badge) == (kept.until, True)
    later = of(job, 21 * MINUTE)
    assert (later.exemption, later.paused_until, later.exemptions_left) == (None, None, 1)


def test_of_several_nodes_the_one_that_stops_first_is_shown(project: Project, member: User) -> None:
    for name in ("box-1", "box-2", "box-3"):
        make_host(name, gpus=1)
    job = begin(project, member, nodes=3, utilization_policy=SLOW)
    idle = placed_job(job.run, node=1)
    watch(2 * MINUTE, lambda uuid, ms: 0 if uuid in idle.gpus else 90)
    assert of(job, 2 * MINUTE).node == 1
    watch(3 * MINUTE, lambda uuid, ms: None if uuid in idle.gpus else 90, from_ms=2 * MINUTE + 10_000)
    assert (of(job, 3 * MINUTE).node, of(job, 3 * MINUTE).verdict.kind) == (1, VerdictKind.UNKNOWN)


def test_a_placed_run_that_has_not_begun_is_unknown(project: Project, member: User) -> None:
    Profile.objects.create(project=project, name="p", is_default=True, settings={"utilization_policy": IDLE})
    make_host(gpus=1)
    run = make_run(project, member, resources={"gpu": 1})
    assert policy_statuses([run], moment(0)) == {}
    place_all()
    run.refresh_from_db()
    found = policy_statuses([run], moment(0))[run.pk]
    assert (found.verdict.kind, found.source) == (VerdictKind.UNKNOWN, {"source": "profile", "profile": "p"})


def test_only_runs_with_gpus_and_a_policy_have_a_status(project: Project, member: User) -> None:
    with_policy = begin(project, member, utilization_policy=IDLE)
    without = begin(project, member, "without")
    cpu = make_run(project, member, "cpu", utilization_policy=IDLE)
    place_all()
    runs = list(without_texts(Run.objects.all()))
    assert set(policy_statuses(runs, moment(0))) == {with_policy.run_id}
    assert {without.run.name, cpu.name} <= {run.name for run in runs}
    stopped(with_policy.run)
    assert policy_statuses(list(Run.objects.all()), moment(0)) == {}


def test_any_number_of_runs_costs_the_same_queries(project: Project, member: User) -> None:
    make_host(gpus=8, cpus=32)
    counts = []
    for n in (1, 5):
        for number in range(n):
            begin(project, member, f"r{n}-{number}", utilization_policy=IDLE)
        watch(20_000)
        runs = list(without_texts(Run.objects.all()))
        with CaptureQueriesContext(connection) as queries:
            assert len(policy_statuses(runs, moment(20_000))) == len(runs)
        counts.append(len(queries))
    assert counts == [5, 5]
