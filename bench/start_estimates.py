"""What estimates of starts cost, on SQLite and on PostgreSQL: the simulation alone, and all that the worker does.

    python -m bench.start_estimates [sqlite|postgres] [SIZE …]

Waiting runs are of twenty shapes with one to eight GPUs, on hosts with eight; they last five minutes on average, with a
long tail, as learned from a thousand runs. Everything in one process, as in a worker. Milliseconds: the median, and
between the least and the most.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from statistics import NormalDist

from bench import sides

SIZES = (1_000, 10_000)
HOSTS = (8, 64)
REPEATS = 3


def measure(sizes: list[int], hosts: int) -> None:
    """Prints the table of this process's database."""
    import django

    django.setup()
    from django.db import transaction
    from django.utils import timezone

    from bench import filled
    from dstackweb.backends.hosts.inventory import host_views
    from dstackweb.runs.learned_durations import BINS
    from dstackweb.runs.models import LearnedDuration, Queue, StartEstimate
    from dstackweb.scheduler.models import ForecastState
    from dstackweb.scheduler.passes import forecast_pass
    from dstackweb.scheduler.passes.forecast_pass import Forecast

    filled.BOXES = hosts
    there = filled.Filled(room=8)
    spread = NormalDist(BINS.bin_of(300), 4)
    LearnedDuration.objects.bulk_create(
        LearnedDuration(project=there.project, user=there.ada, prefix=prefix, bin=number, runs=runs)
        for prefix in ("train", "holds")
        for number in range(BINS.count)
        if (runs := round(1000 * (spread.cdf(number + 0.5) - spread.cdf(number - 0.5))))
    )

    def load() -> Forecast:
        queues = list(Queue.objects.select_related("project").filter(count__submitted__gt=0))
        return Forecast.load(queues, host_views(), timezone.now())

    def estimate_all() -> Callable[[], object]:
        with transaction.atomic():
            StartEstimate.objects.all().delete()
            ForecastState.objects.all().delete()
        return forecast_pass.refresh

    def estimate_little() -> Callable[[], object]:
        ForecastState.objects.all().delete()
        return forecast_pass.refresh

    found: dict[str, list[str]] = defaultdict(list)
    for size in sizes:
        there.fill(size)
        found["reading rows"].append(sides.measured(lambda: load, REPEATS))
        found["all simulations, and their windows"].append(sides.measured(lambda: load().estimate, REPEATS))
        found["a refresh that estimates all for the first time"].append(sides.measured(estimate_all, REPEATS))
        found["a refresh with little to estimate"].append(sides.measured(estimate_little, REPEATS))
        sides.must_be(StartEstimate.objects.filter(p50__isnull=False).count(), size)
    sides.table(f"{sides.database()}; {hosts} hosts, {8 * hosts} GPUs", [f"{size:,} waiting" for size in sizes], found)


if __name__ == "__main__":
    if sides.here():
        *given, hosts = (int(one) for one in sys.argv[1:])
        measure(given or list(SIZES), hosts)
    else:
        for number in HOSTS:
            sides.on_each_side([*sys.argv[1:], str(number)])
