"""Moving runs by hand while everybody else is at work, half of the time with a judge in the same transaction.

Behind the queue's row nobody else can change its order: only leave it, or come back to it. So the runs that stand in it
before and after a move are compared among each other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.utils import timezone

from dstackweb.runs import selectors
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import queues, reorder
from dstackweb.runs.queue.move_preview import MoveEffect, MoveTarget
from dstackweb.runs.states import RunStatus
from tests.scheduler.stress.acts import Actor, anybody, manager, one_of

Line = dict[int, tuple[int, int, int]]
"""The waiting runs of a queue in their order: owner, seniority (µs) and priority by id."""


def move(rnd: random.Random) -> None:
    """One run or several, anywhere."""
    who = anybody(rnd)
    runs, target = _wanted(rnd, who)
    if rnd.random() < 0.5:
        reorder.move(runs, who.user, who.role, target)
        return
    with transaction.atomic():
        queue = queues.lock_queue(runs[0].queue_id)
        for run in runs:
            run.queue = queue  # its step may have become another since the run was read
        before = _line(queue)
        effect = reorder.preview(runs, who.user, who.role, target)
        moved = reorder.move(runs, who.user, who.role, target)
        after = _line(queue)
        if before.keys() == after.keys():
            expected = [(one.run.pk, one.priority_after, one.position_after) for one in effect.changes]
            done = [(one.run.pk, one.priority_after, one.position_after) for one in moved.changes]
            assert expected == done, f"expected {expected}, done {done}"
        _judge(who, runs, target, moved, before, after)


def undo(rnd: random.Random) -> None:
    """What somebody moved last; or a move and its undoing, after which all is as before."""
    who = anybody(rnd)
    if rnd.random() < 0.5:
        found = reorder.undoable(rnd.choice(list(Queue.objects.filter(project=who.project))), who.user)
        if found is None:
            raise Run.DoesNotExist
        reorder.undo(found.pk, who.user)
        return
    runs, target = _wanted(rnd, who)
    with transaction.atomic():
        queue = queues.lock_queue(runs[0].queue_id)
        before = _line(queue)
        moved = reorder.move(runs, who.user, who.role, target)
        if moved.move_id is not None:
            reorder.undo(moved.move_id, who.user)
        after = _line(queue)
        was, now = _both(before, after)
        assert was == now, f"undone, but {before} became {after}"
        assert all(before[pk] == after[pk] for pk in was), f"undone, but {before} became {after}"


def prioritise_many(rnd: random.Random) -> None:
    """A selection gets one priority, all or none."""
    who = anybody(rnd)
    runs, _target = _wanted(rnd, who)
    reorder.set_priorities(runs, who.user, who.role, rnd.randint(0, 90))


def rank_anew(rnd: random.Random) -> None:
    who = manager(rnd)
    queue = rnd.choice(list(Queue.objects.filter(project=who.project)))
    queues.change_queue(queue, who.user, who.role, ageing_minutes=rnd.choice([None, 1, 30, 240]))


def share(rnd: random.Random) -> None:
    """A manager changes the fair share, which sets the penalties of all but the moved runs; then shares are counted."""
    who = manager(rnd)
    queue = rnd.choice(list(Queue.objects.filter(project=who.project)))
    queues.change_queue(queue, who.user, who.role, fair_share_minutes=rnd.choice([None, 5, 60, 60]))
    queues.count_shares(timezone.now())


def limit(rnd: random.Random) -> None:
    """A manager raises or lowers limits while passes run; also below what is placed, which stops nothing."""
    who = manager(rnd)
    queue = rnd.choice(list(Queue.objects.filter(project=who.project)))
    most = {"max_running": 6, "max_gpus": 10, "max_running_per_user": 4, "max_gpus_per_user": 6}
    some = rnd.sample(sorted(most), 2)
    queues.change_queue(
        queue, who.user, who.role, **{name: rnd.choice([None, rnd.randint(0, most[name])]) for name in some}
    )


def preempt(rnd: random.Random) -> None:
    """A manager has waiting runs displace others, or no longer."""
    who = manager(rnd)
    queue = rnd.choice(list(Queue.objects.filter(project=who.project)))
    settings = {"preempt_points": rnd.choice([None, 1, 1, 5]), "preempt_gpu_hours": rnd.choice([None, None, 1])}
    queues.change_queue(queue, who.user, who.role, **settings)


def lend(rnd: random.Random) -> None:
    """A manager has queues lend each other GPUs, take them back, or no longer."""
    who = manager(rnd)
    queue = rnd.choice(list(Queue.objects.filter(project=who.project)))
    settings: dict[str, Any] = {"cohort": rnd.choice(["team", "team", "team", ""]), "max_gpus": rnd.randint(1, 6)}
    settings |= {"lend_gpus": rnd.choice([None, None, 1]), "borrow_gpus": rnd.choice([None, None, 2])}
    queues.change_queue(queue, who.user, who.role, **settings, reclaim=rnd.choice(["never", "lower_priority", "any"]))


def pause_or_drain(rnd: random.Random) -> None:
    who = manager(rnd)
    queue = rnd.choice(list(Queue.objects.filter(project=who.project)))
    setting = rnd.choice(["paused", "draining"])
    queues.change_queue(queue, who.user, who.role, **{setting: True})
    queues.change_queue(queue, who.user, who.role, **{setting: False})


def _wanted(rnd: random.Random, who: Actor) -> tuple[list[Run], MoveTarget]:
    """Up to four waiting runs of one queue that they may move, and where to. Run.DoesNotExist where there are none."""
    queue = rnd.choice(list(Queue.objects.filter(project=who.project)))
    waiting = Run.objects.filter(queue=queue, status=RunStatus.SUBMITTED).select_related("queue", "project", "user")
    mine = list(waiting.filter(user=who.user) if who.role == "member" else waiting)
    if not mine:
        raise Run.DoesNotExist
    runs = rnd.sample(mine, min(len(mine), rnd.choice([1, 1, 2, 4])))
    where = rnd.choice(["before", "after", "before", "after", "top", "bottom"])
    anchor = one_of(rnd, waiting.exclude(pk__in=[run.pk for run in runs])) if where in ("before", "after") else None
    if where in ("before", "after") and anchor is None:
        raise Run.DoesNotExist
    return runs, MoveTarget(where, anchor)


def _line(queue: Queue) -> Line:
    rows = selectors.in_order(queue).values_list("pk", "user", "seniority_us", "priority")
    return {pk: (user, seniority, priority) for pk, user, seniority, priority in rows}


def _both(before: Line, after: Line) -> tuple[list[int], list[int]]:
    """The order before and after, of those that stand in both."""
    return [pk for pk in before if pk in after], [pk for pk in after if pk in before]


def _judge(who: Actor, runs: Sequence[Run], target: MoveTarget, moved: MoveEffect, before: Line, after: Line) -> None:
    """A member's move leaves everybody else where they were; a manager's puts the runs exactly where it says."""
    was, now = _both(before, after)
    what = (
        f"{who.role} {who.user} moved {[run.pk for run in runs]} {target.where} {target.anchor and target.anchor.pk}: "
    )
    what += f"{was} became {now}"
    picked = {run.pk for run in runs}
    if who.role == "member":
        others = [index for index, pk in enumerate(was) if before[pk][0] != who.user.pk]
        if before.keys() == after.keys():  # one of theirs that came back meanwhile takes part, and is in one line only
            assert all(was[index] == now[index] for index in others), what
        assert all(before[was[index]] == after[was[index]] for index in others), what
        assert all(one.run.user_id == who.user.pk for one in moved.slips), what
        return
    others_before, others_after = [pk for pk in was if pk not in picked], [pk for pk in now if pk not in picked]
    assert others_before == others_after, what
    assert all(before[pk][2] == after[pk][2] for pk in others_before), f"{what}; others' priorities changed"
    block = [pk for pk in was if pk in picked]
    match target.where:
        case "top":
            expected = block + others_before
        case "bottom":
            expected = others_before + block
        case _ if target.anchor is None or target.anchor.pk not in others_before:
            return
        case where:
            cut = others_before.index(target.anchor.pk) + (where == "after")
            expected = others_before[:cut] + block + others_before[cut:]
    assert now == expected, f"{what}, not {expected}"
