"""A queue in words: its settings and their changes, and what a move does or did."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any

from django.utils.translation import gettext as _, gettext_lazy, ngettext

from dstackweb.accounts.models import User
from dstackweb.runs.codes import LimitCode, PlaceEnd, Reclaim
from dstackweb.runs.models import Run
from dstackweb.runs.queue.move_preview import MoveEffect, RunChange
from dstackweb.runs.queue.transfer import Transfer
from dstackweb.scheduler.passes.decision import Decision, Plan
from dstackweb.scheduler.placement.displacing import HOUR_MS, WorkBudget, work_s
from dstackweb.scheduler.placement.hosts import Wait
from dstackweb.wording import waiting
from dstackweb.wording.fair_share import hours
from dstackweb.wording.sentence import Label, Sentence, clauses, colon, enumeration, fill, listing, words
from dstackweb.wording.units import duration, gpus

HOUR = 60
DAY = 24 * HOUR

LIMITS = {
    LimitCode.MAX_RUNNING: gettext_lazy("max running runs"),
    LimitCode.MAX_GPUS: gettext_lazy("max GPUs in use"),
    LimitCode.MAX_RUNNING_PER_USER: gettext_lazy("max running runs per member"),
    LimitCode.MAX_GPUS_PER_USER: gettext_lazy("max GPUs per member"),
    LimitCode.COHORT_GPUS: gettext_lazy("GPUs that the cohort shares"),
}
setting = words(LIMITS)
"""The names of settings."""
reclaim = words(
    {
        Reclaim.NEVER: gettext_lazy("wait until they are free"),
        Reclaim.LOWER_PRIORITY: gettext_lazy("take back from preemptible runs of lower priority"),
        Reclaim.ANY: gettext_lazy("take back from preemptible runs of any priority"),
    }
)
"""What a queue's runs do for the GPUs that it has lent."""


def ageing(minutes: int | None) -> str:
    """What so many minutes per point mean for a run that has waited; None is strict."""
    if minutes is None:
        return _("Strict priority: waiting never improves a run's position. Runs of low priority may never start.")
    waited = next((length for length in (HOUR, DAY) if minutes <= length), minutes)
    points = f"{waited / minutes:.1f}".removesuffix(".0")
    return ngettext(
        "After waiting %(waited)s, a run ranks like a new run with +%(points)s priority point.",
        "After waiting %(waited)s, a run ranks like a new run with +%(points)s priority points.",
        1 if points == "1" else 2,
    ) % {"waited": duration(waited * 60), "points": points}


def left(then: str | None) -> str:
    """What ended the waiting of a run: `placed`; None: nothing yet."""
    return _("still waiting") if then is None else LEFT(then)


LEFT = words(
    {
        PlaceEnd.MOVED: gettext_lazy("moved"),
        PlaceEnd.QUEUE: gettext_lazy("moved to another queue"),
        PlaceEnd.PROVISIONING: gettext_lazy("placed"),
        PlaceEnd.FAILED: gettext_lazy("failed"),
        PlaceEnd.TERMINATED: gettext_lazy("stopped"),
    }
)


def changed(data: dict[str, Any]) -> list[str]:
    """The sentences of one event: `{setting: [old, new]}`."""
    return [_changed(name, old, new) for name, (old, new) in data.items()]


def _changed(name: str, old: Any, new: Any) -> str:
    match name:
        case "name":
            return _("created") if old is None else _("renamed from %(old)s to %(new)s") % {"old": old, "new": new}
        case "paused":
            return _("paused") if new else _("resumed")
        case "draining":
            return _("draining: takes no new runs") if new else _("takes new runs again")
    text, word = _CHANGES.get(name, (gettext_lazy("%(field)s: %(old)s → %(new)s"), _limit))
    return str(text) % {"field": setting(name), "old": word(old), "new": word(new)}


def preemption(points: int | None, gpu_hours: int | None = None) -> str:
    """What the queue's setting means; None is off."""
    if points is None:
        return _("Off: no running run is stopped for a waiting one of this queue.")
    text = _(
        "A waiting run may stop preemptible runs behind it whose priority is at least %d lower, if no run ahead of it "
        "waits for the same hosts."
    ) % (points,)
    if gpu_hours is None:
        return text
    most = _("A member's runs displace at most %d GPU-hours of work within 24 hours.") % gpu_hours
    return f"{text} {most}"


def fair_share(minutes: int | None, half_life_days: int) -> str:
    """What the queue's settings mean; None is off."""
    if minutes is None:
        return _("Off: runs rank by priority and time alone, however much a member uses.")
    text = _("New runs of members above the median load rank up to %(most)s lower. Past usage halves every %(days)s.")
    return text % {"most": duration(minutes * 60), "days": _days(half_life_days)}


