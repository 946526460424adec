"""What a queue as it was costs: a moment long ago, with many places since, and one with many runs that waited. As many
runs as the largest size wait now.

python -m bench.queue_past [sqlite|postgres] [SIZE …]
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable, Iterable

from bench import sides

SIZES = (1_000, 10_000, 100_000)
REPEATS = 7
WAITING = 40
"""Runs that waited at each moment, however many came and went since."""


def measure(sizes: list[int]) -> None:
    """Prints the tables of this process's database."""
    import django

    django.setup()
    from django.test import Client
    from django.utils import timezone

    from bench.filled import Filled
    from dstackweb.runs.models import PastPlace, Run
    from dstackweb.runs.queue import past

    filled = Filled(room=8)
    filled.fill(max(sizes))
    ids = list(filled.queue.runs.order_by("pk").values_list("pk", flat=True))
    web = Client(headers={"Host": "localhost"})
    web.force_login(filled.ada)
    now = timezone.now()
    first, run = now - past.KEPT, filled.queue.runs.order_by("pk")[0]

    def fill(spans: Iterable[tuple[dt.timedelta, dt.timedelta]]) -> None:
        """Places of runs, each since and until so long after the first moment that is kept."""
        PastPlace.objects.all().delete()
        rows = (
            PastPlace(
                queue=filled.queue, run_id=ids[number], since=first + since,
                until=first + until, queued_at=first + since, seniority_us=number, priority=50, penalty_s=0,
                ended_by="provisioning",
            )
            for number, (since, until) in enumerate(spans)
        )  # fmt: skip
        PastPlace.objects.bulk_create(rows, batch_size=2000)
        sides.settle()

    def read(days: float, run: Run | None = None, alone: bool = False) -> Callable[[], Callable[[], object]]:
        at = first + dt.timedelta(days=days)
        return lambda: lambda: past.queue_at(filled.queue, at, WAITING, run=run, alone=alone)

    def page(days: float) -> Callable[[], Callable[[], object]]:
        path = f"/p/main/queues/default/at/?t={first + dt.timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}"
        return lambda: lambda: sides.must_be(web.get(path).status_code, 200)

    long = {
        "29 days ago": read(1),
        "15 days ago": read(15),
        "1 hour ago": read(29.95),
        "the page, 29 days ago": page(1),
    }
    cells: dict[str, list[str]] = {name: [] for name in long}
    for size in sizes:
        step = past.KEPT / size
        fill((number * step, (number + WAITING) * step) for number in range(size))
        for name, prepare in long.items():
            cells[name].append(sides.measured(prepare, REPEATS))
    heads = [f"{size:,}" for size in sizes]
    sides.table(f"{sides.database()}, milliseconds, places since, of which {WAITING} held:", heads, cells)

    many = {
        "first rows": read(15),
        "last rows": lambda: lambda: past.queue_at(filled.queue, first + past.KEPT / 2, WAITING, size - WAITING),
        "one run": read(15, run=run, alone=True),
        "the page": page(15),
    }
    cells = {name: [] for name in many}
    for size in sizes:
        fill([(dt.timedelta(days=10), dt.timedelta(days=20))] * size)
        for name, prepare in many.items():
            cells[name].append(sides.measured(prepare, REPEATS))
    sides.table(f"{sides.database()}, milliseconds, runs that waited at that moment:", heads, cells)


if __name__ == "__main__":
    if sides.here():
        measure([int(size) for size in sys.argv[1:]] or list(SIZES))
    else:
        sides.on_each_side(sys.argv[1:])
