"""Creates the runs of sweeps when there is room for them, and ends sweeps whose runs have all ended.

Passes and the watcher look at all active sweeps. What was interrupted is found again from rows: an index is taken and
its run created in one transaction, under the queue's lock. A sweep that waits for others (`after`) has no runs before.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID, uuid4, uuid5

from django.db import IntegrityError
from django.db.models import QuerySet

from dstackweb.accounts.access import allows, role_in
from dstackweb.lib.sql import for_each
from dstackweb.runs import dependencies, services, wakeups
from dstackweb.runs.codes import DependencyOutcome, RunEventKind
from dstackweb.runs.dependencies import OVER, Consequence
from dstackweb.runs.models import Dependency, Queue, Run, RunEvent, Sweep
from dstackweb.runs.queue import member_shares
from dstackweb.runs.queue.queues import lock_queue, take_seniority
from dstackweb.runs.recurrence import BY_PEOPLE
from dstackweb.runs.run_names import names_of_sweeps, run_name
from dstackweb.runs.shared_rows import count_left_sweep, count_new, shared_rows_last, touch_sweep
from dstackweb.runs.states import ACTIVE, Reason, RunStatus
from dstackweb.runs.sweeps.selectors import LARGE
from dstackweb.runs.transitions import RunChanged, events_written
from dstackweb.spec.array import Array
from dstackweb.spec.source import as_yaml, read

WAITING_AT_ONCE = 100
"""Runs of a sweep that wait at once. A pass that places all of them is followed by another at once."""
STOPPED_AT_ONCE = 500
"""Runs of a sweep that one check stops."""


def settle(now: dt.datetime) -> int:
    """Create what may be created now, stop what is to be stopped, end what is over. Returns how many were created."""
    found = Sweep.objects.filter(ended_at=None).select_related("count").order_by("pk")
    active = list(found.defer(*LARGE))
    released = _released([sweep.pk for sweep in active if sweep.is_pending])
    due = [sweep.pk for sweep in active if sweep.pk in released or _is_due(sweep)]
    made: list[int] = []
    for_each(due, lambda sweep_id: made.append(settle_one(sweep_id, now)))
    return sum(made)


def _is_due(sweep: Sweep) -> bool:
    return sweep.is_stopping or sweep.is_over or (room(sweep) > 0 and not sweep.is_complete)


def settle_one(sweep_id: int, now: dt.datetime) -> int:
    """`settle` for one sweep."""
    finish_stop(Sweep.objects.get(pk=sweep_id))
    try:
        with shared_rows_last():
            queue = lock_queue(Sweep.objects.values_list("queue_id", flat=True).get(pk=sweep_id))
            sweep = Sweep.objects.select_related("user", "count").get(pk=sweep_id)
            _settle_pending(queue, sweep, now)
            return fill(queue, sweep, now)
    except (IntegrityError, RunChanged):
        return 0  # a name was taken, or a failed run removed, at this moment: the next check sees it


def fill(queue: Queue, sweep: Sweep, now: dt.datetime) -> int:
    """Create the runs that there is room for, or end the sweep. Returns how many were created.

    Call in `shared_rows_last`, which has locked the queue before it read the sweep. Raises IntegrityError when another
    transaction takes a name at this moment, RunChanged when it removes a failed run.
    """
    if sweep.ended_at is not None:
        return 0
    before = {name: getattr(sweep, name) for name in PROGRESS}
    made = 0
    if room(sweep) and not sweep.is_complete:
        role = role_in(queue.project, sweep.user)
        if role is None or not allows(role, "member"):
            sweep.stopped_at, sweep.retry_before = sweep.stopped_at or now, None
        else:
            made = _create(queue, sweep, now)
    if not made and sweep.is_over:
        sweep.ended_at = now
        wakeups.request_pass()  # runs may wait for its end
    if changed := {name: getattr(sweep, name) for name in PROGRESS if getattr(sweep, name) != before[name]}:
        Sweep.objects.filter(pk=sweep.pk).update(**changed)
        touch_sweep(sweep)
    return made


PROGRESS = ("next_index", "waits_for_name", "retry_before", "stopped_at", "ended_at")


def _create(queue: Queue, sweep: Sweep, now: dt.datetime) -> int:
    """Create runs, and note with the sweep how far it is; returns how many."""
    most = room(sweep)
    failed = _to_retry(sweep, most)
    indices = next_indices(sweep, list(failed))
    named = {run_name(sweep.name, index): index for index in indices}
    holders = Run.objects.filter(project=sweep.project_id, name__in=named, status__in=ACTIVE)
    held = {*holders.values_list("name", flat=True), *names_of_sweeps(queue.project, named)}
    free, blocked = until_taken(indices, frozenset(named[name] for name in held))
    runs = list(_runs(queue, sweep, free, now))
    _store(runs, _leave([failed[index] for index in free if index in failed]), now)
    sweep.next_index += sum(index >= sweep.next_index for index in free)
    sweep.waits_for_name = "" if blocked is None else run_name(sweep.name, blocked)
    if blocked is None and len(failed) < most:  # with room left, there are no more of them
        sweep.retry_before = None
    return len(free)


def _to_retry(sweep: Sweep, limit: int) -> dict[int, int]:
    """The ids of runs that are to be created once more, by index, in order."""
    if sweep.retry_before is None:
        return {}
    failed = failed_runs(sweep).filter(ended_at__lte=sweep.retry_before).order_by("sweep_index")
    found = failed.values_list("sweep_index", "pk")[:limit]
    return {index: pk for index, pk in found if index is not None}


def failed_runs(sweep: Sweep) -> QuerySet[Run]:
    """The runs that a retry creates once more: those that ended in any way but well, and were not stopped by people."""
    ended_badly = [RunStatus.FAILED, RunStatus.TERMINATED]
    return Run.objects.filter(sweep=sweep, status__in=ended_badly).exclude(termination_reason__in=BY_PEOPLE)


def _leave(run_ids: Sequence[int]) -> dict[int, Run]:
    """Take failed runs out of their sweep, for others with their indices. Returns these runs by index."""
    if not run_ids:
        return {}
    columns = ("queue_id", "status", "name", "attempt", "sweep_id", "sweep_index")
    locked = Run.objects.filter(pk__in=run_ids).select_for_update(no_key=True).order_by("pk")
    runs = list(locked.only(*columns))
    if len(runs) != len(run_ids):
        raise RunChanged("a failed run was removed meanwhile")
    count_left_sweep(runs)
    Run.objects.filter(pk__in=run_ids).update(sweep=None, sweep_index=None)
    return {run.sweep_index: run for run in runs if run.sweep_index is not None}


def _runs(queue: Queue, sweep: Sweep, indices: Iterable[int], now: dt.datetime) -> Iterable[Run]:
    array = Array.model_validate(sweep.array)
    config = _of_runs(read(sweep.config_text).data)
    provenance, spec = _of_runs(sweep.provenance), _of_runs(sweep.spec)
    for index in indices:
        name, parameters = run_name(sweep.name, index), array.parameters(index)
        run = Run(
            uid=first_uid(sweep, index) if index >= sweep.next_index else uuid4(),
            project=queue.project,
            queue=queue,
            user_id=sweep.user_id,
            name=name,
            sweep=sweep,
            sweep_index=index,
            priority=sweep.priority,
            seniority_us=sweep.seniority_us,
            shape=sweep.shape,
            spec={**spec, "name": name, "priority": sweep.priority, "env": {**spec["env"], **parameters}},
            provenance=provenance,
            config_text=as_yaml(run_config(config, name, parameters)),
            env_secret=sweep.env_secret,
            archive_id=sweep.archive_id,
            submitted_at=now,
            queued_at=now,
            place_since=now,
        )
        member_shares.enter(queue, run)
        yield run


def first_uid(sweep: Sweep, index: int) -> UUID:
    """The uid of the first run with an index: one that a restored database creates again is known by it."""
    return uuid5(sweep.uid, str(index))


def uids_to_come() -> Iterator[UUID]:
    """The uids of all runs that sweeps will still create."""
    for sweep in Sweep.objects.filter(ended_at=None):
        for index in range(sweep.next_index, sweep.size):
            yield first_uid(sweep, index)


def config_size(sweep: Sweep) -> int:
    """Characters of the file of one run."""
    last = sweep.size - 1
    config = _of_runs(read(sweep.config_text).data)
    return len(as_yaml(run_config(config, sweep.name, Array.model_validate(sweep.array).parameters(last))))


def _of_runs(keys: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep's runs have of its keys: it has made them, and waited for others, itself."""
    return {key: value for key, value in keys.items() if key not in ("array", "after")}


