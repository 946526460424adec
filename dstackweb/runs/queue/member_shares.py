"""The members' shares of queues with fair share: counted each minute, shifted by each run that enters its queue.

A rank changes by them only when its run enters, or a manager changes the setting (docs/decisions/0024-fair-share.md).
Callers that write have locked the queue.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from django.db.models import F, QuerySet

from dstackweb.lib import sql
from dstackweb.runs import past_log, selectors, usage
from dstackweb.runs.codes import PlaceEnd
from dstackweb.runs.models import MemberShare, Queue, Run, UsageDay
from dstackweb.runs.queue import ordering
from dstackweb.runs.queue.ordering import NO_PENALTY, Load, Penalty
from dstackweb.runs.states import ACTIVE, RunStatus

CHUNK = 5_000
Used = Mapping[usage.UsageKey, usage.Amounts]


@dataclass(frozen=True)
class Share:
    """A member's load in a queue, and the penalty that they have there now."""

    user: str
    load: Load
    penalty: Penalty

    @property
    def shown(self) -> tuple[object, ...]:
        """Changes with what lists show of it."""
        return self.user, self.used_gpu_hours, *self.load[1:], self.penalty.seconds // 60

    @property
    def gpu_hours(self) -> float:
        return round(self.load.total_ms / ordering.HOUR_MS, 1)

    @property
    def used_gpu_hours(self) -> float:
        return round(self.load.used_ms / ordering.HOUR_MS, 1)


def enter(queue: Queue, run: Run, *, waits: bool = True) -> None:
    """Set penalty and rank of a run that enters this queue. If it `waits` there, its GPUs count from now on."""
    share = foresee_all(queue, [run])[0]
    run.penalty_s, run.penalty_basis = share.seconds, share.basis
    run.rank = ordering.rank(run.seniority_us, run.priority, queue.step_us, share.seconds)
    if waits:
        add_queued(queue, [run])


def foresee_all(queue: Queue, runs: Sequence[Run]) -> list[Penalty]:
    """The penalties of runs that enter this queue one after another; a member's later run never gets less than one
    before it, so that these keep their order. Reads only, in two statements."""
    if not queue.fair_share_minutes:
        return [NO_PENALTY] * len(runs)
    loads, last = _loads(queue), dict[int, Penalty]()
    found = []
    for run in runs:
        own, gpus = loads.get(run.user_id, Load()), _gpus(run)
        loads[run.user_id] = own._replace(queued_gpus=own.queued_gpus + gpus)
        share = _penalty(queue, run.user_id, loads, gpus)
        last[run.user_id] = max(share, last.get(run.user_id, share), key=lambda one: one.seconds)
        found.append(last[run.user_id])
    return found


def add_queued(queue: Queue, runs: Sequence[Run]) -> None:
    """Count the GPUs of runs that wait in this queue from now on; nothing where fair share is off."""
    if not queue.fair_share_minutes:
        return
    for user_id, gpus in sorted(_added_up((run.user_id, _gpus(run)) for run in runs).items()):
        share = MemberShare.objects.filter(queue=queue, user=user_id)
        if gpus and not share.update(queued_gpus=F("queued_gpus") + gpus):
            MemberShare.objects.create(queue=queue, user_id=user_id, queued_gpus=gpus)


def _gpus(run: Run) -> int:
    gpus: int = (run.spec.get("nodes") or 1) * run.spec["requirements"]["gpu_count_min"]
    return gpus


def foresee(queue: Queue, user_id: int, gpus: int) -> Penalty:
    """The penalty of a run with so many GPUs if it entered this queue now. Reads only."""
    if not queue.fair_share_minutes:
        return NO_PENALTY
    loads = _loads(queue)
    own = loads.get(user_id, Load())
    return _penalty(queue, user_id, {**loads, user_id: own._replace(queued_gpus=own.queued_gpus + gpus)}, gpus)


def shares(queue: Queue) -> list[Share]:
    """The members with a load in this queue, the highest first; none where fair share is off."""
    if not queue.fair_share_minutes:
        return []
    loads = _loads(queue)
    names = dict(MemberShare.objects.filter(queue=queue).values_list("user_id", "user__username"))
    found = [Share(names[pk], load, _penalty(queue, pk, loads)) for pk, load in loads.items() if pk in names]
    return sorted(found, key=lambda share: (-share.load.total_ms, share.user))


