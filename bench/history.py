"""What the history costs: counting placements, sampling a long queue, a month of five queues, on both databases.

python -m bench.history [sqlite|postgres] [SIZE …]
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench import sides

if TYPE_CHECKING:
    from django.test import Client

SIZES = (1_000, 10_000, 100_000)
QUEUES = 5
DAYS = 30
REPEATS = 7


def measure(sizes: list[int]) -> None:
    """Prints the tables of this process's database."""
    import django

    django.setup()
    from django.db import transaction
    from django.test import Client
    from django.utils import timezone

    from bench.filled import Filled
    from dstackweb.runs import history, services
    from dstackweb.runs.history import hour_of
    from dstackweb.runs.models import QueueHour, Run

    filled = Filled(room=8)
    queues = [services.ensure_queue(filled.project, name) for name in ("default", *(f"q{n}" for n in range(1, QUEUES)))]
    now = timezone.now()
    web = Client(headers={"Host": "localhost"})
    web.force_login(filled.ada)

    def sample() -> Callable[[], object]:
        return lambda: history.sample_lengths(timezone.now())

    week = page("queues/default/history/", web)
    growing = {"sampling how many wait": sample, "GET queues/default/history/ (one hour so far)": week}
    grown: dict[str, list[str]] = {name: [] for name in growing}
    for size in sizes:
        filled.fill(size)
        for name, prepare in growing.items():
            grown[name].append(sides.measured(prepare, REPEATS))
    sides.table(f"{sides.database()}, milliseconds, waiting runs:", [f"{size:,}" for size in sizes], grown)

    QueueHour.objects.all().delete()
    QueueHour.objects.bulk_create(
        (
            QueueHour(
                queue=queue, band=band, hour=hour_of(now) - dt.timedelta(hours=hours), placed=4, wait_s=4000,
                wait_max_s=3000, waited_1m=1, waited_15m=2, waited_1h=1, length=9, length_max=12,
            )
            for queue in queues for band in range(4) for hours in range(DAYS * 24)
        ),
        batch_size=500,
    )  # fmt: skip
    sides.settle()

    def count(number: int, bands: int) -> Callable[[], Callable[[], object]]:
        runs = [Run(queue=queues[0], priority=index % bands * 25, queued_at=now) for index in range(number)]

        def act() -> None:
            with transaction.atomic():
                history.count_placed(runs, now)

        return lambda: act

    month = history.HistoryRange(now, DAYS, hourly=False)
    rows: dict[str, Callable[[], Callable[[], object]]] = {
        "count_placed of 1 run, in a transaction": count(1, 1),
        "count_placed of 50 runs of one band": count(50, 1),
        "count_placed of 50 runs of four bands": count(50, 4),
        "series of one queue": lambda: lambda: history.series(queues[0], month),
        "overview of all queues": lambda: lambda: history.overview(filled.project, month),
        "GET queues/default/history/?days=30": page("queues/default/history/?days=30", web),
        "GET history/?days=30": page("history/?days=30", web),
    }
    cells = {name: [sides.measured(prepare, REPEATS)] for name, prepare in rows.items()}
    hours = QueueHour.objects.count()
    sides.table(f"{sides.database()}, milliseconds, {QUEUES} queues:", [f"{hours:,} hour rows"], cells)


def page(path: str, web: Client) -> Callable[[], Callable[[], object]]:
    """A page as a browser gets it: all of Django's work, without the network."""
    return lambda: lambda: sides.must_be(web.get(f"/p/main/{path}").status_code, 200)


if __name__ == "__main__":
    if sides.here():
        measure([int(size) for size in sys.argv[1:]] or list(SIZES))
    else:
        sides.on_each_side(sys.argv[1:])
