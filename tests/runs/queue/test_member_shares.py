"""Fair share in a queue: shares beside a count run by run, penalties at the moments that set them, and moves."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import attempts, dependencies, services
from dstackweb.runs.models import Job, MemberShare, Queue, Run, UsageDay
from dstackweb.runs.queue import member_shares, ordering, queues, reorder
from dstackweb.runs.queue.move_preview import MoveTarget
from dstackweb.runs.queue.ordering import HOUR_MS, Load
from dstackweb.runs.queue.positions import rank_factors
from dstackweb.runs.states import JOB_ACTIVE, PLACED, Reason
from dstackweb.scheduler.passes.decision import plan
from dstackweb.scheduler.processes import tasks
from tests.factories import join, make_host, make_run, make_user, place_all, placed_job, start

pytestmark = pytest.mark.django_db
HOUR = 3600


@pytest.fixture
def manager(project: Project) -> User:
    return join(project, make_user("mona"), "manager")


@pytest.fixture
def bob(project: Project) -> User:
    return join(project, make_user("bob"))


@pytest.fixture
def fair(project: Project, manager: User) -> Queue:
    """Its default queue, with at most an hour of penalty."""
    return queues.change_queue(services.ensure_queue(project), manager, "manager", fair_share_minutes=60)


def used(queue: Queue, user: User, gpu_hours: int, days_ago: int = 0) -> None:
    day = timezone.now().date() - dt.timedelta(days=days_ago)
    UsageDay.objects.create(project=queue.project, queue=queue, user=user, day=day, gpu_ms=gpu_hours * HOUR_MS)


def fresh(run: Run) -> Run:
    return Run.objects.select_related("queue", "project", "user").get(pk=run.pk)


def names(queue: Queue) -> list[str]:
    return list(
        Run.objects.filter(queue=queue, status="submitted").order_by("rank", "pk").values_list("name", flat=True)
    )


def loads(queue: Queue) -> dict[str, Load]:
    return {share.user: share.load for share in member_shares.shares(queue)}


def gpus(count: int, **keys: Any) -> dict[str, Any]:
    return {"resources": {"gpu": count} if count else {}, **keys}


def test_it_is_off_until_a_manager_sets_it(project: Project, member: User, bob: User) -> None:
    queue = services.ensure_queue(project)
    used(queue, member, 500)
    run = make_run(project, member, **gpus(2))
    assert (run.penalty_s, run.penalty_basis, member_shares.shares(queue)) == (0, {}, [])
    assert queues.count_shares(timezone.now()) == 0
    assert not MemberShare.objects.exists()
    assert "fair-shares" in {job.name for job in tasks.control_jobs()}
    assert not queues.has_fair_queues()


def by_hand(queue: Queue, now: dt.datetime) -> dict[str, Load]:
    """Run by run and job by job. Days before the last ten half-lives are left out."""
    found: dict[str, Load] = {}
    first = now.date() - dt.timedelta(days=10 * queue.fair_share_half_life_days)
    for user in User.objects.filter(memberships__project=queue.project):
        days = list(UsageDay.objects.filter(queue=queue, user=user).values_list("day", "gpu_ms"))
        for job in Job.objects.filter(run__queue=queue, run__user=user, status__in=JOB_ACTIVE):
            days += usage_of(job, now)
        days = [(day, gpu_ms) for day, gpu_ms in days if day >= first]
        held = queued = 0
        for run in Run.objects.filter(queue=queue, user=user):
            asked = run.spec["nodes"] * run.spec["requirements"]["gpu_count_min"]
            held += asked if run.status in PLACED else 0
            queued += asked if run.status == "submitted" else 0
        load = Load(ordering.decayed_ms(days, now, queue.fair_share_half_life_days), held, queued)
        if load.total_ms:
            found[user.get_username()] = load
    return found


def usage_of(job: Job, now: dt.datetime) -> list[tuple[dt.date, int]]:
    at, parts = job.placed_at, []
    while at < now:
        midnight = dt.datetime.combine(at.date() + dt.timedelta(days=1), dt.time(), dt.UTC)
        end = min(now, midnight)
        parts.append((at.date(), job.gpu_count * round((end - at).total_seconds() * 1000)))
        at = end
    return parts


@pytest.mark.parametrize("seed", range(6))
def test_counted_shares_are_those_of_all_runs_and_jobs(
    project: Project, member: User, bob: User, fair: Queue, seed: int
) -> None:
    rnd = random.Random(seed)
    make_host(cpus=64, gpus=6)
    night = services.ensure_queue(project, "night")
    Queue.objects.filter(pk=fair.pk).update(fair_share_half_life_days=rnd.randint(1, 30))
    fair.refresh_from_db()
    for user in (member, bob):
        for days_ago in rnd.sample(range(1, 300), 4):
            used(fair, user, rnd.randint(0, 900), days_ago)
    used(night, bob, 10_000)
    for _ in range(12):
        queue = rnd.choice(["default", "default", "night"])
        make_run(
            project, rnd.choice([member, bob]), queue=queue, nodes=rnd.choice([1, 1, 2]), **gpus(rnd.randint(0, 2))
        )
        if rnd.random() < 0.3:
            place_all()
        if rnd.random() < 0.3 and (job := Job.objects.filter(status="provisioning").first()):
            start(job)
            Job.objects.filter(pk=job.pk).update(placed_at=timezone.now() - dt.timedelta(hours=rnd.randint(0, 60)))
            if rnd.random() < 0.5:
                attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    now = timezone.now() + dt.timedelta(seconds=2)
    queues.count_shares(now)
    counted, exact = loads(fair), by_hand(fair, now)
    assert {name: load[1:] for name, load in counted.items()} == {name: load[1:] for name, load in exact.items()}
    for name, load in counted.items():
        assert load.used_ms == pytest.approx(exact[name].used_ms, abs=20), "milliseconds are rounded apart"


def test_each_run_of_a_burst_ranks_further_behind_and_newcomers_go_between(
    project: Project, member: User, bob: User, fair: Queue
) -> None:
    make_run(project, bob, "other", **gpus(2))
    burst = [make_run(project, member, f"burst-{number}", **gpus(2)) for number in range(5)]
    newcomer = make_run(project, bob, "newcomer", **gpus(1))
    # The median of 2 GPU-hours, 2 of a newcomer's run, and 2n.
    assert [run.penalty_s for run in burst] == [0, 1800, 2400, 2700, 2880]
    assert newcomer.penalty_s == 0
    assert names(fair) == ["other", "burst-0", "newcomer", "burst-1", "burst-2", "burst-3", "burst-4"]
    for run in (*burst, newcomer):
        assert run.rank == ordering.rank(run.seniority_us, run.priority, fair.step_us, run.penalty_s)
    assert burst[4].penalty_basis == {
        "used_gpu_hours": 0.0, "held_gpus": 0, "queued_gpus": 10, "median_gpu_hours": 2.0
    }  # fmt: skip
    factors = rank_factors(fresh(burst[4]), timezone.now())
    assert (factors.penalty_s, factors.position) == (2880, 7)


def test_past_usage_decays_by_the_queues_half_life(
    project: Project, member: User, bob: User, manager: User, fair: Queue
) -> None:
    used(fair, member, 100, days_ago=40)
    used(fair, bob, 1, days_ago=0)
    queues.change_queue(fair, manager, "manager", fair_share_half_life_days=90)
    long = make_run(project, member).penalty_s
    queues.change_queue(fair, manager, "manager", fair_share_half_life_days=7)
    short = make_run(project, member).penalty_s
    queues.change_queue(fair, manager, "manager", fair_share_half_life_days=3)
    assert long > short > make_run(project, member).penalty_s == 0, "ten half-lives are past"


def test_no_rank_changes_when_shares_are_counted(project: Project, member: User, bob: User, fair: Queue) -> None:
    make_run(project, bob, **gpus(1))
    make_run(project, member, **gpus(8))
    before = list(Run.objects.order_by("pk").values())
    used(fair, member, 1000)
    assert queues.count_shares(timezone.now()) == 1
    assert list(Run.objects.order_by("pk").values()) == before
    assert make_run(project, member, **gpus(1)).penalty_s > 1700


def test_a_new_setting_sets_all_penalties_but_those_of_runs_moved_by_hand(
    project: Project, member: User, bob: User, manager: User
) -> None:
    queue = services.ensure_queue(project)
    first, moved, last = (make_run(project, member, name, **gpus(4)) for name in ("first", "moved", "last"))
    other = make_run(project, bob, "other", **gpus(1))
    reorder.move([moved], manager, "manager", MoveTarget("top"))
    place = fresh(moved).rank
    queue = queues.change_queue(queue, manager, "manager", fair_share_minutes=60)
    assert names(queue) == ["moved", "other", "first", "last"]
    # The median of 12, 1 and a newcomer's 1.
    assert {fresh(run).penalty_s for run in (first, last)} == {HOUR * 11 // 12}
    assert (fresh(moved).rank, fresh(moved).penalty_s, fresh(other).penalty_s) == (place, 0, 0)
    queue = queues.change_queue(queue, manager, "manager", fair_share_minutes=120)
    assert fresh(first).penalty_s == 2 * HOUR * 11 // 12, "set, not added"
    queue = queues.change_queue(queue, manager, "manager", ageing_minutes=10)
    for run in map(fresh, (first, moved, last, other)):
        assert run.rank == ordering.rank(run.seniority_us, run.priority, queue.step_us, run.penalty_s)
    queue = queues.change_queue(queue, manager, "manager", fair_share_minutes=None)
    assert names(queue) == ["moved", "first", "last", "other"]
    assert not Run.objects.exclude(penalty_s=0, penalty_basis={}).exists()
    assert not MemberShare.objects.exists()


def test_a_moved_run_stays_where_it_was_put_when_others_submit_and_shares_change(
    project: Project, member: User, bob: User, manager: User, fair: Queue
) -> None:
    for name in ("a", "b", "c"):
        make_run(project, member, name, **gpus(2))
    last = make_run(project, bob, "d", **gpus(1))
    assert names(fair) == ["a", "d", "b", "c"]
    reorder.move([last], manager, "manager", MoveTarget("top"))
    used(fair, bob, 5000)
    queues.count_shares(timezone.now())
    make_run(project, member, "e", **gpus(1))
    assert [name for name in names(fair) if name != "e"] == ["d", "a", "b", "c"]


def test_a_dependent_run_gets_its_penalty_when_it_enters(
    project: Project, member: User, bob: User, fair: Queue
) -> None:
    make_host(gpus=1)
    first = make_run(project, member, "prepare")
    after = make_run(project, member, "train", after="prepare", **gpus(4))
    assert (after.penalty_s, loads(fair)) == (0, {})
    make_run(project, bob, "other", **gpus(2))
    make_run(project, member, "large", **gpus(12))
    place_all()
    start(placed_job(first))
    attempts.end_job(placed_job(first).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    dependencies.settle(timezone.now())
    assert fresh(after).penalty_s == HOUR * 3 // 4
    assert loads(fair)["ada"].queued_gpus == 16


def test_a_change_of_queue_takes_the_share_of_the_new_queue(
    project: Project, member: User, bob: User, fair: Queue
) -> None:
    services.ensure_queue(project, "night")
    make_run(project, bob, "other", **gpus(2))
    make_run(project, member, "large", **gpus(12))
    run = make_run(project, member, "mine", **gpus(4))
    assert run.penalty_s == HOUR * 3 // 4
    there = services.set_queue(run, member, "member", "night")
    assert (there.penalty_s, there.rank) == (0, ordering.rank(there.seniority_us, there.priority, there.queue.step_us))
    queues.count_shares(timezone.now())
    back = services.set_queue(there, member, "member", "default")
    assert back.penalty_s == HOUR * 3 // 4
    assert back.rank == ordering.rank(back.seniority_us, back.priority, fair.step_us, back.penalty_s)


def test_a_plan_shows_the_position_that_the_penalty_gives(
    project: Project, member: User, bob: User, fair: Queue
) -> None:
    used(fair, member, 100)
    queues.count_shares(timezone.now())
    make_run(project, bob, "other", priority=51, **gpus(4))
    submission = services.Submission({"type": "task", "commands": ["true"], "priority": 53, **gpus(4)})
    planned = plan(project, member, "member", submission)
    run, _made = services.submit(project, member, "member", submission)
    assert (planned.position, names(fair)) == (1, [run.name, "other"])
    assert (planned.share.seconds, planned.share.basis) == (run.penalty_s, run.penalty_basis)
    lower = services.Submission({"type": "task", "commands": ["true"], "priority": 51, **gpus(4)})
    assert plan(project, member, "member", lower).position == 3


def queries_of(call: Any) -> int:
    with CaptureQueriesContext(
        connection,
    ) as queries:
        call()
    return len(queries)


def test_the_statements_do_not_grow_with_the_runs_that_wait(
    project: Project, member: User, bob: User, manager: User, fair: Queue
) -> None:
    def measured() -> tuple[int, int, int]:
        submission = services.Submission({"type": "task", "commands": ["true"], **gpus(1)})
        return (
            queries_of(lambda: services.submit(project, member, "member", submission)),
            queries_of(lambda: queues.count_shares(timezone.now())),
            queries_of(lambda: queues.change_queue(fair, manager, "manager", fair_share_minutes=next(minutes))),
        )

    minutes = iter(range(61, 70))
    for user in (member, bob):
        make_run(project, user, **gpus(2))
    few = measured()
    for number in range(40):
        make_run(project, (member, bob)[number % 2], **gpus(number % 5))
    assert measured() == few
