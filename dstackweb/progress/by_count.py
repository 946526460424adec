"""Tasks that are told of as counts: per reporter and group the newest ones, of which the difference is counted.

The counts are absolute and their sequence rises, so that a repeated or overtaken one changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from django.db import connection

from dstackweb.progress import bulk
from dstackweb.progress.batch import TASKS_MAX, Taking
from dstackweb.progress.counters import Delta, Place
from dstackweb.progress.events import Count
from dstackweb.progress.states import LIVE, TaskState

STATES = tuple(TaskState)
TOLD = {
    "seq": "bigint", **{state.value: "bigint" for state in STATES}, "duration_n": "bigint", "duration_s": "float8",
}  # fmt: skip
NEW = {"reporter_id": "bigint", "prefix_id": "bigint", "group": "text", **TOLD}
COLUMNS = ", ".join(f"t.{column}" for column in ("id", *TOLD))


class Told(NamedTuple):
    """What a reporter said last of a group: its row (0: nothing yet), and tasks by STATES."""

    id: int = 0
    seq: int = -1
    states: tuple[int, ...] = (0,) * len(STATES)
    duration_n: int = 0
    duration_s: float = 0.0

    @classmethod
    def of(cls, pk: int, seq: int, *values: Any) -> Told:
        """From a row."""
        return cls(pk, seq, values[:-2], *values[-2:])


Counts = dict[Place, Told]
"""What is to be remembered now."""


def end(taking: Taking) -> None:
    """Release what was live by the word of a reporter that has ended."""
    live = " OR ".join(f"t.{state} > 0" for state in LIVE)
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT p.name, t.{bulk.quoted('group')}, {COLUMNS}"
            " FROM progress_reportercount t JOIN progress_taskprefix p ON p.id = t.prefix_id"
            f" WHERE t.reporter_id = %s AND t.seq <= %s AND ({live})",
            [taking.reporter.pk, taking.reporter.ended_seq],
        )
        found = cursor.fetchall()
    rows = []
    for prefix, group, *values in found:
        old = Told.of(*values)
        new = old._replace(states=_released(old.states))
        taking.delta((prefix, group)).add(_difference(old, new))
        rows.append(_row(new))
    bulk.update("progress_reportercount", TOLD, rows)


def decide(taking: Taking, counts: Sequence[Count]) -> Counts:
    """Which of these count, and what they change; of the others the receipt tells."""
    if not counts:
        return {}
    places = {(count.prefix, count.group) for count in counts}
    taking.book.read(places)
    known = _known(taking, places)
    newest: Counts = {}
    for index, count in sorted(enumerate(counts), key=lambda entry: entry[1].seq, reverse=True):
        place = (count.prefix, count.group)
        old = known.get(place, Told())
        if place in newest or count.seq <= old.seq:
            taking.receipt.outdated += 1
            continue
        if not old.id:
            full = taking.scope.counted >= TASKS_MAX
            if reason := "too_many_groups" if full else taking.room_for(place):
                taking.refuse(index, count.prefix, reason, "counts")
                continue
            taking.scope.counted += 1
        states = tuple([count.states.get(state, 0) for state in STATES])
        if taking.over(TaskState.WAITING, count.seq):
            states = _released(states)
        newest[place] = new = Told(old.id, count.seq, states, count.duration_n, count.duration_s)
        taking.delta(place).add(_difference(old, new))
        taking.receipt.applied += 1
    return newest


def write(taking: Taking, counts: Counts) -> None:
    """Remember what was counted, now that the rows that count it are there."""
    mine = taking.reporter.pk
    fresh = [(place, told) for place, told in counts.items() if not told.id]
    bulk.insert(
        "progress_reportercount",
        NEW,
        [(mine, taking.book.ids(place).prefix, place[1], *_row(told)[:-1]) for place, told in fresh],
    )
    bulk.update("progress_reportercount", TOLD, [_row(told) for told in counts.values() if told.id])


def _known(taking: Taking, places: Iterable[Place]) -> Counts:
    found = bulk.find(
        f"given.prefix, given.name, {COLUMNS}",
        "progress_reportercount",
        f"t.prefix_id = given.prefix_id AND t.{bulk.quoted('group')} = given.name AND t.reporter_id = %s",
        {"prefix_id": "bigint", "name": "text", "prefix": "text"},
        [(taking.book.ids(place).prefix, place[1], place[0]) for place in places],
        taking.reporter.pk,
    )
    return {(prefix, group): Told.of(*values) for prefix, group, *values in found}


def _row(told: Told) -> tuple[float, ...]:
    return (told.seq, *told.states, told.duration_n, told.duration_s, told.id)


def _released(states: Sequence[int]) -> tuple[int, ...]:
    """The same tasks once their reporter has ended."""
    told = dict(zip(STATES, states, strict=True))
    told[TaskState.RELEASED] += sum(told[state] for state in LIVE)
    return tuple(0 if state in LIVE else count for state, count in told.items())


def _difference(old: Told, new: Told) -> Delta:
    """What changed. Durations add up, so that none is taken away again."""
    states = {
        state: after - before
        for state, before, after in zip(STATES, old.states, new.states, strict=True)
        if after != before
    }
    duration_n = max(0, new.duration_n - old.duration_n)
    return Delta(states, duration_n, max(0.0, new.duration_s - old.duration_s) if duration_n else 0.0)
