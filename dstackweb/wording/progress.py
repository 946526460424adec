"""Rates, times left and counts of tasks in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from django.utils.translation import gettext as _

from dstackweb.progress.estimate import Left, Rate
from dstackweb.progress.states import TaskState

MINUTE, HOUR, DAY = 60, 3600, 86400
_SURE = 1.35
"""Where the far end of a range is not more than so many times the near end, one number says it."""
_NEVER_S = 400 * DAY
"""Nobody plans for more than a year."""

TOLD = (
    TaskState.ERRED, TaskState.NO_WORKER, TaskState.PROCESSING, TaskState.QUEUED, TaskState.WAITING, TaskState.RELEASED,
)  # fmt: skip
"""What is said of a row beside its bar, in this order, where there is any."""


def state(code: str) -> str:
    """One word for a state; an unknown code is shown as it is."""
    return {
        "memory": _("done"),
        "erred": _("failed"),
        "released": _("released"),
        "processing": _("running"),
        "queued": _("queued"),
        "no_worker": _("no worker"),
        "waiting": _("waiting"),
        "forgotten": _("forgotten"),
    }.get(code, code)


def meaning(code: TaskState) -> str:
    """A sentence on what it says of a task."""
    return {
        TaskState.MEMORY: _("It has finished, and its result is there."),
        TaskState.ERRED: _("It has failed."),
        TaskState.RELEASED: _("Nothing more is to come of it: it was stopped, or its result is no longer needed."),
        TaskState.PROCESSING: _("It is being worked on."),
        TaskState.QUEUED: _("It could start, and waits for its turn."),
        TaskState.NO_WORKER: _("It could start, but nothing there can run it."),
        TaskState.WAITING: _("It waits for others to finish first."),
        TaskState.FORGOTTEN: _("It has finished, and who reported it has dropped it; it still counts."),
    }[code]


def count(n: int) -> str:
    """`41,222`."""
    return f"{n:,}"


def rate(per_s: float) -> str:
    """Tasks per second, minute, hour or day, whichever reads best: `212/s`, `6.1/s`, `3.5/min`."""
    for seconds, text in ((1, _("%s/s")), (MINUTE, _("%s/min")), (HOUR, _("%s/h"))):
        if per_s * seconds >= 1:
            return text % _figure(per_s * seconds)
    return _("%s/day") % _figure(per_s * DAY)


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.1f}".removesuffix(".0")


def span(seconds: float) -> str:
    """How long, as roughly as one would say it: `38 s`, `2 min 24`, `12 min`, `3 h 05`, `2 d`."""
    s = round(seconds)
    if s < MINUTE:
        return _("%d s") % s
    if s < 10 * MINUTE and s % MINUTE:
        return _("%(min)d min %(s)02d") % {"min": s // MINUTE, "s": s % MINUTE}
    if s < 100 * MINUTE:
        return _("%d min") % round(s / MINUTE)
    if s < 2 * DAY:
        return _("%(h)d h %(min)02d") % {"h": s // HOUR, "min": s % HOUR // MINUTE}
    return _("%d d") % round(s / DAY)


def took(seconds: float) -> str:
    """What one task takes: `12 ms`, `2.4 s`, and from a minute on as `span` says it."""
    if seconds < 1:
        return _("%d ms") % round(1000 * seconds)
    return _("%.1f s") % seconds if seconds < MINUTE else span(seconds)


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


def _is_sure(known: Left) -> bool:
    return known.low > 0 and known.high <= known.low * _SURE


def left(known: Left) -> str:
    """One number where the range is narrow, otherwise the range."""
    return span(known.seconds) if _is_sure(known) else between(known.low, known.high)


def about(known: Left) -> str:
    """One number; where its range is wide, not to the second."""
    return f"≈ {span(known.seconds) if _is_sure(known) else _rough(known.seconds)}"


def spread(known: Left | None) -> str:
    """The range beside the one number; nothing where that says it all."""
    return "" if known is None or _is_sure(known) else between(known.low, known.high)


def rate_spread(known: Rate | None) -> str:
    """From where to where a rate may be: `180/s to 240/s`."""
    if known is None:
        return ""
    low, high = rate(known.low), rate(known.high)
    return "" if low == high else _("%(low)s to %(high)s") % {"low": low, "high": high}


def parts(counts: Mapping[TaskState, int]) -> list[tuple[TaskState, str]]:
    """What there is beside what is done, each with its number: `12 failed`, `640 running`."""
    return [(one, f"{count(counts[one])}\N{NO-BREAK SPACE}{state(one)}") for one in TOLD if counts.get(one)]


def sentence(name: str, counts: Mapping[TaskState, int], finished: int, total: int) -> str:
    """A bar for whoever can't see it: all its states that have any."""
    told = ", ".join(f"{count(n)} {state(one)}" for one, n in counts.items() if n)
    begin = _("%(finished)s of %(total)s finished") % {"finished": count(finished), "total": count(total)}
    return f"{name}: {begin}; {told}"
