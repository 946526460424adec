"""Measure how many task reports per second are counted: events of single tasks, and counts of groups.

    python -m bench.progress_ingest [sqlite|postgres] [TASKS]

Each task has three events (waiting, running, done), in batches of 1,000 events, one transaction each. "Spread": each
task of a batch is in its own group, 1,000 groups in 23 prefixes; "a sweep": in 50 groups; "together": in one group. The
floor writes the same task rows by the same statements in as many transactions, without reading or counting them. A
count reports 100 transitions of a group. Cells are thousands per second, the median of three. The second table measures
scopes that already have tasks: 10,000 in 1,000 groups, up to 950,000 in 100,000.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench import sides

if TYPE_CHECKING:
    from multiprocessing.pool import Pool

    from dstackweb.progress.reports import Batch

BATCH = 1_000
PREFIXES = 23
PER_COUNT = 100
WRITERS = 8
RUNS = 3
GROWN = ((1_000, 10_000), (10_000, 100_000), (100_000, 950_000))
"""Groups and tasks that a scope has already."""
NOW = 1_800_000_000_000

_numbers = itertools.count(1)


def main(arguments: list[str]) -> None:
    """Measure on both sides, or in this process the one it is on."""
    if sides.here():
        measure(int(arguments[0]) if arguments else 20_000)
    else:
        sides.on_each_side(arguments)


def measure(tasks: int) -> None:
    """Prints the tables of this process's database."""
    set_up()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    shared = tasks // WRITERS // BATCH * BATCH * WRITERS
    counted_transitions = 3 * PER_COUNT
    rows = {
        "floor: rows only, spread": [rate(lambda: lambda: floor(tasks, BATCH), tasks * 3)],
        "floor: rows only, together": [rate(lambda: lambda: floor(tasks, 1), tasks * 3)],
        "events, spread": [rate(lambda: ingest_all(scope(), events(tasks, BATCH)), tasks * 3)],
        "events, a sweep": [rate(lambda: ingest_all(scope(), events(tasks, 50)), tasks * 3)],
        "events, together": [rate(lambda: ingest_all(scope(), events(tasks, 1)), tasks * 3)],
        "the same events again": [again(tasks)],
        "transitions as counts": [rate(lambda: ingest_all(scope(), counts(tasks)), tasks * counted_transitions)],
    }
    with multiprocessing.get_context("spawn").Pool(WRITERS, set_up) as pool:
        together(pool, tasks)()  # all of them have started then
        rows |= {
            f"events, {WRITERS} processes, one group": [rate(lambda: together(pool, tasks), shared * 3)],
            f"counts, {WRITERS} processes": [rate(lambda: together(pool, tasks, True), shared * counted_transitions)],
        }
    sides.table(f"{sides.database()}, thousands per second:", [f"{tasks:,} tasks or counts"], rows)
    cells: dict[str, list[str]] = {"events, spread": [], "transitions as counts": []}
    for groups, there in GROWN:
        full, few = scope(), BATCH * 5
        ingest_all(full, events(there, groups, "old", ("memory",)))()
        sides.settle()
        cells["events, spread"].append(rate(partial(grown, full, few), few * 3))
        cells["transitions as counts"].append(rate(partial(grown, full, few, True), few * counted_transitions))
    headings = [f"{groups:,} groups {there:,} tasks" for groups, there in GROWN]
    sides.table(f"{sides.database()}, thousands per second:", headings, cells)


def rate(prepare: Callable[[], Callable[[], object]], number: int) -> str:
    """A cell: thousands per second of `number` things, each time newly prepared."""
    return sides.cell([number / sides.timed(prepare()) for _ in range(RUNS)])


def grown(full: int, few: int, counted: bool = False) -> Callable[[], object]:
    """What takes a few more, of groups that are there already or not."""
    return ingest_all(full, counts(few) if counted else events(few, BATCH))


def scope() -> int:
    """A scope of its own."""
    from dstackweb.accounts.models import Project
    from dstackweb.progress.counters import ensure_scope

    project, _made = Project.objects.get_or_create(name="bench")
    return ensure_scope(project.pk, next(_numbers), 1)


