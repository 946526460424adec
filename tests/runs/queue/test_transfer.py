"""Moving runs to another queue: the preview says what happens, all or nothing does, and counters and past agree."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models import F
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid, NotFound, Stale
from dstackweb.runs import recount, services
from dstackweb.runs.concurrency import etag
from dstackweb.runs.models import MemberShare, PastPlace, Queue, Run
from dstackweb.runs.queue import queues, transfer
from dstackweb.runs.selectors import in_order
from tests.factories import join, make_run, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def manager(project: Project) -> User:
    return join(project, make_user("mona"), "manager")


@pytest.fixture
def night(project: Project) -> Queue:
    return services.ensure_queue(project, "night")


@pytest.fixture
def bob(project: Project) -> User:
    return join(project, make_user("bob"), "member")


@pytest.fixture
def runs(project: Project, member: User, bob: User, night: Queue) -> dict[str, Run]:
    """In the default queue a, b and c of `member` and d of bob; in night x (priority 60), then y and z."""
    made = {name: make_run(project, bob if name == "d" else member, name) for name in "abcd"}
    made |= {name: make_run(project, bob, name, queue="night", priority=60 if name == "x" else 50) for name in "xyz"}
    return made


def order(queue: Queue | str = "default") -> str:
    name = queue if isinstance(queue, str) else queue.name
    return "".join(in_order(Queue.objects.get(name=name)).values_list("name", flat=True))


def test_the_preview_says_where_runs_come_and_writes_nothing(member: User, runs: dict[str, Run]) -> None:
    versions = list(Run.objects.order_by("pk").values_list("version", flat=True))
    shown = transfer.preview([runs["c"], runs["a"]], member, "member", "night")
    found = {change.run.name: (change.position_before, change.position_after) for change in shown.changes}
    assert found == {"a": (1, 2), "c": (3, 3)}
    assert (shown.slips_total, shown.is_reordered) == (2, False)
    assert shown.beside is not None
    assert shown.beside.name == "y"
    assert list(Run.objects.order_by("pk").values_list("version", flat=True)) == versions
    done = transfer.transfer([runs["c"], runs["a"]], member, "member", "night")
    assert {change.run.name: change.position_after for change in done.changes} == {"a": 2, "c": 3}
    assert (order("night"), order()) == ("xacyz", "bd")


def test_all_or_none_are_moved(member: User, runs: dict[str, Run]) -> None:
    seen = {run.pk: etag(run) for run in runs.values()}
    with pytest.raises(Forbidden, match="belongs to bob"):
        transfer.transfer([runs["a"], runs["d"]], member, "member", "night")
    services.set_priority(runs["b"], member, "member", 51)
    with pytest.raises(Stale, match="run b was changed"):
        transfer.transfer([runs["a"], runs["b"]], member, "member", "night", seen)
    services.stop(runs["c"], member, "member")
    with pytest.raises(Conflict, match="run c is terminated"):
        transfer.transfer([runs["a"], runs["c"]], member, "member", "night")
    assert (order(), order("night")) == ("bad", "xyz")


def test_what_refuses_a_move_is_said_before(project: Project, member: User, runs: dict[str, Run], night: Queue) -> None:
    for act in (transfer.preview, transfer.transfer):
        with pytest.raises(Invalid, match="no queue 'noon'"):
            act([runs["a"]], member, "member", "noon")
        with pytest.raises(Invalid, match="at least one run"):
            act([], member, "member", "night")
        with pytest.raises(Stale, match="in queue night"):
            act([runs["a"], runs["x"]], member, "manager", "default")
        assert act([runs["a"]], member, "member", "default").changes == []
    Queue.objects.filter(pk=night.pk).update(draining=True)
    for act in (transfer.preview, transfer.transfer):
        with pytest.raises(Conflict, match="night is draining"):
            act([runs["a"]], member, "member", "night")
    assert order("night") == "xyz"


def test_all_runs_of_a_member_are_found(manager: User, member: User, runs: dict[str, Run], night: Queue) -> None:
    queue = runs["a"].queue
    found = transfer.waiting_of(queue, member.username)
    transfer.transfer(found, manager, "manager", "night")
    assert (order(), order("night")) == ("d", "xabcyz")
    with pytest.raises(NotFound, match="no run of"):
        transfer.waiting_of(queue, member.username)


def test_runs_keep_their_order_where_the_share_of_their_member_grows_with_each(
    project: Project, member: User, runs: dict[str, Run], night: Queue
) -> None:
    """A run for one GPU behind one for eight would have less penalty, and pass it."""
    Queue.objects.filter(pk=night.pk).update(fair_share_minutes=600)
    MemberShare.objects.create(queue=night, user=member, used_gpu_ms=90 * 3_600_000)
    gpus = {name: make_run(project, member, name, resources={"gpu": n}) for name, n in (("e", 1), ("f", 8), ("g", 1))}
    shown = transfer.preview(list(gpus.values()), member, "member", "night")
    assert not shown.is_reordered
    done = transfer.transfer(list(gpus.values()), member, "member", "night")
    assert [change.penalty_s for change in done.changes] == [change.penalty_s for change in shown.changes]
    assert all(change.penalty_s for change in done.changes)
    assert order("night").replace("x", "").replace("y", "").replace("z", "") == "efg"
    assert MemberShare.objects.get(queue=night, user=member).queued_gpus == 10


def test_another_ageing_step_may_reorder_them_and_the_preview_says_so(
    project: Project, member: User, runs: dict[str, Run], night: Queue
) -> None:
    """`old` has waited for longer than a point of priority is worth here; there, waiting is worth nothing."""
    old, new = make_run(project, member, "o"), make_run(project, member, "n", priority=51)
    waited = 2 * 3600 * 1_000_000
    Run.objects.filter(pk=old.pk).update(seniority_us=F("seniority_us") - waited, rank=F("rank") - waited)
    assert order() == "onabcd"
    both = list(Run.objects.filter(pk__in=[old.pk, new.pk]).select_related("queue", "project", "user"))
    assert not transfer.preview(both, member, "member", "night").is_reordered
    queues.change_queue(night, member, "manager", ageing_minutes=None)
    shown = transfer.preview(both, member, "member", "night")
    assert shown.is_reordered
    assert {change.run.name: change.position_after for change in shown.changes} == {"n": 2, "o": 3}
    transfer.transfer(both, member, "member", "night")
    assert order("night") == "xnoyz"


def test_counters_shares_and_the_past_agree_afterwards(
    project: Project, member: User, runs: dict[str, Run], night: Queue
) -> None:
    before = timezone.now() - timedelta(days=1)
    transfer.transfer([runs["a"], runs["b"]], member, "member", "night")
    places = PastPlace.objects.filter(queue=runs["a"].queue, until__gt=before).values_list("run_id", "ended_by")
    assert sorted(places) == [(runs["a"].pk, "queue"), (runs["b"].pk, "queue")]
    assert list(recount.differences()) == []
    kinds = runs["a"].events.order_by("-id").values_list("kind", "data")[0]
    assert kinds == ("queue", {"from": "default", "to": "night"})
