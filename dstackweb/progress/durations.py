"""How long tasks inside runs take: a histogram per prefix, kept with its sums, so that a page reads no tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from dstackweb.lib.log_bins import LogBins
from dstackweb.progress.models import TaskPrefix

BINS = LogBins(least=0.001, per_octave=3, count=96)
"""Seconds, up to 39 days."""
TASKS_MIN = 5
"""Fewer tasks have no quantiles."""


def added(histogram: str, bins: Mapping[int, int]) -> str:
    """The JSON of a histogram with more tasks in it."""
    counts = Counter({int(number): count for number, count in json.loads(histogram).items()})
    counts.update(bins)
    return json.dumps({str(number): counts[number] for number in sorted(counts)})


def quantiles(prefixes: Collection[int], shares: Sequence[float]) -> dict[int, list[float]]:
    """Seconds that these shares of a prefix's tasks took at most, by its id.

    Only of prefixes with TASKS_MIN, all of whose timed tasks were reported one by one: of the others sums are known.
    """
    found = {}
    rows = TaskPrefix.objects.filter(pk__in=prefixes, duration_n__gte=TASKS_MIN)
    for pk, timed, histogram in rows.values_list("pk", "duration_n", "durations"):
        counts = {int(number): count for number, count in histogram.items()}
        if sum(counts.values()) == timed:
            found[pk] = [BINS.quantile(counts, share) or 0.0 for share in shares]
    return found
