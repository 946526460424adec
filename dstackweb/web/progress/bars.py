"""A row of a progress page: the segments of its bar, and its numbers as text. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from django.utils.translation import gettext as _

from dstackweb.progress.selectors import ProgressBar
from dstackweb.progress.states import TaskState
from dstackweb.wording import progress as progress_words, sentence
from dstackweb.wording.progress import state as word

COLOURS = 8
"""Number of colours in static/progress.css."""
WHOLE = 100.0
MIN_WIDTH = 0.7
"""Percent of the bar that failed tasks and tasks without a worker take at least."""

DRAWN = (
    TaskState.MEMORY, TaskState.FORGOTTEN, TaskState.RELEASED, TaskState.ERRED, TaskState.PROCESSING, TaskState.QUEUED,
    TaskState.NO_WORKER,
)  # fmt: skip
"""From left to right. Waiting tasks are the empty rest."""
_ALWAYS_VISIBLE = (TaskState.ERRED, TaskState.NO_WORKER)


class Segment(NamedTuple):
    """One state's part of a bar: position and width, in percent with two digits."""

    state: str
    x: str
    width: str


def segments(counts: Mapping[TaskState, int]) -> list[Segment]:
    """The coloured parts of a bar, side by side."""
    total = sum(counts.values())
    if not total:
        return []
    widths = {state: WHOLE * counts.get(state, 0) / total for state in (*DRAWN, TaskState.WAITING)}
    for state in _ALWAYS_VISIBLE:
        if 0 < widths[state] < MIN_WIDTH:
            widest = max(widths, key=lambda one: widths[one])
            widths[widest] -= MIN_WIDTH - widths[state]
            widths[state] = MIN_WIDTH
    drawn, x = [], 0.0
    for state in DRAWN:
        if widths[state]:
            drawn.append(Segment(state.value, _percent(x), _percent(widths[state])))
        x += widths[state]
    return drawn


def _percent(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def colour(name: str) -> int:
    """The colour of a name, the same on all pages."""
    return zlib.adler32(name.encode()) % COLOURS


class Durations(NamedTuple):
    """Seconds that 50 % and 95 % of ended tasks took at most."""

    p50_s: float
    p95_s: float


@dataclass(frozen=True)
class ProgressRow:
    """A bar with its texts and links.

    `colour_name` determines the colour (default: the bar's name); `kind` makes keys unique among kinds of rows.
    `has_stored_failures`: tasks have failed that are forgotten now. `durations` are None unless they are counted.
    """

    bar: ProgressBar
    colour_name: str = ""
    url: str = ""
    kind: str = ""
    failures_url: str = ""
    has_stored_failures: bool = False
    durations: Durations | None = None

    @property
    def key(self) -> str:
        return f"{self.kind}{self.bar.id}"

    @property
    def colour(self) -> int:
        return colour(self.colour_name or self.bar.name)

    @cached_property
    def segments(self) -> list[Segment]:
        return segments(self.bar.counts)

    @property
    def counts(self) -> str:
        """All counts in the order of the states, for the tooltip."""
        return ",".join(str(self.bar.states[state]) for state in TaskState)

    @property
    def parts(self) -> list[tuple[TaskState, str]]:
        """Counts of states other than done."""
        return progress_words.parts(self.bar.counts)

    @property
    def sentence(self) -> str:
        """Text for screen readers."""
        return progress_words.sentence(
            sentence.visible(self.bar.name) if self.bar.name else _("All"),
            self.bar.states,
            self.bar.finished,
            self.bar.total,
        )

    @property
    def rate(self) -> str:
        """The rate, empty without unfinished tasks."""
        return progress_words.rate(self.bar.rate.per_s) if self.bar.rate and self.bar.live else ""

    @property
    def rate_range(self) -> str:
        return progress_words.rate_spread(self.bar.rate) if self.bar.live else ""

    @property
    def mean(self) -> str:
        """Average processing time."""
        return progress_words.took(self.bar.mean_s) if self.bar.mean_s is not None else ""

    @property
    def spread(self) -> str:
        """Half and nearly all of the durations: `p50 2.4 s · p95 9.1 s`; empty if they are not known."""
        return progress_words.durations(*self.durations) if self.durations else ""

    @property
    def left(self) -> str:
        """The time left, else the state that explains its absence."""
        bar, counts = self.bar, self.bar.counts
        if not bar.total:
            return "–"
        if not bar.live:
            return _("done") if counts[TaskState.MEMORY] == bar.total else _("finished")
        if bar.left:
            return progress_words.left(bar.left)
        if bar.stuck.paused:
            return _("paused")
        if bar.live == bar.stuck.impossible:
            return _("impossible")
        if counts[TaskState.NO_WORKER] == bar.live:
            return word(TaskState.NO_WORKER)
        if counts[TaskState.PROCESSING]:
            return "–"
        return word(TaskState.QUEUED if counts[TaskState.QUEUED] else TaskState.WAITING)

    @property
    def stuck(self) -> str:
        """What the time left is without; empty if it is of all that is unfinished."""
        return progress_words.stuck(self.bar.stuck.paused, self.bar.stuck.impossible)

    @property
    def estimate(self) -> str:
        """The time left as one number; a lower bound if some tasks have no worker."""
        return progress_words.about(self.bar.left) if self.bar.left and not self._is_lower_bound else self.left

    @property
    def left_range(self) -> str:
        return "" if self._is_lower_bound else progress_words.spread(self.bar.left)

    @property
    def _is_lower_bound(self) -> bool:
        return self.bar.counts[TaskState.NO_WORKER] > 0

    @property
    def percent(self) -> str:
        """Share of finished tasks, rounded down."""
        return f"{100 * self.bar.finished // self.bar.total} %" if self.bar.total else ""