def run_config(config: Mapping[str, Any], name: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The file of one run of a sweep, to submit it alone: `config` are its keys without those of the sweep."""
    env = config.get("env") or {}
    if isinstance(env, list):
        kept = [entry for entry in env if str(entry).partition("=")[0].strip() not in parameters]
        merged: Any = [*kept, *(f"{key}={value}" for key, value in parameters.items())]
    else:
        merged = {**env, **parameters}
    return {**config, "name": name} | ({"env": merged} if merged else {})


def _store(runs: Sequence[Run], replaced: Mapping[int, Run], now: dt.datetime) -> None:
    """Create the runs with their events, and note with the runs that they replace what follows them."""
    if not runs:
        return
    Run.objects.bulk_create(runs)
    events = []
    for run in runs:
        events.append(_event(run, RunEventKind.SUBMITTED, {"priority": run.priority, "queue": run.queue.name}, now))
        before = replaced.get(run.sweep_index) if run.sweep_index is not None else None
        if before is not None:
            events.append(_event(before, RunEventKind.REPLACED, {"next": str(run.uid)}, now))
    events_written.send(sender=RunEvent, events=RunEvent.objects.bulk_create(events))
    for run in runs:
        count_new(run)
    wakeups.request_pass(urgent=False)


def _event(run: Run, kind: RunEventKind, data: dict[str, Any], now: dt.datetime) -> RunEvent:
    return RunEvent(run=run, kind=kind, actor_id=run.user_id, attempt=run.attempt, data=data, at=now)


def finish_stop(sweep: Sweep) -> None:
    """Stop the active runs of a sweep that is being stopped, and note once there are none left. Repeatable."""
    if not sweep.is_stopping:
        return
    stopped = [Reason.ABORTED_BY_USER] if sweep.is_aborted else BY_PEOPLE
    active = Run.objects.filter(sweep=sweep, status__in=ACTIVE).exclude(stop_reason__in=stopped)
    runs = list(active.select_related("queue", "project", "user").order_by("pk")[:STOPPED_AT_ONCE])
    services.stop_runs(runs, sweep.stopped_by, abort=sweep.is_aborted)
    if not active.exists():
        Sweep.objects.filter(pk=sweep.pk).update(is_stopping=False)


WAIT_FIELDS = ("is_pending", "status_detail", "seniority_us", "stopped_at")


def _released(sweep_ids: Collection[int]) -> set[int]:
    """Those of these waiting sweeps of which a predecessor has ended or was removed."""
    if not sweep_ids:
        return set()
    found = Dependency.objects.filter(OVER, outcome=DependencyOutcome.WAITING, waiting_sweep__in=sweep_ids)
    return {pk for pk in found.values_list("waiting_sweep", flat=True) if pk is not None}


def _settle_pending(queue: Queue, sweep: Sweep, now: dt.datetime) -> None:
    """Let a sweep whose predecessors have ended enter its locked queue, or cancel it. Repeatable; `fill` it then."""
    if not sweep.is_pending:
        return
    found, consequence = dependencies.take_stock(sweep)
    match consequence:
        case Consequence.ENTER:
            enter_queue(queue, sweep)
        case Consequence.CANCEL:
            sweep.stopped_at = now
            _keep(sweep, is_pending=False, detail=found)
        case Consequence.WAIT | Consequence.KEEP:
            _keep(sweep, is_pending=True, detail=found)


def enter_queue(queue: Queue, sweep: Sweep) -> None:
    """Give it the queue's next seniority, which its runs will have."""
    sweep.seniority_us = take_seniority(queue.pk).last_seniority_us
    _keep(sweep, is_pending=False, detail=[])


def _keep(sweep: Sweep, *, is_pending: bool, detail: list[Dependency]) -> None:
    sweep.is_pending = is_pending
    sweep.status_detail = dependencies.detail(detail) if detail else {}
    sweep.save(update_fields=WAIT_FIELDS)
    touch_sweep(sweep)


def room(sweep: Sweep) -> int:
    """How many of its runs may be created now."""
    if sweep.is_pending:
        return 0
    found = WAITING_AT_ONCE - sweep.count.waiting
    if sweep.max_parallel is not None:
        found = min(found, sweep.max_parallel - sweep.count.waiting - sweep.count.placed)
    return max(0, found)


def first_runs(array: Array) -> int:
    """How many runs of a sweep are created with it."""
    return min(array.size, WAITING_AT_ONCE, array.max_parallel or array.size)


def next_indices(sweep: Sweep, failed: Sequence[int]) -> list[int]:
    """The indices to create now: those of `failed` ones that are retried, then those that never were created."""
    most = room(sweep)
    again = list(failed[:most])
    if sweep.stopped_at is not None:
        return again
    end = min(sweep.size, sweep.next_index + most - len(again))
    return again + list(range(sweep.next_index, end))


def until_taken(indices: Sequence[int], taken: frozenset[int]) -> tuple[list[int], int | None]:
    """The indices before the first whose name another run has now, and that one: a sweep's order has no gaps."""
    for number, index in enumerate(indices):
        if index in taken:
            return list(indices[:number]), index
    return list(indices), None
