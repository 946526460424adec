"""A row of counters as templates show it: the segments of its bar, and its numbers in words. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from django.utils.translation import gettext as _

from dstackweb.progress.selectors import ProgressBar
from dstackweb.progress.states import TaskState
from dstackweb.wording import progress as progress_words
from dstackweb.wording.progress import state as word

COLOURS = 8
"""As many as static/progress.css has; whoever sees few of them apart still has the names."""
OF_SUMS = 2
WHOLE = 100.0
LEAST = 0.7
"""Percent of the bar: what has failed, or has nobody to run it, is seen however little it is."""

DRAWN = (
    TaskState.MEMORY, TaskState.FORGOTTEN, TaskState.RELEASED, TaskState.ERRED, TaskState.PROCESSING, TaskState.QUEUED,
    TaskState.NO_WORKER,
)  # fmt: skip
"""From left to right. Waiting is the rest, which has no colour."""
_SEEN = (TaskState.ERRED, TaskState.NO_WORKER)


class Segment(NamedTuple):
    """One state's part of a bar: where it begins and how wide it is, percent with the digits that a screen can show."""

    state: str
    x: str
    width: str


def segments(counts: Mapping[TaskState, int]) -> list[Segment]:
    """The coloured parts of a bar, side by side, together at most as long as it."""
    total = sum(counts.values())
    if not total:
        return []
    widths = {state: WHOLE * counts.get(state, 0) / total for state in (*DRAWN, TaskState.WAITING)}
    for state in _SEEN:
        if 0 < widths[state] < LEAST:
            widest = max(widths, key=lambda one: widths[one])
            widths[widest] -= LEAST - widths[state]
            widths[state] = LEAST
    drawn, x = [], 0.0
    for state in DRAWN:
        if widths[state]:
            drawn.append(Segment(state.value, _percent(x), _percent(widths[state])))
        x += widths[state]
    return drawn


def _percent(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def colour(name: str) -> int:
    """The same for a name wherever and whenever it is shown; sums have that of the legend."""
    return zlib.adler32(name.encode()) % COLOURS if name else OF_SUMS


def named(bar: ProgressBar, name: str) -> ProgressBar:
    """The sums of a scope as the row of what it is about."""
    return replace(bar, name=name)


@dataclass(frozen=True)
class Line:
    """One bar with its words.

    `of` is whose colour it has; `where`, the address of what is behind it, and `failures` of what failed of it; `kind`
    tells rows of one kind from others. `had_failed`: some that are forgotten by now.
    """

    bar: ProgressBar
    of: str = ""
    where: str = ""
    kind: str = ""
    failures: str = ""
    had_failed: bool = False

    @property
    def key(self) -> str:
        """What tells its row from all others on the page."""
        return f"{self.kind}{self.bar.id}"

    @property
    def name(self) -> str:
        """Of its prefix or group."""
        return self.bar.name

    @property
    def colour(self) -> int:
        """Which colour it has."""
        return colour(self.of or self.bar.name)

    @cached_property
    def segments(self) -> list[Segment]:
        """The coloured parts."""
        return segments(self.bar.counts)

    @property
    def numbers(self) -> str:
        """All counts in the order of the states, for what is shown over a bar."""
        return ",".join(str(self.bar.counts[state]) for state in TaskState)

    @property
    def parts(self) -> list[tuple[TaskState, str]]:
        """What there is beside what is done, in words."""
        return progress_words.parts(self.bar.counts)

    @property
    def sentence(self) -> str:
        """For whoever can't see the bar."""
        return progress_words.sentence(self.bar.name or _("All"), self.bar.counts, self.bar.finished, self.bar.total)

    @property
    def finished(self) -> str:
        """How many have finished."""
        return progress_words.count(self.bar.finished)

    @property
    def total(self) -> str:
        """How many there are."""
        return progress_words.count(self.bar.total)

    @property
    def groups(self) -> str:
        """In how many groups."""
        return progress_words.count(self.bar.groups)

    @property
    def rate(self) -> str:
        """How fast they finish."""
        return progress_words.rate(self.bar.rate.per_s) if self.bar.rate and self.bar.live else ""

    @property
    def rate_spread(self) -> str:
        """From where to where that may be."""
        return progress_words.rate_spread(self.bar.rate) if self.bar.live else ""

    @property
    def mean(self) -> str:
        """What one takes on average."""
        return progress_words.took(self.bar.mean_s) if self.bar.mean_s is not None else ""

    @property
    def left(self) -> str:
        """When all will have finished, or why nobody can say."""
        if not self.bar.total:
            return "–"
        if not self.bar.live:
            return _("done") if self.ended_well else _("finished")
        if self.bar.left:
            return progress_words.left(self.bar.left)
        return self._stands

    @property
    def _stands(self) -> str:
        counts = self.bar.counts
        if counts[TaskState.NO_WORKER] == self.bar.live:
            return word(TaskState.NO_WORKER)
        if counts[TaskState.PROCESSING]:
            return "–"
        return word(TaskState.QUEUED if counts[TaskState.QUEUED] else TaskState.WAITING)

    @property
    def about(self) -> str:
        """The most likely time left, without its range; where some have nobody to run them, the least."""
        return progress_words.about(self.bar.left) if self.bar.left and not self._is_the_least else self.left

    @property
    def spread(self) -> str:
        """The range of it."""
        return "" if self._is_the_least else progress_words.spread(self.bar.left)

    @property
    def _is_the_least(self) -> bool:
        return self.bar.counts[TaskState.NO_WORKER] > 0

    @property
    def ended_well(self) -> bool:
        """Whether there is something, and all of it is done: of what is forgotten nobody knows."""
        return 0 < self.bar.counts[TaskState.MEMORY] == self.bar.total

    @property
    def done(self) -> str:
        """How many are done."""
        return progress_words.count(self.bar.counts[TaskState.MEMORY])

    @property
    def failed(self) -> str:
        """How many have failed, where any has."""
        return self._any(TaskState.ERRED)

    @property
    def forgotten(self) -> str:
        """How many are forgotten, where any is."""
        return self._any(TaskState.FORGOTTEN)

    @property
    def released(self) -> str:
        """How many are released, where any is."""
        return self._any(TaskState.RELEASED)

    def _any(self, state: TaskState) -> str:
        return progress_words.count(self.bar.counts[state]) if self.bar.counts[state] else ""

    @property
    def percent(self) -> str:
        """Of them that have finished; not all before it is all."""
        if not self.bar.total:
            return ""
        return f"{100 * self.bar.finished // self.bar.total} %"
