"""Events of single tasks: which of them count, and the rows that store them.

Per task the event with the highest (sequence, reporter's name) counts, but `forgotten` overrides all others and is
final. Repeated events change nothing, and overtaken ones only how a released or forgotten task had ended: by its newest
other report, whichever arrives first. Only rows of such tasks store it (`before`); of others it is the report itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db import connection

from dstackweb.lib import bulk
from dstackweb.progress.counter_rows import GroupName, read_keys
from dstackweb.progress.counters import TASKS_MAX, BatchUpdate, CounterRows, Delta
from dstackweb.progress.models import Reporter, Task, TaskGroup
from dstackweb.progress.reports import Event, Failure
from dstackweb.progress.states import AS_REPORTED, CODES, DROPPED, GONE, LIVE_CODES, STATE_OF, TaskState

HOW: dict[TaskState, int] = {TaskState.MEMORY: 1, TaskState.ERRED: 2}
"""How a task had ended; 0 for all other states."""
_DROPPED_AS = {
    (TaskState.RELEASED, 1): TaskState.RELEASED_DONE, (TaskState.RELEASED, 2): TaskState.RELEASED_FAILED,
    (TaskState.FORGOTTEN, 1): TaskState.FORGOTTEN_DONE, (TaskState.FORGOTTEN, 2): TaskState.FORGOTTEN_FAILED,
}  # fmt: skip
_BITS = 2


class StoredTask(NamedTuple):
    id: int
    key: str
    state: int
    seq: int
    since_ms: int
    group_id: int | None
    reporter_id: int
    before: int | None
    before_by: int | None


class Before(NamedTuple):
    """A task's newest report other than released and forgotten, by (seq, reporter's name).

    `how`: as in HOW; `by`: the reporter's id.
    """

    seq: int
    reporter: str
    how: int
    by: int

    @property
    def stored(self) -> tuple[int, int]:
        """The columns `before` and `before_by`."""
        return (self.seq << _BITS) + self.how, self.by

    def dropped(self, state: TaskState) -> TaskState:
        """RELEASED or FORGOTTEN, by how the task had ended."""
        return _DROPPED_AS.get((state, self.how), state)


NEVER = Before(-1, "", 0, 0)
"""No other report is known."""


class Endings:
    """How those tasks of a batch had ended that it releases or forgets, or that are released or forgotten already.

    `known`: rows of its tasks, by key; `names`: of reporters, by id.
    """

    def __init__(
        self, events: Sequence[Event], reporter: int, known: Mapping[str, StoredTask], names: Mapping[int, str]
    ) -> None:
        self._known, self._names = known, names
        self._stored = {key for key, row in known.items() if row.before is not None}
        keys = self._stored | {event.key for event in events if event.state in DROPPED}
        self._reported: dict[str, Before] = {}
        for event in events if keys else ():
            if event.key in keys and event.state not in DROPPED:
                earlier = self._reported.get(event.key)
                if earlier is None or event.seq >= earlier.seq:
                    how = HOW.get(event.state, 0)
                    self._reported[event.key] = Before(event.seq, names[reporter], how, reporter)

    def of(self, key: str) -> Before:
        before, row = self._reported.get(key, NEVER), self._known.get(key)
        return before if row is None else max(before, self._of_row(row))

    def late(self, moved: Collection[str]) -> Iterator[tuple[StoredTask, Before]]:
        """Tasks, other than the `moved` ones, of which the batch says more than their rows, and what that is."""
        for key in sorted(self._stored.intersection(self._reported).difference(moved)):
            row, before = self._known[key], self._reported[key]
            if before > self._of_row(row):
                yield row, before

    def _of_row(self, row: StoredTask) -> Before:
        if row.before is None:
            return Before(row.seq, self._names[row.reporter_id], HOW.get(STATE_OF[row.state], 0), row.reporter_id)
        by = row.before_by or 0
        return Before(row.before >> _BITS, self._names.get(by, ""), row.before & (1 << _BITS) - 1, by)


FORGOTTEN = TaskState.FORGOTTEN
TIMED = (TaskState.MEMORY, TaskState.ERRED)
"""Entering one of these ends the timing of a task's processing."""
HAS_LIVE_STATE = f"state IN ({', '.join(map(str, LIVE_CODES))})"

MOVED = {"group_id": "bigint", "reporter_id": "bigint", "state": "smallint", "seq": "bigint", "since_ms": "bigint"}
FRESH = {"scope_id": "bigint", "prefix_id": "bigint", "key": "text", **MOVED}
BEFORE = {"before": "bigint", "before_by": "bigint"}
MESSAGE = {"message": "text"}
NOTHING = (None, None)
"""BEFORE of tasks that are neither released nor forgotten."""


