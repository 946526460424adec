"""Rows of lists as templates show them: the run with its words and what this reader may do to it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows
from dstackweb.accounts.models import User
from dstackweb.lib.errors import Invalid
from dstackweb.runs import services
from dstackweb.runs.models import Run
from dstackweb.runs.placement_summary import Place
from dstackweb.runs.selectors import QueueRow
from dstackweb.runs.states import ENDED
from dstackweb.scheduler.models import Reservation
from dstackweb.web.common.pages import PageRequest
from dstackweb.web.gpus.alerts import Mark
from dstackweb.web.templatetags.dstackweb_tags import moments
from dstackweb.wording import statuses, units, waiting

NUMBER_MAX = 2**53


def may_change(run: Run, user: User, role: str) -> bool:
    """Whether the controls of a run are of use to this reader; the services decide again."""
    return allows(role, "manager") or (allows(role, "member") and run.user_id == user.pk)


def number(text: str | None, least: int = 0) -> int:
    """A whole number of a query string, no larger than databases can look for; anything else is the least."""
    try:
        return min(max(least, int(text or "")), NUMBER_MAX)
    except ValueError:
        return least


def priority(text: str | None) -> int:
    """A priority that was typed. Raises Invalid for what is no whole number."""
    try:
        return int((text or "").strip())
    except ValueError:
        raise Invalid.at("priority", msg=f"priority is a whole number from 0 to 100, not {text!r}") from None


def needs(spec: dict[str, Any]) -> str:
    """What a run asks for, short: `2 × A100 40 GB`, `4 nodes, each 1 GPU`, `2 CPUs`."""
    wants = spec["requirements"]
    count, names = wants["gpu_count_min"], "/".join(wants["gpu_names"])
    if count and names:
        memory = f" {units.mebibytes(wants['gpu_memory_min_mib'])}" if wants.get("gpu_memory_min_mib") else ""
        each = f"{count} × {names}{memory}"
    else:
        each = units.gpus(count) if count else units.cpus(wants["cpu_min"])
    nodes = spec.get("nodes", 1)
    return _("%(nodes)d nodes, each %(needs)s") % {"nodes": nodes, "needs": each} if nodes > 1 else each


class QueueLine(TypedDict):
    """One waiting run in its place, flat and mostly text: a template looks these up some thousand times for a page.

    `token` is the run with its etag; `reserved` what is kept for it, if anything is; `moved`, that it just was;
    `marks`, that there is more to say than why it waits, and `moved_by` the words for whoever moved it at `moved_at`.
    """

    id: str
    name: str
    user: str
    position: str
    priority: str
    needs: str
    why: str
    label: str
    tone: str
    queued_at: dt.datetime
    token: str
    may_change: bool
    moved: bool
    marks: bool
    hold: bool
    reserved: Reservation | None
    moved_at: dt.datetime | None
    moved_by: str


class _Words(NamedTuple):
    """What all runs of one shape share."""

    needs: str
    why: SafeString
    label: str
    tone: str


def queue_lines(
    rows: Sequence[QueueRow], request: PageRequest, reserved: Reservation | None, moved: Collection[int]
) -> list[QueueLine]:
    """The rows as this reader sees them. What is said of a run just as of the one before it is not said again."""
    words: dict[str, _Words] = {}
    may: dict[int, bool] = {}  # the same for all runs of one member
    as_above, moved_by, before = _("as above"), _("moved by %(who)s"), None
    lines: list[QueueLine] = []
    for row in rows:
        run = row.run
        if run.shape not in words:
            why = waiting.reason(row.reason, row.reason_data)
            words[run.shape] = _Words(needs(run.spec), moments(why.text), why.label, why.tone)
        told = words[run.shape]
        if run.user_id not in may:
            may[run.user_id] = may_change(run, request.user, request.role)
        kept = reserved if reserved and reserved.run_id == run.pk else None
        lines.append(
            {
                "id": _plain(run.pk),
                "name": run.name,
                "user": run.user.username,
                "position": _plain(row.position),
                "priority": _plain(run.priority),
                "needs": told.needs,
                "why": as_above if told.why == before else told.why,
                "label": told.label,
                "tone": told.tone,
                "queued_at": run.queued_at,
                "token": _plain(f"{run.pk}.{services.etag(run)}"),
                "may_change": may[run.user_id],
                "moved": run.pk in moved,
                "marks": run.is_hold or kept is not None or run.moved_at is not None,
                "hold": run.is_hold,
                "reserved": kept,
                "moved_at": run.moved_at,
                "moved_by": moved_by % {"who": run.moved_by.username} if run.moved_by else _("moved"),
            }
        )
        before = told.why
    return lines


def _plain(digits: object) -> SafeString:
    """What has nothing in it to escape: a row names its run ten times."""
    return mark_safe(str(digits))


@dataclass(frozen=True)
class RunLine:
    """One run of a list, of any status."""

    run: Run
    needs: str
    told: str
    where: str
    mark: Mark | None = None

    @classmethod
    def of(cls, run: Run, place: Place | None = None, mark: Mark | None = None) -> RunLine:
        """The row with the reason it ended, if it did not end well; and where it is, if it is placed."""
        reason = statuses.termination(run.termination_reason) if run.termination_reason else ""
        told = run.status_message or ("" if run.status == "done" else reason)
        return cls(run, needs(run.spec), told or (place.message if place else ""), place.where if place else "", mark)

    @property
    def ended(self) -> bool:
        """Whether it has come to its end."""
        return self.run.status in ENDED

    @property
    def took(self) -> dt.timedelta | None:
        """From its first start to its end."""
        if self.run.started_at and self.run.ended_at:
            return self.run.ended_at - self.run.started_at
        return None
