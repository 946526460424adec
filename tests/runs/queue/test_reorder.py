"""Moving runs by hand, undoing it, and refusals (R24–R26)."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, TokenLimit, TokenScope, User
from dstackweb.lib.errors import Conflict, Forbidden, Invalid, Stale
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Move, Run
from dstackweb.runs.queue import move_preview as line, ordering, queues, reorder
from dstackweb.runs.queue.move_preview import MoveTarget
from dstackweb.runs.rows import queue_rows
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import lock_run, move_run
from dstackweb.wording import events as event_words, queue as move_words
from tests.factories import join, make_host, make_project, make_run, make_user, place_all

pytestmark = pytest.mark.django_db


def order(project: Project, queue: str = "default") -> list[str]:
    rows = queue_rows(services.ensure_queue(project, queue))
    assert [row.position for row in rows] == list(range(1, len(rows) + 1))
    for run in Run.objects.filter(uid__in=[row.id for row in rows]).select_related("queue"):
        assert run.rank == ordering.rank(run.seniority_us, run.priority, run.queue.step_us, run.penalty_s)
    return [row.name for row in rows]


@pytest.fixture
def manager(project: Project) -> User:
    return join(project, make_user("mona"), "manager")


@pytest.fixture
def bob(project: Project) -> User:
    return join(project, make_user("bob"))


@pytest.fixture
def runs(project: Project, member: User, bob: User) -> dict[str, Run]:
    """a, c and e are ada's; b and d are bob's."""
    return {name: make_run(project, user, name) for name, user in zip("abcde", [member, bob] * 3, strict=False)}


def again(run: Run) -> Run:
    return Run.objects.select_related("queue", "project", "user").get(pk=run.pk)


@pytest.mark.parametrize(
    ("moved", "target", "after"),
    [
        ("e", ("top", None), "eabcd"),
        ("a", ("bottom", None), "bcdea"),
        ("e", ("before", "b"), "aebcd"),
        ("a", ("after", "d"), "bcdae"),
        ("bd", ("top", None), "bdace"),
        ("ae", ("after", "c"), "bcaed"),
        ("ba", ("bottom", None), "cdeab"),
        ("c", ("after", "b"), "abcde"),
    ],
)
def test_a_managers_move_puts_runs_exactly_there(
    project: Project, manager: User, runs: dict[str, Run], moved: str, target: tuple[Any, str | None], after: str
) -> None:
    where, anchor = target
    target_ = MoveTarget(where, runs[anchor] if anchor else None)
    effect = reorder.preview([runs[name] for name in moved], manager, "manager", target_)
    assert order(project) == list("abcde")
    done = reorder.move([runs[name] for name in moved], manager, "manager", target_)
    assert order(project) == list(after)
    assert [vars(change) for change in effect.changes] == [vars(change) for change in done.changes]
    for change in done.changes:
        assert change.position_before == "abcde".index(change.run.name) + 1
        assert change.position_after == after.index(change.run.name) + 1
        assert change.priority_after == again(change.run).priority
    others = [name for name in "abcde" if name not in moved]
    slipped = {name for name in others if "abcde".index(name) != after.index(name)}
    assert done.slips_total == len(slipped)
    assert {change.run.name for change in done.slips} <= slipped
    for change in done.slips:
        assert change.position_before == "abcde".index(change.run.name) + 1
        assert change.position_after == after.index(change.run.name) + 1


def test_a_move_is_recorded_on_the_run_and_its_timeline(manager: User, runs: dict[str, Run]) -> None:
    reorder.move([runs["e"]], manager, "manager", MoveTarget("before", runs["b"]))
    moved = again(runs["e"])
    assert moved.moved_by == manager
    assert moved.moved_at is not None
    event = moved.events.get(kind="moved")
    assert event.actor == manager
    assert event.data == {"from": 5, "to": 2, "priority": [50, 50], "target": "before", "anchor": "b"}
    assert not runs["b"].events.filter(kind="moved").exists()


def test_far_back_a_move_is_recorded_with_its_target_and_without_positions(
    project: Project, manager: User, member: User, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reorder, "MAX_COUNTED", 2)
    target = MoveTarget("before", runs["d"])
    assert [change.position_after for change in reorder.preview([runs["e"]], manager, "manager", target).changes] == [4]
    back = reorder.move([runs["e"]], manager, "manager", target)
    assert order(project) == ["a", "b", "c", "e", "d"]
    assert [(change.position_before, change.position_after) for change in back.changes] == [(None, None)]
    assert (back.slips, back.slips_total) == ([], None)
    assert move_words.moved(back) == "e moved"
    assert event_words.event_text(runs["e"].events.get(kind="moved"), 1) == "moved before d"
    front = reorder.move([runs["e"]], manager, "manager", MoveTarget("top"))
    assert move_words.moved(front) == "e moved to position 1, priority 50 → 51"
    mine = reorder.move([runs["a"]], member, "member", MoveTarget("bottom"))
    assert (mine.changes[0].position_after, mine.slips_total) == (None, None)
    several = reorder.move([runs["a"], runs["b"]], manager, "manager", MoveTarget("bottom"))
    assert move_words.moved(several) == "2 runs moved to positions 4–5"
    assert several.move_id is not None
    undone = reorder.undo(several.move_id, manager)
    assert sorted(change.position_after or 0 for change in undone.changes) == [0, 3]


def test_a_move_needs_few_statements_however_many_wait(
    manager: User, runs: dict[str, Run], django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(18):  # with a savepoint around it, here
        reorder.move([runs["e"]], manager, "manager", MoveTarget("before", runs["b"]))


def test_a_shifted_neighbour_is_restored_by_undo_and_has_no_event(project: Project, manager: User) -> None:
    first, second = (make_run(project, manager, name, role="manager", priority=100) for name in "ab")
    before = {run.pk: (run.seniority_us, run.rank) for run in Run.objects.all()}
    done = reorder.move([second], manager, "manager", MoveTarget("top"))
    assert order(project) == ["b", "a"]
    assert again(first).seniority_us == first.seniority_us + 1
    assert [event.kind for event in first.events.all()] == ["submitted"]
    assert done.move_id is not None
    reorder.undo(done.move_id, manager)
    assert {run.pk: (run.seniority_us, run.rank) for run in Run.objects.all()} == before


def test_a_members_move_keeps_the_positions_of_other_members_runs(
    project: Project, member: User, runs: dict[str, Run]
) -> None:
    effect = reorder.preview([runs["e"]], member, "member", MoveTarget("top"))
    done = reorder.move([runs["e"]], member, "member", MoveTarget("top"))
    assert order(project) == ["e", "b", "a", "d", "c"]
    assert done.exact
    assert [(c.run.name, c.position_before, c.position_after) for c in done.changes] == [("e", 5, 1)]
    assert [(c.run.name, c.position_before, c.position_after) for c in done.slips] == [("a", 1, 3), ("c", 3, 5)]
    assert [vars(change) for change in effect.slips] == [vars(change) for change in done.slips]


def crowd(project: Project, rnd: random.Random, people: list[User]) -> None:
    """Waiting runs of these people at few ranks, some of them equal."""
    queue = services.ensure_queue(project)
    queue.ageing_minutes = rnd.choice([None, 1, 30])
    queue.fair_share_minutes = rnd.choice([None, 1, 120])
    queue.save()
    start, spread = queues.now_us() - 10_000_000, rnd.choice([3, 100, 5_000_000])
    for _ in range(rnd.randint(2, 10)):
        run = make_run(project, rnd.choice(people))
        seniority, priority = start + rnd.randint(0, spread), rnd.choice([50, 50, 51, 70])
        penalty = rnd.choice([0, rnd.randint(0, queue.max_penalty_s)])
        rank = ordering.rank(seniority, priority, queue.step_us, penalty)
        Run.objects.filter(pk=run.pk).update(seniority_us=seniority, priority=priority, penalty_s=penalty, rank=rank)


def among_own(line: list[Run], user: User, moved: set[int], gap: int) -> tuple[list[int], bool]:
    """The order after a member's move to the gap before `line[gap]`, by brute force, and whether it is exact."""
    at = [index for index, run in enumerate(line) if run.pk in moved]
    first, last = min(at[0], gap), max(at[-1] + 1, gap)
    places = [index for index in range(first, last) if line[index].user_id == user.pk]
    staying = [index for index in places if index not in at]
    order = [*(index for index in staying if index < gap), *at, *(index for index in staying if index >= gap)]
    ids = [run.pk for run in line]
    for place, index in zip(places, order, strict=True):
        ids[place] = line[index].pk
    wanted = gap - sum(index < gap for index in at)
    return ids, [ids.index(line[index].pk) for index in at] == list(range(wanted, wanted + len(at)))


