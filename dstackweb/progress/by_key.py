"""Tasks that are told of one by one: which events count, and the rows that remember them.

Per task the event with the highest (sequence, reporter's name) counts, and `forgotten` over all others, for good. So a
repeated or overtaken event changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db import connection

from dstackweb.progress import bulk
from dstackweb.progress.batch import TASKS_MAX, Taking
from dstackweb.progress.counters import Book, Delta, Place
from dstackweb.progress.events import Event, Failure
from dstackweb.progress.models import Reporter, TaskGroup
from dstackweb.progress.states import CODES, LIVE, STATE_OF, TaskState

FORGOTTEN = TaskState.FORGOTTEN
TIMED = (TaskState.MEMORY, TaskState.ERRED)
"""Where a task enters these, the processing before is timed."""
IS_LIVE = f"state IN ({', '.join(str(CODES[state]) for state in LIVE)})"

MOVED = {"group_id": "bigint", "reporter_id": "bigint", "state": "smallint", "seq": "bigint", "since_ms": "bigint"}
FRESH = {"scope_id": "bigint", "prefix_id": "bigint", "key": "text", **MOVED}


class Known(NamedTuple):
    """A task that has been heard of, as its row says."""

    id: int
    key: str
    state: int
    seq: int
    since_ms: int
    group_id: int | None
    reporter_id: int


@dataclass(slots=True)
class Tasks:
    """What a batch changes: tasks that are new, and known ones, each with the state that it has now."""

    fresh: list[tuple[Event, TaskState]] = field(default_factory=list)
    moved: list[tuple[Known, Event, TaskState]] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


def end(taking: Taking) -> None:
    """Release the tasks that were live when their reporter ended."""
    mine = [taking.reporter.pk, taking.reporter.ended_seq]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT p.name, g.name, t.state, count(*) FROM progress_task t"
            " JOIN progress_taskgroup g ON g.id = t.group_id JOIN progress_taskprefix p ON p.id = t.prefix_id"
            f" WHERE t.reporter_id = %s AND t.seq <= %s AND t.{IS_LIVE}"
            " GROUP BY p.name, g.name, t.state",
            mine,
        )
        for prefix, group, state, count in cursor.fetchall():
            taking.delta((prefix, group)).move(STATE_OF[state], TaskState.RELEASED, count)
        cursor.execute(
            f"UPDATE progress_task SET state = %s, since_ms = %s WHERE reporter_id = %s AND seq <= %s AND {IS_LIVE}",
            [CODES[TaskState.RELEASED], taking.now_ms, *mine],
        )


def decide(taking: Taking, events: Sequence[Event]) -> Tasks:
    """Which of these events count, and what they change; of the others the receipt tells."""
    tasks = Tasks()
    if not events:
        return tasks
    taking.book.read({(event.prefix, event.group) for event in events})
    known = _known(taking.scope.pk, {event.key for event in events})
    place_of = _places(taking.book, known.values())
    for index, event in _counting(taking, events, known):
        row = known.get(event.key)
        state = TaskState.RELEASED if taking.over(event.state, event.seq) else event.state
        if row is None:
            place = (event.prefix, event.group)
            full = taking.scope.tasks >= TASKS_MAX
            if reason := "too_many_tasks" if full else taking.room_for(place):
                taking.refuse(index, event.key, reason, "events")
                continue
            taking.scope.tasks += 1
            tasks.fresh.append((event, state))
        else:
            place = place_of[row.group_id]
            tasks.moved.append((row, event, state))
        taking.receipt.applied += 1
        _change(taking.delta(place), row, event, state, taking.now_ms)
        if state == TaskState.ERRED:
            tasks.failed.append(Failure(event.key, *place, event.seq, event.message))
        elif state == TaskState.MEMORY:
            tasks.done.append(event.key)
    return tasks


def write(taking: Taking, tasks: Tasks) -> None:
    """Write the rows of what was decided, now that the rows that count them are there."""
    fresh, moved, mine = [], [], taking.reporter.pk
    for event, state in tasks.fresh:
        prefix, group = taking.book.ids((event.prefix, event.group))
        values = (None if state == FORGOTTEN else group, mine, CODES[state], event.seq, taking.now_ms)
        fresh.append((taking.scope.pk, prefix, event.key, *values))
    for row, event, state in tasks.moved:
        group_id = None if state == FORGOTTEN else row.group_id
        since_ms = row.since_ms if CODES[state] == row.state else taking.now_ms
        moved.append((group_id, mine, CODES[state], event.seq, since_ms, row.id))
    bulk.insert("progress_task", FRESH, fresh)
    bulk.update("progress_task", MOVED, moved)


def _known(scope_id: int, keys: Iterable[str]) -> dict[str, Known]:
    found = bulk.find(
        ", ".join(f"t.{column}" for column in Known._fields),
        "progress_task",
        "t.key = given.key AND t.scope_id = %s",
        {"key": "text"},
        [(key,) for key in keys],
        scope_id,
    )
    return {row[1]: Known._make(row) for row in found}


def _places(book: Book, tasks: Iterable[Known]) -> dict[int | None, Place]:
    """By their rows, the groups that these tasks are in: mostly those that their events name."""
    place_of: dict[int | None, Place] = {group.id: place for place, group in book.groups.items()}
    others = {task.group_id for task in tasks if task.group_id} - place_of.keys()
    found = TaskGroup.objects.filter(pk__in=others).values_list("pk", "prefix__name", "name") if others else ()
    return place_of | {pk: (prefix, name) for pk, prefix, name in found}


def _counting(taking: Taking, events: Sequence[Event], known: Mapping[str, Known]) -> Iterator[tuple[int, Event]]:
    """The one event of each task that counts, if any does; of two with the same sequence it is the later."""
    others = {row.reporter_id for row in known.values()} - {taking.reporter.pk}
    names = dict(Reporter.objects.filter(pk__in=others).values_list("pk", "name")) if others else {}
    names[taking.reporter.pk] = mine = taking.reporter.name
    best: dict[str, int] = {}
    for index, event in enumerate(events):
        at = best.setdefault(event.key, index)
        if at != index and _rank(event) >= _rank(events[at]):
            best[event.key] = index
    for index, event in enumerate(events):
        row = known.get(event.key)
        gone_seq = None
        if row is not None and STATE_OF[row.state] == FORGOTTEN:
            gone_seq = row.seq
        elif index == best[event.key] and (row is None or _outranks(event, mine, row, names[row.reporter_id])):
            yield index, event
            continue
        elif (winner := events[best[event.key]]).state == FORGOTTEN:
            gone_seq = winner.seq
        if gone_seq is not None and event.seq > gone_seq and event.state != FORGOTTEN:
            taking.refuse(index, event.key, "forgotten", "events")
        else:
            taking.receipt.outdated += 1


def _rank(event: Event) -> tuple[bool, int]:
    return (event.state == FORGOTTEN, event.seq)


def _outranks(event: Event, reporter: str, row: Known, other: str) -> bool:
    return event.state == FORGOTTEN or (event.seq, reporter) > (row.seq, other)


def _change(delta: Delta, row: Known | None, event: Event, state: TaskState, now_ms: int) -> None:
    """What an event changes in its group: the state, and how long the processing took, as told or else as seen."""
    old = None if row is None else STATE_OF[row.state]
    if state == old:
        return
    delta.move(old, state)
    if state not in TIMED:
        return
    seconds = event.duration_s
    if seconds is None and row is not None and old == TaskState.PROCESSING:
        seconds = max(0, now_ms - row.since_ms) / 1000
    if seconds is not None:
        delta.duration_n += 1
        delta.duration_s += seconds
