"""Measure how good the estimated time left is, on histories of tasks whose end is known.

    python -m bench.time_left [SEEDS] [tasks]

Each history is given to the counters report by report, without a database, and looked at every 2.5 s. The constants of
`progress.time_left` were chosen on some shapes and seeds; the others are held out. A line: the median and the 90 %
quantile of |estimate − truth| / truth, by the share of the time that has gone (with `tasks`: of the tasks that are
done); the share of looks in which the range holds the truth, and the middle of the ranges' end by their begin; and the
largest change between two looks, up or down, while more than half a minute is left. All but the quantiles by share are
of looks once a fifth is done. The estimator of 0.1.0rc1 is measured on the same looks.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bench import sides
from bench.replay import workloads
from bench.replay.workloads import Counts, History, Report

if TYPE_CHECKING:
    from dstackweb.progress.counter_rows import PrefixRow
    from dstackweb.progress.counters import Delta
    from dstackweb.progress.models import Scope
    from dstackweb.progress.time_left import Left

LOOK_S = 2.5
BEGUN = 0.2
SHARES = (0.2, 0.4, 0.6, 0.8)
TUNED_SEEDS, HELD_OUT_SEEDS = 1, 1001
"""The first seeds of each."""
LATE_S, SHORT_S = 30.0, 10.0
"""Changes below SHORT_S are no jumps, nor are those in the last LATE_S."""
START_MS = 1_800_000_000_000


class Look(NamedTuple):
    """A moment: shares of the time and of the tasks, the true time left, and what both estimators say."""

    time: float
    tasks: float
    left_s: float
    new: Left | None
    old: Left | None


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    set_up()
    seeds = int(arguments[0]) if arguments else 12
    by = "tasks" if "tasks" in arguments else "time"
    print(f"{sides.cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}; looks by share of the {by}\n")
    tables = {
        "shapes that were tuned on, seeds too": (workloads.TUNED, TUNED_SEEDS),
        "the same shapes, other seeds": (workloads.TUNED, HELD_OUT_SEEDS),
        "shapes that were held out": (workloads.HELD_OUT, HELD_OUT_SEEDS),
    }
    for heading, (shapes, first) in tables.items():
        measure(heading, ([make(first + seed) for seed in range(seeds)] for make in shapes), by)
    measure("what `make demo-progress` reports", [[workloads.demo()]], by)


def measure(heading: str, shapes: Iterable[list[History]], by: str) -> None:
    """Print a table with two lines for each shape, and the medians of the shapes."""
    columns = [*(f"{100 * share:.0f}–{100 * share + 20:.0f} %" for share in SHARES), "in range", "width", "jump"]
    print(f"{heading:44}" + "".join(f"{column:>13}" for column in columns))
    every: dict[str, list[Figures]] = {"new": [], "old": []}
    for histories in shapes:
        runs = [list(looks(history)) for history in histories]
        for name, chosen in CHOICES.items():
            figures = Figures.of(runs, chosen, by)
            every[name].append(figures)
            print(f"{histories[0].shape if name == 'new' else '  before':44}" + figures.cells, flush=True)
    for name, of_shapes in every.items():
        errors = [figures.error for figures in of_shapes]
        held = [figures.held for figures in of_shapes]
        print(
            f"all, {'now' if name == 'new' else 'before'}: median error {statistics.median(errors):.2f} "
            f"({min(errors):.2f}–{max(errors):.2f}), in range {statistics.mean(held):.2f} "
            f"({min(held):.2f}–{max(held):.2f})"
        )
    print(flush=True)


CHOICES: dict[str, Callable[[Look], Left | None]] = {"new": lambda look: look.new, "old": lambda look: look.old}


@dataclass(frozen=True)
class Figures:
    """A line: errors by share (median, 90 %), the median of all, and what the columns say."""

    by_share: list[tuple[float, float] | None]
    error: float
    held: float
    width: float
    jump: float

    @classmethod
    def of(cls, runs: Sequence[Sequence[Look]], chosen: Callable[[Look], Left | None], by: str) -> Figures:
        """Of the looks at several histories of a shape."""
        begun = [look for run in runs for look in run if getattr(look, by) >= BEGUN]
        known = [(getattr(look, by), look.left_s, left) for look in begun if (left := chosen(look))]
        errors = [(share, abs(left.seconds - truth) / truth) for share, truth, left in known]
        by_share = []
        for first in SHARES:
            of = sorted(error for share, error in errors if first <= share < first + 0.2)
            by_share.append((statistics.median(of), of[int(0.9 * len(of))]) if of else None)
        jumps = [1.0]
        for run in runs:
            for before, after in itertools.pairwise(run):
                was, now = chosen(before), chosen(after)
                if was and now and getattr(before, by) >= BEGUN and after.left_s > LATE_S:
                    jumps.append(max(was.seconds, SHORT_S) / max(now.seconds, SHORT_S))
        return cls(
            by_share=by_share,
            error=statistics.median([error for _, error in errors] or [math.inf]),
            # A look without an estimate is no range that holds the truth.
            held=sum(left.low <= truth <= left.high for _, truth, left in known) / len(begun),
            width=statistics.median([left.high / max(left.low, 1.0) for _, _, left in known] or [math.inf]),
            jump=max(max(jump, 1 / jump) for jump in jumps),
        )

    @property
    def cells(self) -> str:
        errors = [f"{each[0]:.2f} {each[1]:.2f}" if each else "–" for each in self.by_share]
        return "".join(f"{text:>13}" for text in (*errors, f"{self.held:.2f}", f"{self.width:.1f}", f"{self.jump:.2f}"))


def looks(history: History) -> Iterator[Look]:
    """Give a history to the counters, and look at it every LOOK_S."""
    from dstackweb.progress.time_left import Shown

    replay, due_s = Replay(), 0.0
    for report in history.reports:
        replay.add(report)
        truth = history.left_s(report.at_s)
        if report.at_s < due_s or truth <= 0:
            continue
        due_s = report.at_s + LOOK_S
        shown = Shown.of(replay.scope.time_left)
        yield Look(
            history.share(report.at_s),
            sum(each.done for each in report.prefixes.values()) / sum(each.total for each in report.prefixes.values()),
            truth,
            shown.at(replay.now_ms, replay.scope.processing) if shown else None,
            replay.before(),
        )


class Replay:
    """The counters of a run in memory, as reports change them."""

    def __init__(self) -> None:
        from dstackweb.progress.counters import CounterRows
        from dstackweb.progress.models import Scope

        self.scope: Scope = Scope(run_id=1, pace="[]", time_left="[]")
        self.now_ms = 0
        self._rows = CounterRows(self.scope)
        self._counts: dict[str, Counts] = {}

    def add(self, report: Report) -> None:
        """Count a report."""
        from dstackweb.progress.counters import HEARD, Heard

        self.now_ms = START_MS + round(1000 * report.at_s)
        self.scope.version += 1
        deltas = {
            (name, name): delta
            for name, counts in report.prefixes.items()
            if (delta := _delta(self._counts.get(name, Counts(0, 0, 0, 0, 0.0)), counts))
        }
        heard = Heard(all_the_time=False, believed_s=0) if report.back else HEARD
        self._rows.count(deltas, self.now_ms, heard)
        for number, row in enumerate(self._rows.prefixes.values(), 1):
            row.id = number
        for group in self._rows.groups.values():
            group.id = 1
        if self._rows.is_estimate_due(self.now_ms):
            self._rows.estimate(self.now_ms, {})
        self._counts = report.prefixes

    def before(self) -> Left | None:
        """The estimate of 0.1.0rc1: the rate of all, and no less than the slowest prefix."""
        whole = _before(self.scope, self.now_ms)
        parts = [part for row in self._rows.prefixes.values() if (part := _before(row, self.now_ms))]
        return type(whole)(*map(max, zip(whole, *parts, strict=True))) if whole else None


def _delta(before: Counts, after: Counts) -> Delta:
    from dstackweb.progress.counters import Delta
    from dstackweb.progress.states import TaskState

    done, running = after.done - before.done, after.processing - before.processing
    states = {
        TaskState.MEMORY: done,
        TaskState.PROCESSING: running,
        TaskState.QUEUED: after.total - before.total - done - running,
    }
    timed = after.duration_n - before.duration_n
    return Delta(
        {state: number for state, number in states.items() if number}, timed, after.duration_s - before.duration_s
    )


def _before(row: Scope | PrefixRow, now_ms: int) -> Left | None:
    from dstackweb.progress.estimate import RateSample, rate
    from dstackweb.progress.time_left import Left

    unfinished = row.processing + row.queued
    pace = rate(RateSample(row.first_ms, row.finished_1m, row.finished_10m, row.rated_ms, now_ms))
    if not unfinished or pace is None or pace.per_s <= 0:
        return None
    high = unfinished / pace.low if pace.low > 0 else math.inf
    return Left(unfinished / pace.per_s, unfinished / pace.high, high)


def set_up() -> None:
    """Django's, without a database."""
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dstackweb.settings")
    django.setup()


if __name__ == "__main__":
    main(sys.argv[1:])
