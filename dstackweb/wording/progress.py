"""Rates, times left and counts of tasks in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.progress.estimate import Rate
from dstackweb.progress.states import TaskState
from dstackweb.progress.time_left import Left
from dstackweb.wording.sentence import clauses, colon, listing, words
from dstackweb.wording.units import duration, figure

MINUTE, HOUR, DAY = 60, 3600, 86400
_NARROW = 1.35
"""A range whose end is at most so many times its start is shown as one number."""
_NEVER_S = 400 * DAY
"""A range that ends later is shown without its end."""

BESIDE_BAR = (
    TaskState.ERRED, TaskState.NO_WORKER, TaskState.PROCESSING, TaskState.QUEUED, TaskState.WAITING, TaskState.RELEASED,
)  # fmt: skip
"""The states whose counts stand beside a bar, in this order."""

state = words(
    {
        TaskState.MEMORY: gettext_lazy("done"),
        TaskState.RELEASED_DONE: gettext_lazy("done, then released"),
        TaskState.FORGOTTEN_DONE: gettext_lazy("done, then forgotten"),
        TaskState.ERRED: gettext_lazy("failed"),
        TaskState.RELEASED_FAILED: gettext_lazy("failed, then released"),
        TaskState.FORGOTTEN_FAILED: gettext_lazy("failed, then forgotten"),
        TaskState.RELEASED: gettext_lazy("released"),
        TaskState.PROCESSING: gettext_lazy("running"),
        TaskState.QUEUED: gettext_lazy("queued"),
        TaskState.NO_WORKER: gettext_lazy("no worker"),
        TaskState.WAITING: gettext_lazy("waiting"),
        TaskState.FORGOTTEN: gettext_lazy("forgotten"),
    }
)
"""One or two words for a task's state."""

meaning = words(
    {
        TaskState.MEMORY: gettext_lazy("The task has finished, and its result is available."),
        TaskState.RELEASED_DONE: gettext_lazy("The task has finished, and its result is no longer needed."),
        TaskState.FORGOTTEN_DONE: gettext_lazy("The task has finished, and its reporter has dropped it."),
        TaskState.ERRED: gettext_lazy("The task has failed."),
        TaskState.RELEASED_FAILED: gettext_lazy("The task has failed, and is no longer needed."),
        TaskState.FORGOTTEN_FAILED: gettext_lazy("The task has failed, and its reporter has dropped it."),
        TaskState.RELEASED: gettext_lazy("The task was stopped before its end, or how it ended is not known."),
        TaskState.PROCESSING: gettext_lazy("The task is running."),
        TaskState.QUEUED: gettext_lazy("The task is ready to run and waits for its turn."),
        TaskState.NO_WORKER: gettext_lazy("The task is ready to run, but no worker can run it."),
        TaskState.WAITING: gettext_lazy("The task waits for other tasks to finish."),
        TaskState.FORGOTTEN: gettext_lazy(
            "The task's reporter has dropped it; it was not done and had not failed, as far as known."
        ),
    }
)
"""A sentence about a task's state."""


def count(n: int) -> str:
    """`41,222`."""
    return f"{n:,}"


def rate(per_s: float) -> str:
    """Tasks per second, minute, hour or day, whichever reads best: `212/s`, `6.1/s`, `3.5/min`."""
    for seconds, text in ((1, _("%s/s")), (MINUTE, _("%s/min")), (HOUR, _("%s/h"))):
        if per_s * seconds >= 1:
            return text % figure(per_s * seconds)
    return _("%s/day") % figure(per_s * DAY)


def took(seconds: float) -> str:
    """Mean time of a task: `12 ms`, `2.4 s`, and from a minute on a `duration`."""
    if seconds < 1:
        return _("%d ms") % round(1000 * seconds)
    return _("%.1f s") % seconds if seconds < MINUTE else duration(seconds)


def durations(p50_s: float, p95_s: float) -> str:
    return _("p50 %(half)s · p95 %(most)s") % {"half": took(p50_s), "most": took(p95_s)}


def between(low: float, high: float) -> str:
    """A range in one unit: `11–19 min`, `40 s – 3 min`; with an open end `over 2 h`."""
    if high > _NEVER_S:
        return _("over %s") % _rough(low)
    unit = next((size for size in (DAY, HOUR, MINUTE) if high >= 2 * size), 1)
    first, last = low / unit, high / unit
    if unit > 1 and first < 1:
        return f"{_rough(low)} – {_rough(high)}"
    near, far = math.floor(first), math.ceil(last)
    word = {1: _("%s s"), MINUTE: _("%s min"), HOUR: _("%s h"), DAY: _("%s d")}[unit]
    return word % (f"{near}–{far}" if near != far else str(far))


def _rough(seconds: float) -> str:
    for size, text in ((DAY, _("%d d")), (HOUR, _("%d h")), (MINUTE, _("%d min"))):
        if seconds >= 2 * size:
            return text % round(seconds / size)
    return _("%d s") % round(seconds)


def _is_narrow(known: Left) -> bool:
    return known.low > 0 and known.high <= known.low * _NARROW


def left(known: Left) -> str:
    """One number where the range is narrow, otherwise the range."""
    return duration(known.seconds) if _is_narrow(known) else between(known.low, known.high)


def about(known: Left) -> str:
    """One number, in one unit if its range is wide."""
    return f"≈ {duration(known.seconds) if _is_narrow(known) else _rough(known.seconds)}"


def spread(known: Left | None) -> str:
    """The range, to stand beside `about`; empty if it is narrow."""
    return "" if known is None or _is_narrow(known) else between(known.low, known.high)


def stuck(paused: int, impossible: int) -> str:
    """`27 paused, 1 impossible`."""
    each = ((paused, _("%s paused")), (impossible, _("%s impossible")))
    return listing(text % count(number) for number, text in each if number)


def rate_spread(known: Rate | None) -> str:
    """The range of a rate: `180/s to 240/s`."""
    if known is None:
        return ""
    low, high = rate(known.low), rate(known.high)
    return "" if low == high else _("%(low)s to %(high)s") % {"low": low, "high": high}


def parts(counts: Mapping[TaskState, int]) -> list[tuple[TaskState, str]]:
    """The counts of states other than done: `12 failed`, `640 running`."""
    return [(one, f"{count(counts[one])}\N{NO-BREAK SPACE}{state(one)}") for one in BESIDE_BAR if counts.get(one)]


def sentence(name: str, counts: Mapping[TaskState, int], finished: int, total: int) -> str:
    """A bar for screen readers: the counts of all its states."""
    each = listing(f"{count(n)} {state(one)}" for one, n in counts.items() if n)
    begin = _("%(finished)s of %(total)s finished") % {"finished": count(finished), "total": count(total)}
    return colon(name, clauses([begin, each]))
