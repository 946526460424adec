"""What watching GPUs costs: hosts of eight, each GPU with a running job under a policy, sampled every ten seconds.

python -m bench.gpu_samples [sqlite|postgres] [GPUS …]

Each round is one interval: a look of every host through the product's own intake, with a verdict on every job. CPU is
this process's and the database server's, as a share of one core all the time. What NVML takes is not in it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from bench import sides

SIZES = (100, 1_000, 4_000)
PER_HOST = 8
BATCHES, ROUNDS = 3, 4
"""Each cell is the median of batches of so many rounds."""
EVERY_MS = 10_000
DAY_MS = 24 * 3_600_000
FILLED = 200
"""GPUs that have a day of samples for the last table."""
REPEATS = 5


def measure(sizes: list[int]) -> None:
    """Prints the tables of this process's database."""
    import django

    django.setup()
    from bench.watched import Watched
    from dstackweb.gpus import averages
    from dstackweb.gpus.models import GpuSeries
    from dstackweb.gpus.policy_status import policy_statuses
    from dstackweb.gpus.selectors import columns
    from dstackweb.lib.times import to_moment
    from dstackweb.runs.models import Run

    verdicts()
    watched = Watched(PER_HOST)
    rows: dict[str, list[str]] = {}
    for size in sizes:
        watched.grow(size)
        for name, cell in rounds(watched).items():
            rows.setdefault(name, []).append(cell)
    heading = f"{sides.database()}, a look each {EVERY_MS // 1000} s:"
    sides.table(heading, [f"{size:,} GPUs" for size in sizes], rows)

    filled = watched.fill(FILLED, DAY_MS)
    for name, cell in rounds(watched).items():
        rows[name] = [cell]
    sides.table(f"{sides.database()}, the same later:", [f"{filled:,} samples there"], rows)

    series = list(GpuSeries.objects.order_by("id")[:8])
    last = watched.at_ms
    averages.roll(to_moment(last + 60_000))
    sides.settle()
    runs = list(Run.objects.order_by("id")[:50])

    def chart(span_ms: int) -> Callable[[], Callable[[], object]]:
        return lambda: lambda: columns(series, last - span_ms, last, 360)

    def roll() -> Callable[[], object]:
        GpuSeries.objects.update(averaged_ms=averages.bucket_of(last) - averages.BUCKET_MS)
        return lambda: averages.roll(to_moment(last + 60_000))

    acts: dict[str, Callable[[], Callable[[], object]]] = {
        "chart of 8 GPUs, one hour": chart(3_600_000),
        "chart of 8 GPUs, 24 hours": chart(DAY_MS),
        "how 50 runs stand with their policies": lambda: lambda: policy_statuses(runs, to_moment(last)),
        "five minutes of all GPUs averaged": roll,
    }
    cells = {name: [sides.measured(prepare, REPEATS)] for name, prepare in acts.items()}
    sides.table(f"{sides.database()}, milliseconds:", [f"{sizes[-1]:,} GPUs"], cells)


def rounds(watched: Any) -> dict[str, str]:
    """What a few rounds cost, per round."""
    from django.db import connection

    from dstackweb.gpus import window
    from dstackweb.lib.times import to_moment
    from dstackweb.scheduler import utilization

    number = len(watched.jobs)
    watched.round()  # the first makes the series
    here, database, rates = [], [], []
    statements = judged = 0

    def count(execute: Any, sql: str, *rest: Any) -> Any:
        nonlocal statements
        statements += 1
        return execute(sql, *rest)

    real = window.judge

    def judge(*given: Any) -> Any:
        nonlocal judged
        judged += 1
        return real(*given)

    for _ in range(BATCHES):
        began = time.perf_counter(), time.process_time(), watched.database_cpu_s()
        for _ in range(ROUNDS):
            watched.round()
            utilization.judge_jobs(to_moment(watched.at_ms))
        wall_s = time.perf_counter() - began[0]
        here.append((time.process_time() - began[1]) / ROUNDS / EVERY_MS * 1000 * 100)
        database.append((watched.database_cpu_s() - began[2]) / ROUNDS / EVERY_MS * 1000 * 100)
        rates.append(number * ROUNDS / wall_s)
    with connection.execute_wrapper(count), mock.patch("dstackweb.gpus.window.judge", judge):
        watched.round()
        utilization.judge_jobs(to_moment(watched.at_ms))
    return {
        "CPU here, % of one core": sides.cell(here),
        "CPU of the database server, %": sides.cell(database),
        "samples written and judged, per s": sides.cell(rates),
        "statements for a host": f"{statements / len(watched.hosts):.1f}",
        "jobs low for long enough to be judged": f"{judged:,} of {number:,}",
    }


def verdicts() -> None:
    """What a sample costs in pure code: its fold, and the verdict on its job."""
    from dstackweb.gpus.window import NOTHING, Window, fold, judge

    window = Window(1_800_000, "any", 0)
    rows: dict[str, list[str]] = {}
    for gpus in (1, 8, 72):
        values = []
        for _ in range(REPEATS):
            stretches, used = [NOTHING] * gpus, random.Random(5)
            samples = [(at * EVERY_MS, used.choice((0, 0, 0, 90))) for at in range(20_000 // gpus)]
            began = time.perf_counter()
            for at_ms, value in samples:
                for place in range(gpus):
                    stretches[place] = fold(stretches[place], at_ms, value, 50, EVERY_MS)
                judge(window, stretches, at_ms, EVERY_MS)
            values.append((time.perf_counter() - began) / len(samples) / gpus * 1e6)
        rows[f"a sample of a job with {gpus} GPUs"] = [sides.cell(values)]
    sides.table("Pure code:", ["microseconds"], rows)


if __name__ == "__main__":
    if sides.here():
        measure([int(size) for size in sys.argv[1:]] or list(SIZES))
    else:
        sides.on_each_side(sys.argv[1:])