@pytest.mark.parametrize("seed", range(25))
def test_a_members_move_equals_swapping_their_runs_among_their_own_positions(
    project: Project, member: User, bob: User, seed: int
) -> None:
    """Whether only own runs are passed, which then stay as they are, or those of others as well."""
    rnd = random.Random(seed)
    crowd(project, rnd, [member, member, member, bob])
    queue = services.ensure_queue(project)
    for _ in range(5):
        line = list(selectors.in_order(queue).select_related("queue", "project", "user"))
        mine = [run for run in line if run.user == member]
        moved = rnd.sample(mine, min(len(mine), rnd.choice([1, 1, 2])))
        where = rnd.choice(["top", "bottom", "before", "after"])
        anchors = [run for run in line if run not in moved]
        if not moved or not anchors:
            continue
        anchor = rnd.choice(anchors) if where in ("before", "after") else None
        gap = {"top": 0, "bottom": len(line)}.get(where, 0)
        gap = gap if anchor is None else line.index(anchor) + (where == "after")
        expected, exact = among_own(line, member, {run.pk for run in moved}, gap)
        try:
            effect = reorder.move(moved, member, "member", MoveTarget(where, anchor))
        except (Forbidden, Conflict):
            continue
        now = list(selectors.in_order(queue))
        assert [run.pk for run in now] == expected
        others = {run.pk: (run.rank, run.seniority_us) for run in line if run.user == bob}
        assert {run.pk: (run.rank, run.seniority_us) for run in now if run.user == bob} == others
        if effect.changes:
            assert effect.exact == exact
            slipped = [run for run in line if expected.index(run.pk) != line.index(run)]
            assert effect.slips_total == len([run for run in slipped if run not in moved])


