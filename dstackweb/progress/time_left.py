"""When the tasks of a prefix, or of all prefixes, will have finished: a number and a range. Pure.

Two answers are combined. *By parts*: each prefix goes on at its own pace, and the end is that of the slowest. *By
work*: workers turn to what is left, and the end is all work by their number. Prefixes with workers of their own follow
the first, stages that wait for each other and prefixes that share workers the second. Which of them holds is seen in
the number of running tasks: where workers are shared, it varies for a prefix more than for all together.

The constants were chosen on histories that `bench/time_left.py` generates, and tried on others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from dstackweb.progress.pace import Pace

UNKNOWN = 8.0
"""A stage of which no task has finished may take so many times more or less work than thought."""
ERROR = 1.12
"""Factor by which any pace may change."""
TREND_MAX, TREND_SHARE, TREND_RANGE = 2.0, 0.6, 1.6
"""The largest exponent of a trend; how much of it the estimate and the far end of the range follow."""
ADDED_SHARE, ADDED_RANGE = 0.4, 1.5
"""Share of the tasks added so far that is expected to come on top of them, and the same for the end of the range."""
LATE, LATE_RANGE = 1.0, 2.5
"""The last tasks take as long as those so many standard deviations above the mean."""
IDLE_SHARE, IDLE_RANGE = 0.6, 3.0
"""If nothing has finished for a time, it takes that much of it at least."""
SMOOTH_S, SMOOTH_SHARE = 8.0, 0.1
"""Time constant of following a new estimate: the longer of some seconds and a share of what is left."""
STEP_MAX, STEP_S = 0.1, 2.5
"""A shown estimate changes at most by a tenth, e**0.1, in 2.5 s."""
FLOOR_S = 10.0
"""A change by a few seconds is no jump."""
FAR_S = 1e9
PARTS = 50
"""So many prefixes, active ones first, are looked at one by one."""


class Left(NamedTuple):
    """Seconds until all tasks are finished, and the range; `high` is math.inf when unknown."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Part:
    """A prefix: its tasks, those unfinished that can go on, and those of them that run.

    `since_s`: how long the tasks have run since its last report.
    """

    pace: Pace
    total: int
    unfinished: int
    running: int
    since_s: float = 0.0

    @classmethod
    def of(cls, pace: str, rated_ms: int, now_ms: int, total: int, unfinished: int, running: int) -> Self:
        """`pace`: as stored at `rated_ms`."""
        since_s = max(0, now_ms - rated_ms) / 1000 if running else 0.0
        return cls(Pace.of(pace), total, unfinished, running, since_s)

    @property
    def has_waiting(self) -> bool:
        return self.unfinished > self.running

    @property
    def duration_s(self) -> float | None:
        """Mean duration of a task. None while none has finished."""
        if not self.pace.finished_ever:
            return None
        # A reporter may tell of finished tasks only: then one after the other.
        return self.pace.duration_s or (1 / self.pace.rate if self.pace.rate else None)

    @property
    def use(self) -> float:
        """Share of the running tasks that really run: schedulers also count those that are assigned to a worker.

        A task is counted when it ends, so this shows only after a few durations.
        """
        pace, duration_s = self.pace, self.duration_s
        if not duration_s or not pace.worked_s:
            return 1.0
        certainty = _clipped((pace.seconds / duration_s - 2) / 6, 0, 1)
        return float(_clipped(pace.rate * duration_s / pace.mean_running, 0.001, 1.25) ** certainty)

    @property
    def workers(self) -> float:
        """Number of tasks that run at once."""
        if not self.pace.worked_s:
            return self.pace.rate * (self.duration_s or 0.0)
        return _workers(self.pace, self.use, self.has_waiting)

    @property
    def trend(self) -> float:
        return _trend(self.pace, self.use) if self.has_waiting else 0.0


def _clipped(number: float, low: float, high: float) -> float:
    return max(low, min(high, number))


def _trust(use: float) -> float:
    """Return the weight, 0 to 1, of changes in the number of running tasks when the number of workers is judged."""
    return _clipped((use - 0.3) / 0.5, 0, 1)


def _workers(pace: Pace, use: float, has_waiting: bool) -> float:
    """The number of workers now. Where no task waits, those without a task still count."""
    mean, now = pace.mean_running, pace.running_now
    if not mean or not now:
        return mean * use
    now = now if has_waiting else max(now, mean)
    return float(mean * (now / mean) ** _trust(use) * use)


def _trend(pace: Pace, use: float) -> float:
    return _clipped(pace.trend, -TREND_MAX, TREND_MAX) * _trust(use)


