"""Usage counters: shifted where jobs and runs end, equal to a recount, and right in spite of midnights and retries."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from hypothesis import HealthCheck, given, settings, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Instance
from dstackweb.lib.times import to_ms
from dstackweb.runs import attempts, removal, services, usage
from dstackweb.runs.models import Job, Run, UsageDay
from dstackweb.runs.recount import differences
from dstackweb.runs.states import JOB_ENDED, Reason, RunStatus
from dstackweb.runs.usage import DAY_MS, NUMBERS, HeldJob, UsageKey
from tests.factories import cloud_job, join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.support import is_nightly

HOUR_MS = 3_600_000
spans = st.tuples(st.integers(0, 400 * DAY_MS), st.integers(0, 5 * DAY_MS))


@given(spans, st.integers(0, 8), st.integers(0, 200), st.decimals(0, 999, places=4))
def test_the_days_of_a_job_add_up_to_the_whole(span: tuple[int, int], gpus: int, cpus: int, price: Decimal) -> None:
    since_ms, lasted_ms = span
    days = list(HeldJob(gpus, cpus, price, since_ms, since_ms).by_day(since_ms + lasted_ms))
    whole = sum((amounts for _day, amounts in days), Counter[str]())
    assert (whole["gpu_ms"], whole["cpu_ms"]) == (gpus * lasted_ms, cpus * lasted_ms)
    assert whole["micro_usd"] == int(price * lasted_ms * 1_000_000 / HOUR_MS)
    assert all(amounts["gpu_ms"] <= gpus * DAY_MS for _day, amounts in days)
    assert [day for day, _amounts in days] == sorted({day for day, _amounts in days})


def test_a_day_ends_at_midnight_in_utc() -> None:
    eleven = to_ms(dt.datetime(2026, 11, 30, 23, tzinfo=dt.UTC))
    days = dict(HeldJob(2, 1, Decimal(0), eleven, None).by_day(eleven + 3 * HOUR_MS))
    assert days == {
        dt.date(2026, 11, 30): {"gpu_ms": 2 * HOUR_MS, "cpu_ms": HOUR_MS, "micro_usd": 0},
        dt.date(2026, 12, 1): {"gpu_ms": 4 * HOUR_MS, "cpu_ms": 2 * HOUR_MS, "micro_usd": 0},
    }


pytestmark = pytest.mark.django_db


def brute_force() -> dict[tuple[int, int, dt.date], Counter[str]]:
    """By project, member and day, hour by hour and second by second of nothing but the rows of jobs and runs."""
    found: defaultdict[tuple[int, int, dt.date], Counter[str]] = defaultdict(Counter)
    for job in Job.objects.filter(status__in=JOB_ENDED).select_related("run"):
        assert job.ended_at is not None
        at, end = to_ms(job.placed_at), to_ms(job.ended_at)
        while at < end:
            day = dt.datetime.fromtimestamp(at // 1000, dt.UTC).date()
            midnight = dt.datetime.combine(day + dt.timedelta(days=1), dt.time(), dt.UTC)
            until = min(end, to_ms(midnight))
            found[job.run.project_id, job.run.user_id, day].update(
                gpu_ms=job.gpu_count * (until - at), cpu_ms=job.cpus * (until - at)
            )
            at = until
    for run in Run.objects.exclude(ended_at=None):
        assert run.ended_at is not None
        found[run.project_id, run.user_id, run.ended_at.astimezone(dt.UTC).date()][run.status] += 1
    return {key: +numbers for key, numbers in found.items() if +numbers}


def counted() -> dict[tuple[int, int, dt.date], Counter[str]]:
    found: defaultdict[tuple[int, int, dt.date], Counter[str]] = defaultdict(Counter)
    names = [name for name in NUMBERS if name != "micro_usd"]
    for row in UsageDay.objects.all():
        found[row.project_id, row.user_id, row.day].update({name: getattr(row, name) for name in names})
    return {key: +numbers for key, numbers in found.items() if +numbers}


def lived(run: Run, ago: Sequence[float], reason: str = Reason.DONE_BY_RUNNER) -> None:
    """A placed run whose nodes began so many hours ago each; the first ends, and the others with it."""
    jobs = [start(placed_job(run, node), f"nonce-{node}") for node in range(len(ago))]
    for job, hours in zip(jobs, ago, strict=True):
        Job.objects.filter(pk=job.pk).update(placed_at=timezone.now() - dt.timedelta(hours=hours))
    for job in jobs:
        attempts.end_job(job.pk, reason, exit_code=0 if reason == Reason.DONE_BY_RUNNER else 1)


ATTEMPT = st.tuples(st.lists(st.floats(0, 100), min_size=1, max_size=2), st.booleans())
"""How many hours ago each node began, and whether it fails."""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25 if is_nightly() else 5)
@given(st.lists(st.lists(ATTEMPT, min_size=1, max_size=3), min_size=1, max_size=3), st.booleans())
def test_counters_equal_a_brute_force_recount(
    db: None, runs: list[list[tuple[list[float], bool]]], removes: bool
) -> None:
    with transaction.atomic():
        _live(runs, removes)
        transaction.set_rollback(True)  # the next example begins with nothing


def _live(runs: list[list[tuple[list[float], bool]]], removes: bool) -> None:
    project, user = make_project(), make_user()
    join(project, user)
    make_host(gpus=8, cpus=64)
    for tries in runs:
        nodes = len(tries[0][0])
        retry = {"on_events": ["error"], "duration": "30d"}
        run = make_run(project, user, nodes=nodes, resources={"cpu": 2, "memory": "1GB", "gpu": 1}, retry=retry)
        for hours, fails in tries:
            run.refresh_from_db()
            if run.status == RunStatus.PENDING:
                attempts.requeue_due(timezone.now() + dt.timedelta(days=1))
                run.refresh_from_db()
            if run.status != RunStatus.SUBMITTED:
                break
            place_all()
            run.refresh_from_db()
            assert run.status == RunStatus.PROVISIONING
            lived(run, (hours * nodes)[:nodes], Reason.CONTAINER_EXITED_WITH_ERROR if fails else Reason.DONE_BY_RUNNER)
        run.refresh_from_db()
        if run.status not in ("done", "failed"):
            services.stop(run, user, "member")
    assert counted() == brute_force()
    assert list(differences()) == []
    if removes:
        before = counted()
        removal.remove(list(Run.objects.values_list("pk", flat=True)), Q())
        assert not Job.objects.exists()
        assert counted() == before
        assert list(differences()) == []


def test_a_wrong_counter_is_found_by_a_recount(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = make_run(project, member, resources={"gpu": 1})
    place_all()
    lived(run, [1])
    assert list(differences()) == []
    UsageDay.objects.filter(done=1).update(done=2)
    assert [str(one) for one in differences()] != []
    UsageDay.objects.filter(done=2).update(done=1, idle_ms=5)
    assert [one.what.split(" of ")[0] for one in differences()] == ["idle ms"]


def test_what_runs_now_is_added_when_it_is_read(project: Project, member: User) -> None:
    make_host(gpus=2)
    run = make_run(project, member, resources={"gpu": 2, "cpu": 3, "memory": "1GB"})
    place_all()
    now = dt.datetime(2026, 11, 26, 1, tzinfo=dt.UTC)
    Job.objects.update(placed_at=now - dt.timedelta(hours=3))
    found = usage.read(project, now.date() - dt.timedelta(days=1), now.date(), now)
    assert {key.day.day: (amounts["gpu_ms"], amounts["cpu_ms"]) for key, amounts in found.items()} == {
        25: (4 * HOUR_MS, 6 * HOUR_MS),
        26: (2 * HOUR_MS, 3 * HOUR_MS),
    }
    assert {key[0] for key in found} == {run.project_id}
    assert usage.read(make_project(), now.date(), now.date(), now) == {}


def test_a_retried_run_that_changed_its_queue_counts_where_each_attempt_was(project: Project, member: User) -> None:
    make_host(gpus=1)
    services.ensure_queue(project, "second")
    run = make_run(project, member, resources={"gpu": 1}, retry={"on_events": ["error"], "duration": "30d"})
    place_all()
    lived(run, [2], Reason.CONTAINER_EXITED_WITH_ERROR)
    run.refresh_from_db()
    services.set_queue(run, member, "member", "second")
    attempts.requeue_due(timezone.now() + dt.timedelta(days=1))
    place_all()
    run.refresh_from_db()
    lived(run, [1])
    of_queue = Counter[str]()
    for row in UsageDay.objects.select_related("queue"):
        of_queue[row.queue.name] += round(row.gpu_ms / HOUR_MS)
    assert of_queue == {"default": 2, "second": 1}
    assert list(differences()) == []


def _on_cloud(project: Project, user: User, **instance: Any) -> Job:
    job = cloud_job(make_run(project, user), **instance)
    Job.objects.filter(pk=job.pk).update(price=Decimal("3.60"), gpu_count=4)
    return job


def test_an_instance_costs_from_its_launch_and_an_idle_one_from_the_placement(project: Project, member: User) -> None:
    now = timezone.now()
    hours = {"new": (3, 2), "idle": (1, 5), "never launched": (1, None)}
    costs = {}
    for name, (placed_ago, launched_ago) in hours.items():
        job = _on_cloud(project, member)
        Job.objects.filter(pk=job.pk).update(placed_at=now - dt.timedelta(hours=placed_ago))
        at = None if launched_ago is None else now - dt.timedelta(hours=launched_ago)
        assert job.instance_id is not None
        Instance.objects.filter(pk=job.instance_id).update(launched_at=at)
        before = sum(UsageDay.objects.values_list("micro_usd", flat=True))
        attempts.end_job(job.pk, Reason.CONTAINER_EXITED_WITH_ERROR, exit_code=1)
        costs[name] = (sum(UsageDay.objects.values_list("micro_usd", flat=True)) - before) / 1e6
    assert costs == {"new": pytest.approx(7.2, abs=0.1), "idle": pytest.approx(3.6, abs=0.1), "never launched": 0}
    assert list(differences()) == []


def test_reading_takes_the_same_number_of_queries_however_much_there_is(
    project: Project, member: User, django_assert_num_queries: Any
) -> None:
    day = dt.date(2026, 11, 1)
    queue = services.ensure_queue(project)
    UsageDay.objects.bulk_create(
        UsageDay(project=project, user=member, queue=queue, day=day + dt.timedelta(days=number), gpu_ms=1)
        for number in range(90)
    )
    with django_assert_num_queries(2):
        found = usage.read(project, day, day + dt.timedelta(days=89), timezone.now())
    assert len(found) == 90
    assert found[UsageKey(project.pk, day, member.pk, queue.pk)]["gpu_ms"] == 1