def ingest_all(scope_id: int, batches: Iterator[Batch]) -> Callable[[], None]:
    """What takes all of it."""
    from dstackweb.progress.ingest import ingest_batch

    made = list(batches)

    def take_all() -> None:
        for batch in made:
            receipt = ingest_batch(scope_id, batch, NOW)
            sides.must_be((receipt.rejected, receipt.applied), ([], BATCH))

    return take_all


def again(tasks: int) -> str:
    """A cell: events that are known already."""
    from dstackweb.progress.ingest import ingest_batch

    found = scope()
    batches = list(events(tasks, BATCH, first="again"))
    for batch in batches:
        ingest_batch(found, batch, NOW)

    def repeat() -> None:
        for batch in batches:
            sides.must_be(ingest_batch(found, batch, NOW).outdated, BATCH)

    return rate(lambda: repeat, tasks * 3)


def events(
    tasks: int, groups: int, first: str = "", states: Sequence[str] = ("waiting", "processing", "memory")
) -> Iterator[Batch]:
    """Batches of a reporter's events, the tasks going round the groups."""
    from dstackweb.progress.reports import Batch, Event
    from dstackweb.progress.states import TaskState

    first = first or f"new{next(_numbers)}"
    for begin in range(0, tasks, BATCH):
        for seq, state in enumerate(map(TaskState, states), begin * 3):
            made = (
                Event(f"{first}-{at}", state, seq, f"prefix-{group % PREFIXES}", f"{first}-{group}")
                for at in range(begin, begin + BATCH)
                for group in (at % groups,)
            )
            yield Batch(first, tuple(made))


def counts(number: int, first: str = "") -> Iterator[Batch]:
    """Batches of a reporter's counts: three of each group."""
    from dstackweb.progress.reports import Batch, Count
    from dstackweb.progress.states import TaskState

    first = first or f"new{next(_numbers)}"
    states = (TaskState.WAITING, TaskState.PROCESSING, TaskState.MEMORY)
    for begin in range(0, number, BATCH):
        for seq, state in enumerate(states, begin * 3):
            made = (
                Count(f"prefix-{at % PREFIXES}", f"{first}-{at}", seq, {state: PER_COUNT})
                for at in range(begin, begin + BATCH)
            )
            yield Batch(first, counts=tuple(made))


def floor(tasks: int, groups: int) -> None:
    """The rows of the same tasks, inserted and twice updated."""
    from django.db import connection, transaction

    from dstackweb.lib import bulk
    from dstackweb.progress import task_events

    found = scope()
    ids: list[tuple[int, ...]] = []
    for begin in range(0, tasks, BATCH):
        with transaction.atomic():
            rows = [
                (found, at % groups % PREFIXES, f"floor-{at}", at % groups, 1, 1, begin, NOW)
                for at in range(begin, begin + BATCH)
            ]
            bulk.insert("progress_task", task_events.FRESH, rows)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT id, group_id FROM progress_task WHERE scope_id = %s ORDER BY id DESC LIMIT 1000", [found]
            )
            ids = cursor.fetchall()
        for state in (4, 5):
            with transaction.atomic():
                bulk.update(
                    "progress_task", task_events.MOVED, [(group, 1, state, begin + state, NOW, pk) for pk, group in ids]
                )


def together(pool: Pool, tasks: int, counted: bool = False) -> Callable[[], object]:
    """What lets several processes write at once, each its share of the tasks."""
    share = tasks // WRITERS // BATCH * BATCH
    found = scope()
    shares = [(found, share, f"writer{next(_numbers)}", counted) for _ in range(WRITERS)]
    return lambda: pool.map(write, shares, chunksize=1)


def set_up() -> None:
    """Set Django up in a writer process, as a web server process has it."""
    import django

    from dstackweb.lib.process import collect_rarely

    django.setup()
    collect_rarely()


def write(given: tuple[int, int, str, bool]) -> None:
    """One process's share."""
    found, share, first, counted = given
    ingest_all(found, counts(share, first) if counted else events(share, 1, first))()


if __name__ == "__main__":
    main(sys.argv[1:])