def _extended(seconds: float, pace: Pace, trend: float) -> float:
    """The time for what takes `seconds` at the pace of now, if the number of workers goes on as clock**trend."""
    if not pace.seconds or not trend:
        return seconds
    gone = seconds / pace.seconds
    grown = 1 + (trend + 1) * gone
    if grown <= 0:
        return math.inf
    logarithm = math.log(grown) / (trend + 1) if abs(trend + 1) > 1e-6 else gone
    return pace.seconds * math.expm1(min(logarithm, 50.0))


def of_part(part: Part) -> Left | None:
    """The time left of a prefix whose pace stays its own. None while none of its tasks has finished."""
    duration_s, workers = part.duration_s, part.workers
    if part.unfinished <= 0 or not duration_s or not workers:
        return None
    pace, trend = part.pace, part.trend
    seconds = part.unfinished * duration_s / workers
    error = _error(pace)
    # The last tasks to end are longer than others. With fewer of them there is less to wait for.
    waiting = min(1.0, (part.unfinished - part.running) / 10 + 0.3)
    late = duration_s * math.expm1(LATE * pace.spread) * waiting
    latest = duration_s * math.expm1(LATE_RANGE * pace.spread)
    middle = max(_extended(seconds, pace, TREND_SHARE * trend) + late, IDLE_SHARE * pace.idle_s)
    low = _extended(seconds, pace, TREND_RANGE * max(0.0, trend)) / error
    high = _extended(seconds, pace, TREND_RANGE * min(0.0, trend)) * error + latest
    high = max(high, part.unfinished / pace.rate if pace.rate else math.inf, IDLE_RANGE * pace.idle_s)
    return aged(_ordered(middle, low, high), part.since_s)


def _error(pace: Pace) -> float:
    """The factor by which a pace may be wrong, from the number of tasks that it rests on."""
    return ERROR * math.exp(1 / math.sqrt(pace.finished_ever + 1))


def _ordered(middle: float, low: float, high: float) -> Left:
    middle = min(middle, FAR_S)
    return Left(middle, max(0.0, min(low, middle)), max(high, middle * ERROR))


def of_all(parts: Sequence[Part], whole: Part, *, finds_more: bool = True) -> Left | None:
    """The time left of all prefixes. None until tasks have finished.

    Tasks of the `whole` that are of no part count as one more, with the pace of all. `finds_more`: if tasks were added
    all the time, more are expected.
    """
    pace = whole.pace
    rest = Part(
        pace,
        whole.total - sum(part.total for part in parts),
        whole.unfinished - sum(part.unfinished for part in parts),
        max(0, whole.running - sum(part.running for part in parts)),
    )
    if rest.unfinished > 0 and rest.total > 0:
        parts = [*parts, rest]
    live = [part for part in parts if part.unfinished > 0]
    timed = [(part, duration_s) for part in parts if (duration_s := part.duration_s)]
    if not live or not timed:
        return None
    longest = Left(0.0, 0.0, 0.0)
    for part in live:
        if estimate := of_part(part):
            longest = Left(*map(max, longest, estimate))
    workers, trend = _all_workers(live, timed, pace)
    if not workers:
        return longest if longest.seconds else None
    work = _work(live, timed, workers)
    if finds_more and work.seconds:
        added = pace.added_per_s * pace.seconds * work.seconds / sum(part.unfinished for part in live)
        work = Left(work.seconds + ADDED_SHARE * added, work.low, work.high + ADDED_RANGE * added)
    all_at_once = Left(
        _extended(work.seconds / workers, pace, TREND_SHARE * trend),
        _extended(work.low / workers, pace, TREND_RANGE * trend),
        work.high / workers,
    )
    share = _shared(live, pace)
    return _ordered(
        _between(longest.seconds, all_at_once.seconds, share),
        _between(longest.low, all_at_once.low, share),
        _between(longest.high, all_at_once.high, 0.8 * share),
    )


def _all_workers(live: Sequence[Part], timed: Sequence[tuple[Part, float]], pace: Pace) -> tuple[float, float]:
    """Return the number of workers of all parts, and its trend if it grows: it also falls where parts end."""
    worked_s = sum(part.pace.worked_s for part, _ in timed)
    if not worked_s or not pace.worked_s:
        return sum(part.workers for part in live), 0.0
    use = sum(part.use * part.pace.worked_s for part, _ in timed) / worked_s
    has_waiting = any(part.has_waiting for part in live)
    return _workers(pace, use, has_waiting), max(0.0, _trend(pace, use)) if has_waiting else 0.0