def would_displace(found: Decision | Plan) -> str:
    """What a preemption would cost: `when its turn comes, it displaces 2 runs of ann and bob: 35 min of work`.

    A reclaim says `…, it takes back 2 GPUs from train: 2 runs of bob stop, 35 min of work`. Empty without any.
    """
    runs = found.displaces
    if not runs:
        return ""
    members = enumeration(list(dict.fromkeys(one.user for one in runs)))
    numbers: dict[str, Any] = {"n": len(runs), "who": members, "work": duration(work_s(runs, found.at))}
    if found.reclaims:
        numbers["gpus"] = gpus(sum(one.gpus for one in runs))
        numbers["queues"] = enumeration(list(dict.fromkeys(one.queue for one in runs)))
        text = ngettext(
            "when its turn comes, it takes back %(gpus)s from %(queues)s: %(n)d run of %(who)s stops, %(work)s of work",
            "when its turn comes, it takes back %(gpus)s from %(queues)s: %(n)d runs of %(who)s stop, %(work)s of work",
            len(runs),
        )
    else:
        text = ngettext(
            "when its turn comes, it displaces %(n)d run of %(who)s: %(work)s of work",
            "when its turn comes, it displaces %(n)d runs of %(who)s: %(work)s of work",
            len(runs),
        )
    return text % numbers


def budget_of_work(budget: WorkBudget | None, now: dt.datetime) -> Sentence | None:
    """What the member's daily budget says of a preemption: when it allows it; None where it does now."""
    if budget is None or budget.allowed_at == now:
        return None
    used, most, more = (hours(ms / HOUR_MS) for ms in (budget.displaced_ms, budget.most_ms, budget.wanted_ms))
    if budget.allowed_at is None:
        text = _("to displace %(more)s GPU-h of work is above its member's budget of %(most)s GPU-h in 24 h")
        return fill(text, more=more, most=most)
    text = _("its member's runs displaced %(used)s of %(most)s GPU-h in 24 h: it may displace from %(at)s on")
    return fill(text, used=used, most=most, at=budget.allowed_at)


def _points(points: int | None) -> str:
    return _("off") if points is None else str(points)


def _days(count: int) -> str:
    return duration(count * 86_400)


def _step(minutes: int | None) -> str:
    return _("strict") if minutes is None else _("%d min per point") % minutes


def _most_penalty(minutes: int | None) -> str:
    return _("off") if minutes is None else _("at most %s") % duration(minutes * 60)


def _limit(value: int | None) -> str:
    return _("no limit") if value is None else str(value)


_CHANGES: dict[str, tuple[Any, Callable[[Any], str]]] = {
    "ageing_minutes": (gettext_lazy("ageing: %(old)s → %(new)s"), _step),
    "preempt_points": (gettext_lazy("preemption, points of priority: %(old)s → %(new)s"), _points),
    "cohort": (gettext_lazy("cohort: %(old)s → %(new)s"), lambda name: name or _("none")),
    "borrow_gpus": (gettext_lazy("GPUs to borrow: %(old)s → %(new)s"), _limit),
    "lend_gpus": (gettext_lazy("GPUs to lend: %(old)s → %(new)s"), _limit),
    "reclaim": (gettext_lazy("lent GPUs: %(old)s → %(new)s"), lambda code: reclaim(code or Reclaim.NEVER)),
    "preempt_gpu_hours": (gettext_lazy("preemption, GPU-hours per member and day: %(old)s → %(new)s"), _limit),
    "fair_share_minutes": (gettext_lazy("fair share: %(old)s → %(new)s"), _most_penalty),
    "fair_share_half_life_days": (gettext_lazy("half-life of fair share: %(old)s → %(new)s"), _days),
}
"""The sentences of settings with words of their own, and the words of a value."""


def move_preview(preview: MoveEffect, reader: User) -> str:
    """`priority 50 → 52, position 7 → 3; ana's eval moves back from 3 to 4`."""
    if all(_same_position(change) and _same_priority(change) for change in preview.changes):
        return _("no change")
    several = len(preview.changes) > 1
    parts = [colon(change.run.name, _change(change)) if several else _change(change) for change in preview.changes[:3]]
    if (more := len(preview.changes) - 3) > 0:
        parts.append(ngettext("and %d more", "and %d more", more) % more)
    slips = [_slip(change, reader) for change in preview.slips[:1]]
    if slips and (others := (preview.slips_total or 0) - 1) > 0:
        slips.append(ngettext("%d other run moves", "%d other runs move", others) % others)
    return clauses(filter(None, (*parts, listing(slips))))