@dataclass(slots=True)
class TaskChanges:
    """Changes of a batch: new tasks and stored ones with their new state.

    `late`: stored tasks, already released or forgotten, of which is now known how they had ended, with their new state.
    `before`: what to store of released and forgotten tasks, by key. `messages`: by key, of tasks that have not failed.
    """

    fresh: list[tuple[Event, TaskState]] = field(default_factory=list)
    moved: list[tuple[StoredTask, Event, TaskState]] = field(default_factory=list)
    late: list[tuple[StoredTask, TaskState]] = field(default_factory=list)
    before: dict[str, Before] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    failed: list[Failure] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


def release_live(update: BatchUpdate) -> None:
    """Release the tasks that were live when their reporter ended."""
    mine = [update.reporter.pk, update.reporter.ended_seq]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT p.name, g.name, t.state, count(*) FROM progress_task t"
            " JOIN progress_taskgroup g ON g.id = t.group_id JOIN progress_taskprefix p ON p.id = t.prefix_id"
            f" WHERE t.reporter_id = %s AND t.seq <= %s AND t.{HAS_LIVE_STATE}"
            " GROUP BY p.name, g.name, t.state",
            mine,
        )
        for prefix, group, state, count in cursor.fetchall():
            update.deltas[prefix, group].move(STATE_OF[state], TaskState.RELEASED, count)
        cursor.execute(
            "UPDATE progress_task SET state = %s, since_ms = %s"
            f" WHERE reporter_id = %s AND seq <= %s AND {HAS_LIVE_STATE}",
            [CODES[TaskState.RELEASED], update.now_ms, *mine],
        )


def decide(update: BatchUpdate, events: Sequence[Event]) -> TaskChanges:
    """Find the events that count, and their changes. Others are noted in the receipt."""
    tasks = TaskChanges()
    if not events:
        return tasks
    update.counters.read({(event.prefix, event.group) for event in events})
    known = _load(update.scope.pk, {event.key for event in events})
    group_name_of = _group_names(update.counters, known.values())
    names = _reporter_names(update, known.values())
    endings = Endings(events, update.reporter.pk, known, names)
    for index, event in _effective_events(update, events, known, names):
        row = known.get(event.key)
        state = TaskState.RELEASED if update.is_released(event.state, event.seq) else event.state
        if event.state in DROPPED:
            tasks.before[event.key] = before = endings.of(event.key)
            state = before.dropped(state)
        if row is None:
            group_name = (event.prefix, event.group)
            full = update.scope.tasks >= TASKS_MAX
            if reason := "too_many_tasks" if full else update.exceeded_limit(group_name):
                update.reject(index, event.key, reason, "events")
                continue
            update.scope.tasks += 1
            tasks.fresh.append((event, state))
        else:
            group_name = group_name_of[row.group_id]
            tasks.moved.append((row, event, state))
        update.receipt.applied += 1
        if event.message and state != TaskState.ERRED:
            tasks.messages[event.key] = event.message
        _add_change(update.deltas[group_name], row, event, state, update.now_ms)
        if state == TaskState.ERRED:
            tasks.failed.append(Failure(event.key, *group_name, event.seq, event.message))
        elif state == TaskState.MEMORY:
            tasks.done.append(event.key)
    if len(names) > 1:
        live = (row.reporter_id for row, _, _ in tasks.moved if row.state in LIVE_CODES)
        update.taken_over.update(pk for pk in live if pk != update.reporter.pk)
    _decide_late(update, tasks, endings, events, group_name_of)
    return tasks


def _decide_late(
    update: BatchUpdate,
    tasks: TaskChanges,
    endings: Endings,
    events: Sequence[Event],
    group_name_of: Mapping[int | None, GroupName],
) -> None:
    """Find tasks that are released or forgotten, and of which overtaken events say how they had ended."""
    found = list(endings.late({row.key for row, _, _ in tasks.moved}))
    gone = [row.id for row, _ in found if not row.group_id]
    prefixes = dict(Task.objects.filter(pk__in=gone).values_list("pk", "prefix__name")) if gone else {}
    group_of = {event.key: event.group for event in events} if gone else {}
    for row, before in found:
        tasks.before[row.key] = before
        old = STATE_OF[row.state]
        new = before.dropped(AS_REPORTED.get(old, old))
        tasks.late.append((row, new))
        if old != new:
            group_name = group_name_of[row.group_id] if row.group_id else (prefixes[row.id], group_of[row.key])
            update.deltas[group_name].move(old, new)


def write(update: BatchUpdate, tasks: TaskChanges) -> None:
    """Write the task rows, once the rows of their groups exist."""
    fresh, moved, mine = [], [], update.reporter.pk
    for event, state in tasks.fresh:
        prefix, group = update.counters.ids((event.prefix, event.group))
        values = (None if state in GONE else group, mine, CODES[state], event.seq, update.now_ms)
        fresh.append((update.scope.pk, prefix, event.key, *values))
    for row, event, state in tasks.moved:
        group_id = None if state in GONE else row.group_id
        since_ms = row.since_ms if CODES[state] == row.state else update.now_ms
        moved.append((group_id, mine, CODES[state], event.seq, since_ms, row.id))
    for row, state in tasks.late:
        moved.append((row.group_id, row.reporter_id, CODES[state], row.seq, row.since_ms, row.id))
    _write_rows(tasks, fresh, moved)


