"""Creates the runs of sweeps when there is room for them, and ends sweeps whose runs have all ended.

A pass, which each end of a run requests, and the watcher look at all active sweeps. Whatever was interrupted is found
again from rows. An index is taken and its run created in one transaction, under the queue's lock.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from django.db import IntegrityError
from django.db.models import QuerySet

from dstackweb.accounts.access import allows, role_in
from dstackweb.lib.sql import for_each
from dstackweb.runs import services, wakeups
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Queue, Run, RunEvent, Sweep, SweepCount
from dstackweb.runs.queue import member_shares, ordering
from dstackweb.runs.queue.queues import lock_queue
from dstackweb.runs.recurrence import BY_PEOPLE
from dstackweb.runs.run_names import names_of_sweeps
from dstackweb.runs.shared_rows import count_left_sweep, count_new, shared_rows_last, touch_sweep
from dstackweb.runs.states import ACTIVE, PLACED, WAITING, Reason, RunStatus
from dstackweb.runs.sweeps import pending
from dstackweb.runs.sweeps.validation import run_name
from dstackweb.runs.sweeps.window import Progress, next_indices, until_taken
from dstackweb.runs.transitions import RunChanged, events_written
from dstackweb.spec.array import Array
from dstackweb.spec.source import as_yaml, read

STOPPED_AT_ONCE = 500
"""Runs of a sweep that one check stops."""


def progress(sweep: Sweep, count: SweepCount) -> Progress:
    return Progress(
        size=sweep.size,
        next_index=sweep.next_index,
        waiting=sum(getattr(count, status) for status in WAITING),
        placed=sum(getattr(count, status) for status in PLACED),
        max_parallel=sweep.max_parallel,
        is_stopped=sweep.stopped_at is not None,
        retries=sweep.retry_before is not None,
        is_pending=sweep.is_pending,
    )


def settle(now: dt.datetime) -> int:
    """Create what may be created now, stop what is to be stopped, end what is over. Returns how many were created."""
    found = Sweep.objects.filter(ended_at=None).select_related("count").order_by("pk")
    active = list(found.defer(*LARGE))
    released = pending.due([sweep.pk for sweep in active if sweep.is_pending])
    due = [sweep.pk for sweep in active if sweep.pk in released or _is_due(sweep)]
    made: list[int] = []
    for_each(due, lambda sweep_id: made.append(settle_one(sweep_id, now)))
    return sum(made)


LARGE = ("array", "spec", "provenance", "config_text", "env_secret")
"""Columns that only the creation of runs needs."""


def _is_due(sweep: Sweep) -> bool:
    found = progress(sweep, sweep.count)
    return sweep.is_stopping or found.is_over or (found.room > 0 and not found.is_complete)


def settle_one(sweep_id: int, now: dt.datetime) -> int:
    """`settle` for one sweep."""
    finish_stop(Sweep.objects.get(pk=sweep_id))
    try:
        with shared_rows_last():
            queue = lock_queue(Sweep.objects.values_list("queue_id", flat=True).get(pk=sweep_id))
            sweep = Sweep.objects.select_related("user", "count").get(pk=sweep_id)
            pending.settle(queue, sweep, now)
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
    found = progress(sweep, sweep.count)
    values: dict[str, Any] = {}
    made = 0
    if found.room and not found.is_complete:
        role = role_in(queue.project, sweep.user)
        if role is None or not allows(role, "member"):
            values |= {"stopped_at": sweep.stopped_at or now, "retry_before": None}
        else:
            values |= _create(queue, sweep, found, now)
            made = values.pop("made")
    written = {name: values.get(name, getattr(sweep, name)) for name in ("next_index", "stopped_at", "retry_before")}
    after = replace(
        found,
        next_index=written["next_index"],
        is_stopped=written["stopped_at"] is not None,
        retries=written["retry_before"] is not None,
    )
    if not made and after.is_over:
        values["ended_at"] = now
        wakeups.request_pass()  # runs may wait for its end
    values = {name: value for name, value in values.items() if getattr(sweep, name) != value}
    if values:
        Sweep.objects.filter(pk=sweep.pk).update(**values)
        touch_sweep(sweep)
        for name, value in values.items():
            setattr(sweep, name, value)
    return made


def _create(queue: Queue, sweep: Sweep, found: Progress, now: dt.datetime) -> dict[str, Any]:
    """Create runs; returns how many were `made`, and the sweep's new values."""
    failed = _to_retry(sweep, found.room)
    indices = next_indices(found, list(failed))
    named = {run_name(sweep.name, index): index for index in indices}
    holders = Run.objects.filter(project=sweep.project_id, name__in=named, status__in=ACTIVE)
    held = {*holders.values_list("name", flat=True), *names_of_sweeps(queue.project, named)}
    taken = frozenset(named[name] for name in held)
    free, blocked = until_taken(indices, taken)
    runs = list(_runs(queue, sweep, free, now))
    _store(runs, _leave([failed[index] for index in free if index in failed]), now)
    created = sum(index >= sweep.next_index for index in free)
    return {
        "made": len(free),
        "next_index": sweep.next_index + created,
        "waits_for_name": "" if blocked is None else run_name(sweep.name, blocked),
        # With room left, there are no more of them.
        "retry_before": sweep.retry_before if blocked is not None or len(failed) == found.room else None,
    }


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
        share = member_shares.enter(queue, run)
        run.penalty_s, run.penalty_basis = share.seconds, share.basis
        run.rank = ordering.rank(run.seniority_us, run.priority, queue.step_us, share.seconds)
        yield run


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
