"""What a move does or did, in a sentence each."""

from __future__ import annotations

from collections.abc import Iterable

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dstackweb.accounts.models import User
from dstackweb.runs.queue.reorder import MovePreview, MoveResult, RunChange


def would(preview: MovePreview, reader: User) -> str:
    """`priority 50 → 52, position 7 → 3; ana's eval moves back from 3 to 4`, before anything is sent."""
    if not any(_changed(change) for change in preview.changes):
        return _("no change")
    parts = [_one(change, named=len(preview.changes) > 1) for change in preview.changes[:3]]
    if (more := len(preview.changes) - 3) > 0:
        parts.append(ngettext("and %d more", "and %d more", more) % more)
    slips = [_slip(change, reader) for change in preview.slips[:1]]
    if slips and (others := (preview.slips_total or 0) - 1) > 0:
        slips.append(ngettext("%d other run moves", "%d other runs move", others) % others)
    return "; ".join(filter(None, (*parts, ", ".join(slips))))


def done(moved: MoveResult) -> str:
    """What a move has done: `eval moved from position 7 to 3, priority 50 → 52`."""
    if len(moved.changes) != 1:
        return _several(moved) if moved.changes else _("nothing to move")
    change = moved.changes[0]
    numbers = {"run": change.run.name, "before": change.position_before, "after": change.position_after}
    if change.position_after is None:
        text = _("%(run)s moved") % numbers
    elif change.position_before is None:
        text = _("%(run)s moved to position %(after)s") % numbers
    else:
        text = _("%(run)s moved from position %(before)s to %(after)s") % numbers
    if change.priority_before != change.priority_after:
        text += _(", priority %(before)d → %(after)d") % {
            "before": change.priority_before,
            "after": change.priority_after,
        }
    return text


def _several(moved: MoveResult) -> str:
    """`3 runs moved to positions 1–3`; a member's may stand apart from each other."""
    count = len(moved.changes)
    text = ngettext("%d run moved", "%d runs moved", count) % count
    places = sorted(place for change in moved.changes if (place := change.position_after) is not None)
    if len(places) < count or places != list(range(places[0], places[0] + count)):
        return text
    return _("%(text)s to positions %(first)d–%(last)d") % {
        "text": text,
        "first": places[0],
        "last": places[-1],
    }


def undone(moved: MoveResult) -> str:
    """What taking a move back has done."""
    names = _names(change.run.name for change in moved.changes)
    return _("Undone: %s") % names


def prioritised(name: str, priority: int, before: int | None, after: int | None) -> str:
    """What a change of priority has done."""
    numbers = {"run": name, "priority": priority, "before": before, "after": after}
    if after is None or before == after:
        return _("Priority of %(run)s set to %(priority)d") % numbers
    return _("Priority of %(run)s set to %(priority)d: position %(before)d → %(after)d") % numbers


def _changed(change: RunChange) -> bool:
    return (change.priority_before, change.position_before) != (change.priority_after, change.position_after)


def _one(change: RunChange, named: bool) -> str:
    parts = []
    if change.priority_before != change.priority_after:
        parts.append(_("priority %(before)d → %(after)d"))
    parts.append(
        _("position %(at)s → %(to)s") if change.position_before != change.position_after else _("same position")
    )
    numbers = {
        "before": change.priority_before,
        "after": change.priority_after,
        "at": change.position_before,
        "to": change.position_after,
    }
    text = ", ".join(parts) % numbers
    return f"{change.run.name}: {text}" if named else text


def _slip(change: RunChange, reader: User) -> str:
    mine = change.run.user_id == reader.pk
    whose = _("your %s") % change.run.name if mine else f"{change.run.user.username}’s {change.run.name}"
    numbers = {"whose": whose, "before": change.position_before, "after": change.position_after}
    back = (change.position_after or 0) > (change.position_before or 0)
    return (
        _("%(whose)s moves back from %(before)s to %(after)s")
        if back
        else _("%(whose)s moves up from %(before)s to %(after)s")
    ) % numbers


def _names(names: Iterable[str]) -> str:
    every = list(names)
    shown = ", ".join(every[:3])
    return _("%(names)s and %(n)d more") % {"names": shown, "n": len(every) - 3} if len(every) > 3 else shown
