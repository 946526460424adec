"""The pace of work on tasks, in a dozen numbers of a prefix or a scope. Pure.

A clock of its own counts the seconds in which tasks ran or finished while their reporter was heard. A moment on this
clock weighs (its time / the time now)³, so that the latest quarter counts most: of a minute, an hour or a day of work.
This needs no list of moments, since all weights shrink by the same factor as time goes on.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple, Self

POWER = 3
"""Exponent of the weights."""
NOW_S = 30.0
"""Time constant of what is called "now"."""
LIFE_MAX_S = 14 * 86400.0
"""The clock stops here, and weights of a constant span remain: of a project, whose runs come and go for years."""


class Step(NamedTuple):
    """Changes since the last report of a prefix or scope.

    `running`: mean number of tasks that ran meanwhile; `timed`, `timed_s`: timed tasks among the finished ones, and the
    sum of their durations; `added`: new tasks.
    """

    seconds: float
    finished: int
    running: float
    timed: int = 0
    timed_s: float = 0.0
    added: int = 0


class Pace(NamedTuple):
    """Weighted sums over the clock, `seconds`, unless said otherwise."""

    seconds: float = 0.0
    """Not weighted."""
    span_s: float = 0.0
    """Time: the sum of all weights."""
    finished: float = 0.0
    finished_ever: float = 0.0
    """Not weighted."""
    idle_s: float = 0.0
    """Time of work since a task finished."""
    worked_s: float = 0.0
    """Running tasks × time."""
    worked_squares: float = 0.0
    """Running tasks² × time."""
    running: float = 0.0
    """Running tasks, an exponential average over NOW_S that began at 0."""
    timed: float = 0.0
    timed_s: float = 0.0
    reports: float = 0.0
    """Reports with timed tasks."""
    deviations: float = 0.0
    """Squares of how far the timed tasks of such a report were from the mean, in s², by their number."""
    added: float = 0.0
    added_now: float = 0.0
    """New tasks a second, an exponential average over NOW_S that began at 0."""

    @classmethod
    def of(cls, text: str) -> Self:
        return cls(*json.loads(text))

    def __str__(self) -> str:
        """The JSON that is stored."""
        return f"[{','.join([f'{number:.7g}' for number in self])}]" if any(self) else "[]"

    def after(self, step: Step) -> Pace:
        """The pace after another step, which may take no time."""
        now_s = min(self.seconds + step.seconds, LIFE_MAX_S)
        if step.seconds > 0:
            shrunk = max(0.0, now_s - step.seconds) / now_s
            old = shrunk**POWER
            # What happens evenly over the step has the mean of the weights of its moments.
            new = now_s / (POWER + 1) * (1 - shrunk ** (POWER + 1)) / step.seconds
            fade = math.exp(-step.seconds / NOW_S)
            added_now = self.added_now * fade + step.added / step.seconds * (1 - fade)
        else:
            old, new, fade, added_now = 1.0, 1.0, 1.0, self.added_now
        deviation = 0.0
        if is_compared := step.timed > 0 and self.timed > 0:
            deviation = (step.timed_s - step.timed * self.timed_s / self.timed) ** 2 / step.timed
        worked_s = step.running * step.seconds
        return Pace(
            seconds=now_s,
            span_s=self.span_s * old + step.seconds * new,
            finished=self.finished * old + step.finished * new,
            finished_ever=self.finished_ever + step.finished,
            idle_s=0.0 if step.finished else self.idle_s + step.seconds,
            worked_s=self.worked_s * old + worked_s * new,
            worked_squares=self.worked_squares * old + worked_s * step.running * new,
            running=self.running * fade + step.running * (1 - fade),
            timed=self.timed * old + step.timed * new,
            timed_s=self.timed_s * old + step.timed_s * new,
            reports=self.reports * old + is_compared,
            deviations=self.deviations * old + deviation,
            added=self.added * old + step.added * new,
            added_now=added_now,
        )

    @property
    def _begun(self) -> float:
        """Weight of what an exponential average over NOW_S that began at 0 has seen."""
        return -math.expm1(-self.seconds / NOW_S)

    @property
    def rate(self) -> float:
        """Finished tasks a second: lately, and one task as ever, so that it stays sensible when none has finished."""
        if not self.span_s or not self.finished_ever:
            return 0.0
        return (self.finished + 1) / (self.span_s + self.seconds / self.finished_ever)

    @property
    def mean_running(self) -> float:
        return self.worked_s / self.span_s if self.span_s else 0.0

    @property
    def running_now(self) -> float:
        return self.running / self._begun if self.span_s else 0.0

    @property
    def variance(self) -> float:
        """Variance of the number of running tasks."""
        return max(0.0, self.worked_squares / self.span_s - self.mean_running**2) if self.span_s else 0.0

    @property
    def added_per_s(self) -> float:
        """New tasks a second, lately and now: the lower of the two."""
        return min(self.added / self.span_s, self.added_now / self._begun) if self.span_s else 0.0

    @property
    def trend(self) -> float:
        """The exponent e if the number of running tasks grows as time**e; negative where it falls."""
        return (POWER + 1) * (self.running_now / self.mean_running - 1) if self.mean_running else 0.0

    @property
    def duration_s(self) -> float | None:
        """Mean duration of a task: as timed, otherwise the work by finished task. None without both."""
        if self.timed > 0 and self.timed_s > 0:
            return self.timed_s / self.timed
        return self.mean_running / self.rate if self.rate and self.mean_running else None

    @property
    def spread(self) -> float:
        """The standard deviation of the logarithm of durations, if they are lognormal."""
        if self.reports <= 0 or not self.duration_s:
            return 0.3
        ratio = self.deviations / self.reports / max(self.duration_s**2, 1e-18)
        return math.sqrt(math.log1p(min(ratio, 1e18)))