@pytest.mark.parametrize("seed", range(25))
def test_a_managers_move_is_exact_whatever_the_penalties_and_is_undone_wholly(
    project: Project, member: User, bob: User, manager: User, seed: int
) -> None:
    rnd = random.Random(seed)
    crowd(project, rnd, [member, member, bob])
    queue = services.ensure_queue(project)
    fields = ("pk", "seniority_us", "priority", "penalty_s", "rank", "moved_at")
    for _ in range(5):
        before = list(Run.objects.order_by("pk").values_list(*fields))
        line = list(selectors.in_order(queue).select_related("queue", "project", "user"))
        moved = line.pop(rnd.randrange(len(line)))
        gap = rnd.randint(0, len(line))
        target = MoveTarget("before", line[gap]) if gap < len(line) else MoveTarget("bottom")
        done = reorder.move([moved], manager, "manager", target)
        assert order(project) == [run.name for run in (*line[:gap], moved, *line[gap:])]
        now = list(selectors.in_order(queue))
        assert all(0 <= run.penalty_s <= queue.max_penalty_s for run in now)
        assert all(run.seniority_us <= queues.now_us() for run in now)
        if done.move_id is not None and rnd.random() < 0.5:
            reorder.undo(done.move_id, manager)
            assert list(Run.objects.order_by("pk").values_list(*fields)) == before


def test_a_member_with_very_many_runs_moves_one_past_them_as_fast_as_past_a_few(
    project: Project, member: User, bob: User
) -> None:
    ahead = make_run(project, bob)
    run = make_run(project, member, "last")
    start = ahead.seniority_us + 1
    Run.objects.bulk_create(
        Run(
            project=project, queue=run.queue, user=member, name=f"sweep-{number}", spec=run.spec, shape=run.shape,
            seniority_us=start + number, rank=ordering.rank(start + number, 50, run.queue.step_us),
        )
        for number in range(500)
    )  # fmt: skip
    Run.objects.filter(pk=run.pk).update(seniority_us=start + 900, rank=run.rank - run.seniority_us + start + 900)
    moved = reorder.move([again(run)], member, "member", MoveTarget("top"))
    assert (moved.slips_total, moved.exact) == (500, False)
    assert [(change.position_before, change.position_after) for change in moved.changes] == [(502, 2)]
    assert len(Move.objects.get().changes) == 1


