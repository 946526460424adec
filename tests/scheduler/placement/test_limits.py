"""Limits of queues beside brute force, and as passes keep them (R26)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.runs import services
from dstackweb.runs.models import Queue, QueueCount, Run, Verdict
from dstackweb.runs.selectors import blockers_of, why
from dstackweb.runs.states import PLACED, RunStatus
from dstackweb.scheduler.passes.loading import usage_of
from dstackweb.scheduler.placement.limits import QueueLimits, QueueUsage, exceeded_limits, queue_wide_limit
from dstackweb.scheduler.processes.retention import keep_house
from dstackweb.wording import waiting
from tests.factories import join, make_host, make_run, make_user, place_all

limit = st.none() | st.integers(0, 6)


@given(
    st.builds(QueueLimits, limit, limit, limit, limit),
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(0, 3)), max_size=30),
)
def test_runs_that_exceed_no_limit_never_hold_more_than_it_in_sum(
    limits: QueueLimits, arrivals: list[tuple[int, int, int]]
) -> None:
    placed: list[tuple[int, int, int]] = []
    for queue, user, gpus in arrivals:
        tally = QueueUsage.of(placed)
        fits = not exceeded_limits(limits, tally, queue, user, gpus)
        then = [*placed, (queue, user, gpus)]
        mine = [run for run in then if run[0] == queue]
        own = [run for run in mine if run[1] == user]
        within = all(
            most is None or value <= most
            for most, value in [
                (limits.max_running, len(mine)),
                (limits.max_gpus, sum(run[2] for run in mine) if gpus else 0),
                (limits.max_running_per_user, len(own)),
                (limits.max_gpus_per_user, sum(run[2] for run in own) if gpus else 0),
            ]
        )
        assert fits == within
        if queue_wide_limit(limits, tally, queue):
            assert not fits
        if fits:
            placed = then


def feasible(limits: dict[int, QueueLimits], held: dict[int, int]) -> bool:
    """Whether each held GPU can be one that its queue keeps or one that any queue lends: for each set of queues (Hall),
    and within what each may borrow."""
    lent = sum(each.lends for each in limits.values())
    sets = (some for n in range(1, len(limits) + 1) for some in combinations(limits, n))
    return all(
        sum(held[queue] for queue in some) <= sum(limits[queue].keeps for queue in some) + lent for some in sets
    ) and all(
        each.borrow_gpus is None or held[queue] <= (each.max_gpus or 0) + each.borrow_gpus
        for queue, each in limits.items()
    )


@given(
    st.lists(st.tuples(st.integers(0, 4), limit, limit), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=25),
)
def test_queues_of_a_cohort_use_all_that_they_lend_each_other_and_no_more(
    settings: list[tuple[int, int | None, int | None]], arrivals: list[tuple[int, int, bool]]
) -> None:
    """A run starts exactly where the sum and its queue's own bounds allow it, also after others have ended."""
    limits = {
        queue: QueueLimits(max_gpus=most, cohort=(1, "team"), borrow_gpus=borrow, lend_gpus=lend)
        for queue, (most, borrow, lend) in enumerate(settings)
    }
    tally = QueueUsage.of([], limits)
    placed: list[tuple[int, int, int]] = []
    for queue, gpus, ends in arrivals:
        if ends and placed:
            tally.remove(*placed.pop(0))
        if queue not in limits or not gpus:
            continue
        held = {each: sum(run[2] for run in placed if run[0] == each) for each in limits}
        waits = exceeded_limits(limits[queue], tally, queue, 1, gpus)
        assert (waits == []) == feasible(limits, held | {queue: held[queue] + gpus})
        alone = feasible(limits, dict.fromkeys(limits, 0) | {queue: gpus})
        assert any(wait.data["never"] for wait in waits) == (not alone)
        if not waits:
            placed.append((queue, 1, gpus))
            tally.add(queue, 1, gpus)
        again = QueueUsage.of(placed, limits)
        assert [cohort.used for cohort in again.cohorts.values()] == [one.used for one in tally.cohorts.values()]
        assert sum(run[2] for run in placed) <= sum(each.max_gpus or 0 for each in limits.values())