def _write_rows(tasks: TaskChanges, fresh: list[tuple[Any, ...]], moved: list[tuple[Any, ...]]) -> None:
    """Insert and update rows. Most batches release and forget nothing, and leave out the columns for that."""
    insert_types, update_types = FRESH, MOVED
    if tasks.before or any(row.before is not None for row, _, _ in tasks.moved):
        insert_types, update_types = FRESH | BEFORE, MOVED | BEFORE
        stored = {key: before.stored for key, before in tasks.before.items()}
        keys = [row.key for row, _, _ in tasks.moved] + [row.key for row, _ in tasks.late]
        fresh = [(*row, *stored.get(row[2], NOTHING)) for row in fresh]
        moved = [(*row[:-1], *stored.get(key, NOTHING), row[-1]) for row, key in zip(moved, keys, strict=True)]
    if not tasks.messages:
        bulk.insert("progress_task", insert_types, fresh)
    else:
        bulk.insert("progress_task", insert_types, [row for row in fresh if row[2] not in tasks.messages])
        messages = [(*row, tasks.messages[row[2]]) for row in fresh if row[2] in tasks.messages]
        bulk.insert("progress_task", {**insert_types, **MESSAGE}, messages)
        rows = {row.key: row.id for row, _, _ in tasks.moved}
        changed = [(message, rows[key]) for key, message in tasks.messages.items() if key in rows]
        bulk.update("progress_task", MESSAGE, changed)
    bulk.update("progress_task", update_types, moved)


def _load(scope_id: int, keys: Iterable[str]) -> dict[str, StoredTask]:
    return {row[1]: StoredTask._make(row) for row in read_keys("progress_task", StoredTask._fields, scope_id, keys)}


def _group_names(counters: CounterRows, tasks: Iterable[StoredTask]) -> dict[int | None, GroupName]:
    """Names of the groups of these tasks, by group id. Most are the groups that the events name."""
    group_name_of: dict[int | None, GroupName] = {group.id: group_name for group_name, group in counters.groups.items()}
    others = {task.group_id for task in tasks if task.group_id} - group_name_of.keys()
    found = TaskGroup.objects.filter(pk__in=others).values_list("pk", "prefix__name", "name") if others else ()
    return group_name_of | {pk: (prefix, name) for pk, prefix, name in found}


def _reporter_names(update: BatchUpdate, tasks: Collection[StoredTask]) -> dict[int, str]:
    """Names of the reporters of these tasks and of the batch, by id."""
    others = {row.reporter_id for row in tasks} | {row.before_by for row in tasks if row.before_by}
    others.discard(update.reporter.pk)
    names = dict(Reporter.objects.filter(pk__in=others).values_list("pk", "name")) if others else {}
    names[update.reporter.pk] = update.reporter.name
    return names


def _effective_events(
    update: BatchUpdate, events: Sequence[Event], known: Mapping[str, StoredTask], names: Mapping[int, str]
) -> Iterator[tuple[int, Event]]:
    """The event of each task that counts, if any. Of two with the same sequence, the later one counts."""
    mine = update.reporter.name
    best: dict[str, int] = {}
    for index, event in enumerate(events):
        at = best.setdefault(event.key, index)
        if at != index and _rank(event) >= _rank(events[at]):
            best[event.key] = index
    for index, event in enumerate(events):
        row = known.get(event.key)
        gone_seq = None
        if row is not None and STATE_OF[row.state] in GONE:
            gone_seq = row.seq
        elif index == best[event.key] and (row is None or _outranks(event, mine, row, names[row.reporter_id])):
            yield index, event
            continue
        elif (winner := events[best[event.key]]).state == FORGOTTEN:
            gone_seq = winner.seq
        if gone_seq is not None and event.seq > gone_seq and event.state != FORGOTTEN:
            update.reject(index, event.key, "forgotten", "events")
        else:
            update.receipt.outdated += 1


def _rank(event: Event) -> tuple[bool, int]:
    return (event.state == FORGOTTEN, event.seq)


def _outranks(event: Event, reporter: str, row: StoredTask, other: str) -> bool:
    return event.state == FORGOTTEN or (event.seq, reporter) > (row.seq, other)


def _add_change(delta: Delta, row: StoredTask | None, event: Event, state: TaskState, now_ms: int) -> None:
    """Add an event's changes to its group: the state, and the processing time (reported, else measured)."""
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
        delta.time(seconds)