def test_a_members_run_moves_to_the_nearest_of_their_own_positions(
    project: Project, member: User, runs: dict[str, Run]
) -> None:
    done = reorder.move([runs["e"]], member, "member", MoveTarget("before", runs["b"]))
    assert order(project) == ["a", "b", "e", "d", "c"]
    assert not done.exact


def test_a_members_move_past_only_other_members_runs_is_refused_with_the_reason(
    member: User, runs: dict[str, Run]
) -> None:
    with pytest.raises(Forbidden, match="only managers can move a run past them"):
        reorder.move([runs["c"]], member, "member", MoveTarget("before", runs["b"]))


def test_a_members_run_gets_no_priority_above_the_limit_for_members(
    project: Project, member: User, manager: User
) -> None:
    Project.objects.filter(pk=project.pk).update(member_max_priority=60)
    project.refresh_from_db()
    services.ensure_queue(project)
    project.queues.update(ageing_minutes=None)
    raised, other = make_run(project, member, "raised"), make_run(project, member, "other")
    services.set_priority(raised, manager, "manager", 95)
    with pytest.raises(Forbidden, match="run other would need priority 95 there; the maximum for members is 60"):
        reorder.move([other], member, "member", MoveTarget("top"))
    assert order(project) == ["raised", "other"]
    services.set_priority(raised, manager, "manager", 60)
    reorder.move([other], member, "member", MoveTarget("top"))
    assert order(project) == ["other", "raised"]
    assert (again(other).priority, again(raised).priority) == (60, 50)
    assert raised.events.filter(kind="priority").last().data == {"from": 60, "to": 50}


def test_members_move_only_their_own_runs_and_viewers_none(member: User, runs: dict[str, Run]) -> None:
    with pytest.raises(Forbidden, match="belongs to bob"):
        reorder.move([runs["a"], runs["b"]], member, "member", MoveTarget("top"))
    with pytest.raises(Forbidden):
        reorder.move([runs["a"]], member, "viewer", MoveTarget("bottom"))


def test_undo_restores_all_of_a_run(project: Project, manager: User, member: User, runs: dict[str, Run]) -> None:
    reorder.move([runs["e"]], manager, "manager", MoveTarget("before", runs["b"]))
    fields = ("seniority_us", "priority", "rank", "moved_at", "moved_by_id")
    before = list(Run.objects.order_by("pk").values_list(*fields))
    done = reorder.move([runs["e"], runs["d"]], manager, "manager", MoveTarget("top"))
    assert done.move_id is not None
    undone = reorder.undo(done.move_id, manager)
    assert list(Run.objects.order_by("pk").values_list(*fields)) == before
    assert order(project) == ["a", "e", "b", "c", "d"]
    assert {(c.run.name, c.position_before, c.position_after) for c in undone.changes} == {("d", 2, 5), ("e", 1, 2)}
    assert runs["d"].events.filter(kind="move_undone", actor=manager).count() == 1
    with pytest.raises(Conflict, match="already"):
        reorder.undo(done.move_id, manager)


def test_a_change_of_priority_can_be_undone_too(project: Project, member: User, runs: dict[str, Run]) -> None:
    done = reorder.set_priorities([runs["c"], runs["e"]], member, "member", 60)
    assert order(project) == ["c", "e", "a", "b", "d"]
    assert done.move_id is not None
    undone = reorder.undo(done.move_id, member)
    assert order(project) == list("abcde")
    assert {(c.run.name, c.priority_before, c.priority_after) for c in undone.changes} == {("c", 60, 50), ("e", 60, 50)}
    assert [event.data for event in runs["c"].events.filter(kind="priority")] == [
        {"from": 50, "to": 60},
        {"from": 60, "to": 50},
    ]