def moved(result: MoveEffect) -> str:
    """`eval moved from position 7 to 3, priority 50 → 52`; `3 runs moved to positions 1–3`."""
    if len(result.changes) != 1:
        return _several(result) if result.changes else _("nothing to move")
    change = result.changes[0]
    if change.position_after is None:
        text = _("%(run)s moved")
    elif change.position_before is None:
        text = _("%(run)s moved to position %(position_after)s")
    else:
        text = _("%(run)s moved from position %(position_before)s to %(position_after)s")
    if not _same_priority(change):
        text += _(", priority %(priority_before)d → %(priority_after)d")
    return text % vars(change)


def _several(result: MoveEffect) -> str:
    """With positions if they are adjacent, which a member's may not be."""
    count = len(result.changes)
    text = ngettext("%d run moved", "%d runs moved", count) % count
    places = sorted(place for change in result.changes if (place := change.position_after) is not None)
    if len(places) < count or places != list(range(places[0], places[0] + count)):
        return text
    return _("%(text)s to positions %(first)d–%(last)d") % {"text": text, "first": places[0], "last": places[-1]}


def transferred(result: Transfer) -> str:
    """`eval moved to night, position 3`; `3 runs moved to night`."""
    name = result.target.name if result.target else ""
    if not result.changes:
        return _("already in queue %s") % name
    if len(result.changes) > 1:
        text = ngettext("%(n)d run moved to %(queue)s", "%(n)d runs moved to %(queue)s", len(result.changes))
        return text % {"n": len(result.changes), "queue": name}
    change = result.changes[0]
    values = {"run": change.run.name, "queue": name, "position": change.position_after}
    if change.position_after is None:
        return _("%(run)s moved to %(queue)s") % values
    return _("%(run)s moved to %(queue)s, position %(position)d") % values


def borrowed(count: int, lenders: Sequence[str]) -> str:
    """`2 GPUs borrowed from eval`; empty without any."""
    if not count:
        return ""
    if not lenders:
        return ngettext("%d GPU borrowed", "%d GPUs borrowed", count) % count
    text = ngettext("%(n)d GPU borrowed from %(queues)s", "%(n)d GPUs borrowed from %(queues)s", count)
    return text % {"n": count, "queues": enumeration(lenders)}


def pushed_back(result: Transfer) -> str:
    """`5 runs there move back`; empty where none does."""
    count = result.slips_total or 0
    return ngettext("%d run there moves back", "%d runs there move back", count) % count if count else ""


def foreseen(found: Sequence[tuple[Run, Wait | None]]) -> list[tuple[str, Label]]:
    """Why runs would wait in another queue, by the first run of each kind."""
    starting = Label(_("free"), _("what it needs is free, once it is its turn"), "go")
    return [(run.name, waiting.reason(wait.reason, wait.data) if wait else starting) for run, wait in found]


def move_undone(result: MoveEffect) -> str:
    """`Undone: eval`."""
    names, more = listing(change.run.name for change in result.changes[:3]), len(result.changes) - 3
    return _("Undone: %s") % (_("%(names)s and %(n)d more") % {"names": names, "n": more} if more > 0 else names)


def priority_set(name: str, priority: int, before: int | None, after: int | None) -> str:
    """The effect of a change of priority."""
    numbers = {"run": name, "priority": priority, "before": before, "after": after}
    if after is None or before == after:
        return _("Priority of %(run)s set to %(priority)d") % numbers
    return _("Priority of %(run)s set to %(priority)d: position %(before)d → %(after)d") % numbers


def _same_position(change: RunChange) -> bool:
    return change.position_before == change.position_after


def _same_priority(change: RunChange) -> bool:
    return change.priority_before == change.priority_after


def _change(change: RunChange) -> str:
    position = _("same position") if _same_position(change) else _("position %(position_before)s → %(position_after)s")
    text = "" if _same_priority(change) else _("priority %(priority_before)d → %(priority_after)d") + ", "
    return (text + position) % vars(change)


def _slip(change: RunChange, reader: User) -> str:
    mine = change.run.user_id == reader.pk
    whose = _("your %s") % change.run.name if mine else f"{change.run.user.username}’s {change.run.name}"
    numbers = {"whose": whose, "before": change.position_before, "after": change.position_after}
    if (change.position_after or 0) > (change.position_before or 0):
        return _("%(whose)s moves back from %(before)s to %(after)s") % numbers
    return _("%(whose)s moves up from %(before)s to %(after)s") % numbers