def count(queue: Queue, active: Used, now: dt.datetime) -> dict[int, Load]:
    """Count the shares anew, with what active jobs have used (`usage.active`); the loads by member. No rank changes."""
    loads = {pk: load for pk, load in _counted(queue, active, now).items() if load.total_ms}
    MemberShare.objects.filter(queue=queue).exclude(user__in=loads).delete()
    rows = [
        MemberShare(queue=queue, user_id=pk, used_gpu_ms=used, held_gpus=held, queued_gpus=queued)
        for pk, (used, held, queued) in sorted(loads.items())
    ]
    sql.write(rows, ["queue", "user"], ["used_gpu_ms", "held_gpus", "queued_gpus"])
    return loads


def apply(queue: Queue, now: dt.datetime) -> None:
    """Set the penalties of all active runs anew, or to none where fair share is off. The runs are locked.

    Runs that a person has moved keep their rank. Two statements for each member with a load.
    """
    runs = Run.objects.filter(queue=queue, status__in=ACTIVE, moved_at=None)
    if not queue.fair_share_minutes:
        MemberShare.objects.filter(queue=queue).delete()
        _set(runs.exclude(penalty_s=0), NO_PENALTY, now)
        return
    loads = count(queue, usage.active(now, queue.project), now)
    _set(runs.exclude(user__in=loads).exclude(penalty_s=0), NO_PENALTY, now)
    for pk in loads:
        _set(runs.filter(user=pk), _penalty(queue, pk, loads), now)


def _set(runs: QuerySet[Run], penalty: Penalty, now: dt.datetime) -> None:
    past_log.close_places_of(runs.filter(status=RunStatus.SUBMITTED), now, PlaceEnd.MOVED)
    rank = F("rank") + (penalty.seconds - F("penalty_s")) * ordering.SECOND_US
    changed = {"penalty_s": penalty.seconds, "penalty_basis": penalty.basis, "place_since": now}
    runs.update(rank=rank, **changed, version=F("version") + 1)


def _penalty(queue: Queue, user_id: int, loads: Mapping[int, Load], gpus: int = 1) -> Penalty:
    return ordering.penalty(loads.get(user_id, Load()), list(loads.values()), queue.max_penalty_s, gpus)


def _loads(queue: Queue) -> dict[int, Load]:
    rows = MemberShare.objects.filter(queue=queue)
    return {pk: Load(*load) for pk, *load in rows.values_list("user_id", "used_gpu_ms", "held_gpus", "queued_gpus")}


def _counted(queue: Queue, active: Used, now: dt.datetime) -> dict[int, Load]:
    """In five statements and one more for each CHUNK of shapes that wait."""
    half_life = queue.fair_share_half_life_days
    since = usage.day_of(now) - dt.timedelta(days=half_life * ordering.HALF_LIVES)
    used: defaultdict[int, list[tuple[dt.date, int]]] = defaultdict(list)
    days = UsageDay.objects.filter(project=queue.project_id, queue=queue, day__gte=since)
    for pk, day, gpu_ms in days.values_list("user_id", "day", "gpu_ms"):
        used[pk].append((day, gpu_ms))
    for key, amounts in active.items():
        if key.queue_id == queue.pk and key.day >= since:
            used[key.user_id].append((key.day, amounts["gpu_ms"]))
    held = _added_up((pk, gpus) for _queue, pk, gpus in selectors.placed_gpus([queue.pk]))
    queued = _added_up(_queued(queue))
    return {
        pk: Load(ordering.decayed_ms(used[pk], now, half_life), held.get(pk, 0), queued.get(pk, 0))
        for pk in used.keys() | held.keys() | queued.keys()
    }


_SHAPES = "SELECT MIN(id), COUNT(*) FROM runs_run WHERE queue_id = %s AND status = 'submitted' GROUP BY shape"
"""A run of each shape that waits, and how many wait: from an index alone."""


def _queued(queue: Queue) -> Iterator[tuple[int, int]]:
    """A member and their GPUs for each shape that waits. All runs of a shape are of one member and need the same."""
    waiting: dict[int, int] = dict(map(tuple, sql.rows(_SHAPES, [queue.pk])))
    ids = sorted(waiting)
    columns = ("pk", "user_id", "spec__nodes", "spec__requirements__gpu_count_min")
    for start in range(0, len(ids), CHUNK):
        for run_id, user_id, nodes, gpus in Run.objects.filter(pk__in=ids[start : start + CHUNK]).values_list(*columns):
            yield user_id, waiting[run_id] * (nodes or 1) * (gpus or 0)


def _added_up(gpus: Iterable[tuple[int, int]]) -> dict[int, int]:
    found: defaultdict[int, int] = defaultdict(int)
    for user_id, more in gpus:
        found[user_id] += more
    return found