def test_changing_a_placed_runs_priority_keeps_the_last_move_undoable(member: User, runs: dict[str, Run]) -> None:
    make_host(cpus=1)
    assert place_all() == 1
    moved = reorder.move([runs["e"]], member, "member", MoveTarget("before", runs["c"]))
    assert reorder.set_priorities([again(runs["a"])], member, "member", 40).move_id is None
    latest = reorder.undoable(runs["a"].queue, member)
    assert latest is not None
    assert latest.pk == moved.move_id


def test_undo_expires_after_some_seconds(member: User, runs: dict[str, Run]) -> None:
    done = reorder.set_priorities([runs["a"]], member, "member", 60)
    queue = runs["a"].queue
    assert (offered := reorder.undoable(queue, member)) is not None
    assert offered.pk == done.move_id
    Move.objects.update(at=timezone.now() - dt.timedelta(seconds=60))
    assert reorder.undoable(queue, member) is None
    assert done.move_id is not None
    with pytest.raises(Conflict, match="10 seconds"):
        reorder.undo(done.move_id, member)


def test_undo_is_offered_only_to_the_user_who_made_the_move(member: User, manager: User, runs: dict[str, Run]) -> None:
    done = reorder.set_priorities([runs["a"]], member, "member", 60)
    assert done.move_id is not None
    with pytest.raises(Forbidden):
        reorder.undo(done.move_id, manager)


def test_undo_is_refused_once_one_of_its_runs_was_changed(
    project: Project, member: User, manager: User, runs: dict[str, Run]
) -> None:
    done = reorder.move([runs["e"]], member, "member", MoveTarget("top"))
    services.set_priority(runs["c"], manager, "manager", 70)
    now = order(project)
    assert done.move_id is not None
    with pytest.raises(Stale, match="run c was changed by mona"):
        reorder.undo(done.move_id, member)
    assert order(project) == now


def test_undo_is_refused_once_a_run_has_left_the_queue(project: Project, member: User, runs: dict[str, Run]) -> None:
    done = reorder.move([runs["e"]], member, "member", MoveTarget("top"))
    services.stop(runs["a"], member, "member")
    assert done.move_id is not None
    with pytest.raises(Stale, match="run a is terminated now"):
        reorder.undo(done.move_id, member)


def test_a_stale_etag_refuses_the_whole_move_and_says_what_changed(
    project: Project, member: User, manager: User, runs: dict[str, Run]
) -> None:
    seen = {run.pk: services.etag(run) for run in runs.values()}
    services.set_priority(runs["c"], manager, "manager", 40)
    now = order(project)
    with pytest.raises(Stale, match="run c was changed by mona since you looked: its priority is 40") as refused:
        reorder.move([runs["a"], runs["c"]], member, "member", MoveTarget("bottom"), seen)
    assert refused.value.extra["etag"] == services.etag(again(runs["c"]))
    assert order(project) == now
    with pytest.raises(Stale, match="mona"):
        reorder.set_priorities([runs["a"], runs["c"]], member, "member", 60, seen)
    assert again(runs["a"]).priority == 50


def test_a_stale_edit_names_the_member_whose_move_shifted_the_run(
    project: Project, member: User, runs: dict[str, Run]
) -> None:
    seen = services.etag(again(runs["a"]))
    reorder.move([runs["e"]], member, "member", MoveTarget("top"))
    with pytest.raises(Stale, match="run a was changed by ada"):
        services.set_priority(runs["a"], member, "member", 60, seen)


def test_only_runs_that_wait_in_the_queue_are_moved(project: Project, manager: User, runs: dict[str, Run]) -> None:
    make_host(cpus=1)
    place_all()
    assert again(runs["a"]).status == RunStatus.PROVISIONING
    with pytest.raises(Conflict, match="run a has left the queue: it is provisioning"):
        reorder.move([runs["a"], runs["e"]], manager, "manager", MoveTarget("top"))
    with pytest.raises(Conflict, match="run a has left the queue"):
        reorder.preview([runs["e"]], manager, "manager", MoveTarget("before", runs["a"]))
    move_run(lock_run(runs["a"].pk), RunStatus.PENDING, now=timezone.now())
    with pytest.raises(Conflict, match=r"run a is pending: it has no position until"):
        reorder.move([runs["a"]], manager, "manager", MoveTarget("bottom"))
    services.stop(runs["b"], manager, "manager")
    with pytest.raises(Conflict, match="already ended"):
        reorder.move([runs["b"]], manager, "manager", MoveTarget("bottom"))