def test_a_queue_borrows_what_its_cohort_leaves_unused_and_gives_it_back(project: Project, member: User) -> None:
    make_host(gpus=4)
    for name in ("train", "eval"):
        Queue.objects.create(project=project, name=name, max_gpus=2, cohort="team")
        QueueCount.objects.create(queue=Queue.objects.get(name=name))
    runs = [make_run(project, member, f"t-{n}", queue="train", resources={"gpu": 1}) for n in range(5)]
    place_all()
    assert [fresh(run).status in PLACED for run in runs] == [True] * 4 + [False]
    other = make_run(project, member, "e-1", queue="eval", resources={"gpu": 1})
    place_all()
    reason, data = why(fresh(other))
    assert (reason, data["code"], data["used"], data["limit"]) == ("queue_limit", "cohort_gpus", 4, 4)
    assert str(waiting.reason(reason, data).text) == (
        "needs 1 of the GPUs that its cohort shares, of which 4 of 4 are in use"
    )
    train = Queue.objects.get(name="train")
    assert usage_of(train).borrowed(train.pk) == (2, [Queue.objects.get(name="eval").pk])
    services.stop(runs[0], member, "member", abort=True)
    services.stop(runs[4], member, "member")
    place_all()
    assert fresh(other).status in PLACED
    Queue.objects.filter(name="eval").update(lend_gpus=0)
    late = make_run(project, member, "t-late", queue="train", resources={"gpu": 1})
    place_all()
    assert fresh(late).status == RunStatus.SUBMITTED


def test_a_run_without_gpus_ignores_a_gpu_limit_lowered_below_current_usage() -> None:
    limits = QueueLimits(max_gpus=1, max_gpus_per_user=1)
    held = QueueUsage.of([(1, 1, 2)])
    assert exceeded_limits(limits, held, 1, 1, gpus=0) == []
    assert len(exceeded_limits(limits, held, 1, 1, gpus=1)) == 2


def fresh(run: Run) -> Run:
    return Run.objects.select_related("queue").get(pk=run.pk)


def reason(run: Run) -> tuple[str, dict[str, Any]]:
    return why(fresh(run))


def limited(project: Project, **limits: int | None) -> None:
    Queue.objects.filter(project=project).update(**limits)


@pytest.mark.django_db
def test_a_full_queue_waits_as_a_whole_until_a_run_of_it_has_ended(project: Project, member: User) -> None:
    make_host()
    limited(project, max_running=1)
    first, second = make_run(project, member), make_run(project, member, resources={"cpu": 2})
    assert place_all() == 1
    code, data = reason(second)
    assert code == "queue_limit"
    assert (data["code"], data["limit"], data["used"]) == ("max_running", 1, 1)
    assert Verdict.objects.get().shape == ""
    keep_house()
    assert Verdict.objects.exists()
    limited(project, max_running=2)
    assert place_all() == 1
    assert not Verdict.objects.exists()
    assert set(Run.objects.filter(pk__in=[first.pk, second.pk]).values_list("status", flat=True)) == {"provisioning"}


@pytest.mark.django_db
def test_a_queue_whose_limit_is_lifted_shows_its_new_wait_reason(project: Project, member: User) -> None:
    make_host(cpus=2)
    limited(project, max_running=0)
    run = make_run(project, member, resources={"cpu": 9})
    place_all()
    assert [code for code, _data in blockers_of(fresh(run))] == ["impossible", "queue_limit"]
    assert "nothing can start" in waiting.reason(*blockers_of(fresh(run))[1]).text
    limited(project, max_running=None)
    place_all()
    assert [code for code, _data in blockers_of(fresh(run))] == ["impossible"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("limits", "placed", "code"),
    [
        ({"max_gpus": 3}, 3, "queue_limit"),
        ({"max_gpus_per_user": 1}, 2, "user_limit"),
        ({"max_running_per_user": 1}, 2, "user_limit"),
        ({"max_gpus": 3, "max_gpus_per_user": 1}, 2, "user_limit"),
    ],
)
def test_gpus_and_members_have_limits_of_their_own(
    project: Project, member: User, limits: dict[str, int], placed: int, code: str
) -> None:
    make_host(gpus=8)
    limited(project, **limits)
    grace = join(project, make_user("grace"))
    runs = [make_run(project, user, resources={"gpu": 1}) for _ in range(2) for user in (member, grace)]
    assert place_all() == placed
    assert place_all() == 0
    assert reason(runs[-1])[0] == code
    assert Run.objects.filter(status__in=PLACED).count() == placed


@pytest.mark.django_db
def test_under_a_gpu_limit_smaller_runs_start_and_too_large_ones_are_marked_as_never(
    project: Project, member: User
) -> None:
    make_host(gpus=8)
    limited(project, max_gpus=2)
    never = make_run(project, member, resources={"gpu": 3})
    one = make_run(project, member, resources={"gpu": 1})
    none = make_run(project, member)
    assert place_all() == 2
    assert {Run.objects.get(pk=run.pk).status for run in (one, none)} == {RunStatus.PROVISIONING}
    code, data = reason(never)
    assert (code, data["never"]) == ("queue_limit", True)
    assert "more than the queue's limit" in waiting.reason(code, data).text
