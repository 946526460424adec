"""Limits of queues beside brute force, and as passes keep them (R26)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.runs.models import Queue, Run, Verdict
from dstackweb.runs.selectors import blockers_of, why
from dstackweb.runs.states import PLACED, RunStatus
from dstackweb.scheduler.placement.limits import QueueLimits, QueueUsage, exceeded_limits, queue_wide_limit
from dstackweb.scheduler.processes.housekeeping import keep_house
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