def test_a_members_run_stopped_while_its_move_is_planned_is_a_conflict(
    member: User, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop doesn't wait for the queue's row."""
    cut = line._cut

    def stop_first(*args: Any) -> Any:
        services.stop(runs["e"], member, "member")
        return cut(*args)

    monkeypatch.setattr(line, "_cut", stop_first)
    with pytest.raises(Conflict, match="run e has just left the queue"):
        reorder.move([runs["e"]], member, "member", MoveTarget("top"))


def test_a_move_whose_shifted_neighbour_is_stopped_concurrently_changes_nothing(
    project: Project, member: User, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = reorder.plan_reordering

    def stop_then(*args: Any) -> Any:
        planned = plan(*args)
        services.stop(runs["c"], member, "member")
        return planned

    monkeypatch.setattr(reorder, "plan_reordering", stop_then)
    with pytest.raises(Conflict, match="run c has just left the queue"):
        reorder.move([runs["e"]], member, "member", MoveTarget("top"))
    assert order(project)[:2] == ["a", "b"]


def test_nonsense_is_refused(manager: User, runs: dict[str, Run]) -> None:
    with pytest.raises(Invalid):
        reorder.move([], manager, "manager", MoveTarget("top"))
    with pytest.raises(Invalid, match="next to itself"):
        reorder.move([runs["a"]], manager, "manager", MoveTarget("after", runs["a"]))
    with pytest.raises(Invalid, match="name the run"):
        reorder.move([runs["a"]], manager, "manager", MoveTarget("after"))


def test_runs_of_two_queues_are_not_moved_together(project: Project, manager: User, runs: dict[str, Run]) -> None:
    services.ensure_queue(project, "night")
    other = services.set_queue(runs["c"], manager, "manager", "night")
    with pytest.raises(Invalid, match="different queues"):
        reorder.move([runs["a"], other], manager, "manager", MoveTarget("top"))
    with pytest.raises(Stale, match="in queue night now"):
        reorder.move([runs["c"]], manager, "manager", MoveTarget("top"))
    with pytest.raises(Conflict, match="no longer in queue default"):
        reorder.move([runs["a"]], manager, "manager", MoveTarget("before", other))


def test_a_run_that_changes_its_queue_stays_ahead_of_later_submissions(
    project: Project, member: User, runs: dict[str, Run]
) -> None:
    services.ensure_queue(project, "night")
    moved = services.set_queue(runs["c"], member, "member", "night")
    assert again(moved).seniority_us <= again(moved).queue.last_seniority_us
    make_run(project, member, "later", queue="night")
    assert order(project, "night") == ["c", "later"]


def test_a_preview_writes_nothing(manager: User, runs: dict[str, Run]) -> None:
    versions = list(Run.objects.order_by("pk").values_list("version", flat=True))
    reorder.preview([runs["e"]], manager, "manager", MoveTarget("top"))
    assert list(Run.objects.order_by("pk").values_list("version", flat=True)) == versions
    assert not Move.objects.exists()


def test_who_is_no_member_any_more_or_has_a_token_of_another_project_cannot_undo(
    project: Project, member: User, runs: dict[str, Run]
) -> None:
    done = reorder.set_priorities([runs["c"]], member, "member", 60)
    assert done.move_id is not None
    elsewhere = make_project("elsewhere")
    join(elsewhere, member, "member")
    member.token_limit = TokenLimit(TokenScope.ADMIN, elsewhere.pk)
    with pytest.raises(Forbidden):
        reorder.undo(done.move_id, member)
    member.token_limit = None
    member.memberships.filter(project=project).delete()
    with pytest.raises(Forbidden):
        reorder.undo(done.move_id, member)
    assert order(project) == ["c", "a", "b", "d", "e"]
