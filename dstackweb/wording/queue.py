"""A queue's settings in words: what its ageing means, and what was changed."""

from __future__ import annotations

from typing import Any, assert_never

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dstackweb.runs.codes import LimitCode
from dstackweb.wording import units
from dstackweb.wording.sentence import as_text, known

HOUR = 60
DAY = 24 * HOUR


def ageing(minutes: int | None) -> str:
    """What so many minutes per point mean for a run that has waited; None is strict."""
    if minutes is None:
        return _("Strict priority: waiting never improves a run's position. Runs of low priority may never start.")
    waited, told = next(
        ((length, words) for length, words in ((HOUR, _("1 h")), (DAY, _("1 day"))) if minutes <= length),
        (minutes, units.duration(minutes * 60)),
    )
    points = f"{waited / minutes:.1f}".removesuffix(".0")
    return ngettext(
        "After waiting %(waited)s, a run ranks like a new run with +%(points)s priority point.",
        "After waiting %(waited)s, a run ranks like a new run with +%(points)s priority points.",
        1 if points == "1" else 2,
    ) % {"waited": told, "points": points}


def changed(data: dict[str, Any]) -> list[str]:
    """The sentences of one event: `{setting: [old, new]}`."""
    return [_one(name, old, new) for name, (old, new) in data.items()]


def _one(name: str, old: Any, new: Any) -> str:
    match name:
        case "name":
            return _("created") if old is None else _("renamed from %(old)s to %(new)s") % {"old": old, "new": new}
        case "paused":
            return _("paused") if new else _("resumed")
        case "draining":
            return _("draining: takes no new runs") if new else _("takes new runs again")
        case "ageing_minutes":
            return _("ageing: %(old)s → %(new)s") % {"old": _step(old), "new": _step(new)}
    return f"{setting(name)}: {_limit(old)} → {_limit(new)}"


def _step(minutes: int | None) -> str:
    return _("strict") if minutes is None else _("%d min per point") % minutes


def _limit(value: int | None) -> str:
    return _("no limit") if value is None else str(value)


def setting(name: str) -> str:
    """What a setting is called."""
    limit = known(LimitCode, name)
    match limit:
        case LimitCode.MAX_RUNNING:
            return _("max running runs")
        case LimitCode.MAX_GPUS:
            return _("max GPUs in use")
        case LimitCode.MAX_RUNNING_PER_USER:
            return _("max running runs per member")
        case LimitCode.MAX_GPUS_PER_USER:
            return _("max GPUs per member")
        case None:
            return as_text(name)
        case never:
            assert_never(never)