def _work(live: Sequence[Part], timed: Sequence[tuple[Part, float]], workers: float) -> Left:
    """Seconds of work that are left.

    Of a prefix of which nothing has finished, tasks are thought to take as long as those of other prefixes, but longer
    the fewer they are: stages with few tasks are often the long ones.
    """
    logs = [2 * math.log(duration_s) + math.log(part.total) for part, duration_s in timed]
    work = low = high = 0.0
    for part in live:
        if duration_s := part.duration_s:
            seconds, error = part.unfinished * duration_s, _error(part.pace)
        else:
            guess_s, begun_s = math.exp((sum(logs) / len(logs) - math.log(part.total)) / 2), 0.0
            if part.running:
                begun_s = part.pace.seconds + part.since_s
                guess_s = max(guess_s, 1.5 * begun_s)
            seconds = max(part.unfinished * guess_s - part.running * begun_s, (guess_s - begun_s) * workers)
            error = UNKNOWN
        work, low, high = work + seconds, low + seconds / error, high + seconds * error
    return Left(work, low, high)


def _shared(live: Sequence[Part], pace: Pace) -> float:
    """Return the share of workers that prefixes have in common, 0 to 1."""
    apart = sum(part.pace.variance for part in live)
    return max(0.0, 1 - pace.variance / apart) if apart > 0.05 * len(live) else 0.0


def _between(by_parts: float, by_work: float, share: float) -> float:
    """Return `by_work` if it is longer, as with stages that wait for each other; otherwise mix both by `share`."""
    if by_parts <= by_work or not by_work or math.isinf(by_parts):
        return max(by_parts, by_work)
    return float(by_work**share * by_parts ** (1 - share))


class Shown(NamedTuple):
    """The time left of a scope that is shown since `at_ms`, and the scope's seconds of work then."""

    at_ms: int
    worked_s: float
    left: Left | None

    @classmethod
    def of(cls, stored: str) -> Self | None:
        """Parse what was stored. None if nothing was."""
        at_ms, worked_s, *estimate = json.loads(stored) or (0, 0.0)
        if not at_ms:
            return None
        bounds = [math.inf if number is None else number for number in estimate]
        return cls(at_ms, worked_s, Left(*bounds) if bounds else None)

    def __str__(self) -> str:
        """The JSON that is stored, which has no infinity: null is an open end."""
        numbers = [self.worked_s, *(self.left or ())]
        return json.dumps([self.at_ms, *(None if math.isinf(number) else round(number, 3) for number in numbers)])

    def after(self, shown: Shown | None) -> Shown:
        """This new estimate, as it is shown after an earlier one: it moves towards the new one without a jump."""
        if shown is None or shown.left is None or self.left is None:
            return self
        return self._replace(left=followed(shown.left, self.left, self.worked_s, self.worked_s - shown.worked_s))

    def at(self, now_ms: int, running: int) -> Left | None:
        """Return the time left at a later moment without a new report. While nothing runs it stays."""
        if self.left is None or not running:
            return self.left
        return aged(self.left, max(0, now_ms - self.at_ms) / 1000)


def followed(shown: Left, new: Left, worked_s: float, seconds: float) -> Left:
    """Move what was shown `seconds` of work ago towards a new estimate, without a jump.

    `worked_s`: seconds of work so far.
    """
    if seconds <= 0:
        return shown
    # A short history is quickly outdated.
    patience_s = min(max(SMOOTH_S, SMOOTH_SHARE * shown.seconds), 0.05 * worked_s + 0.1)
    limit = STEP_MAX * seconds / STEP_S * max(1.0, SMOOTH_S / patience_s)

    def moved(old: float, to: float, limit: float = math.inf) -> float:
        old, to = max(0.0, min(old, FAR_S) - seconds) + FLOOR_S, min(to, FAR_S) + FLOOR_S
        step = -math.expm1(-seconds / patience_s) * math.log(to / old)
        return old * math.exp(_clipped(step, -limit, limit)) - FLOOR_S

    middle, low = moved(shown.seconds, new.seconds, limit), moved(shown.low, new.low)
    # An open end has no place to move from.
    high = new.high if math.isinf(shown.high) else moved(shown.high, new.high)
    return Left(max(0.0, middle), max(0.0, min(low, middle)), max(middle, high))


def aged(shown: Left, seconds: float) -> Left:
    """Return what was shown `seconds` of work ago as it is now, without news. Overdue tasks take as long again."""
    middle = max(shown.seconds - seconds, IDLE_SHARE * seconds)
    return Left(middle, max(0.0, min(shown.low - seconds, middle)), max(shown.high - seconds, IDLE_RANGE * seconds))
