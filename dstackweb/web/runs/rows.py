"""Rows of lists for templates: the row's fields with their words and the reader's permissions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from django.utils import timezone
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from dstackweb.accounts import access
from dstackweb.accounts.models import User
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Run
from dstackweb.runs.queue.ordering import PRIORITY_MAX
from dstackweb.runs.row_fields import QueuePageRow, RunPageRow
from dstackweb.runs.service_codes import ServiceState
from dstackweb.runs.states import ENDED, PLACED
from dstackweb.scheduler.models import Reservation
from dstackweb.web.common.pages import PageRequest
from dstackweb.web.gpus import alerts
from dstackweb.web.templatetags.dstackweb_tags import moments
from dstackweb.wording import gateway, starts, statuses, units, waiting

TONES = {
    ServiceState.STARTING: "provisioning",
    ServiceState.HEALTHY: "running",
    ServiceState.UNHEALTHY: "failed",
    ServiceState.UNKNOWN: "pending",
}
"""The status whose colour a state of a service has."""


def may_change(run: Run | QueuePageRow, user: User, role: str) -> bool:
    """Whether to show the controls of a run; services check permissions again."""
    return access.may_change(role, run.user_id, user)


def max_priority(request: PageRequest) -> int:
    return PRIORITY_MAX if request.may["manager"] else request.project.member_max_priority


class _Words(NamedTuple):
    """Shared by all runs of one shape."""

    needs: str
    why: SafeString
    tone: str


def queue_cells(
    rows: Sequence[QueuePageRow], request: PageRequest, reserved: Mapping[int, Reservation], moved: Collection[int]
) -> list[dict[str, Any]]:
    """The rows for the template: their fields, and what only the page shows.

    Flat and mostly text, as a template looks these up some thousand times for a page; what is missing takes it longest.
    `token` is the run with its etag; `reserved` what is kept for it (given by run id), `moved` whether it just was,
    `marks` whether there is more than why it waits.
    """
    words: dict[str, _Words] = {}
    may: dict[int, bool] = {}  # the same for all runs of one member
    moved_by, penalty = _("moved by %(who)s"), _("fair share: %(time)s behind")
    cells: list[dict[str, Any]] = []
    for row in rows:
        spec = row.spec
        if row.shape not in words:
            why = waiting.reason(row.reason, row.reason_data)
            words[row.shape] = _Words(units.unbroken(units.needs(spec)), moments(why.text), why.tone)
        shared = words[row.shape]
        if row.user_id not in may:
            may[row.user_id] = may_change(row, request.user, request.role)
        kept = reserved.get(row.pk)
        cells.append(
            row.values()
            | {
                "pk": _plain(row.pk),
                "position": _plain(row.position),
                "priority": _plain(row.priority),
                "needs": shared.needs,
                "why": shared.why,
                "tone": shared.tone,
                "token": _plain(f"{row.pk}.{services.etag(row)}"),
                "may_change": may[row.user_id],
                "moved": row.pk in moved,
                "marks": bool(spec.get("hold")) or kept is not None or row.penalty_s or row.moved_at is not None,
                "penalty": penalty % {"time": units.duration(row.penalty_s)} if row.penalty_s else "",
                "hold": bool(spec.get("hold")),
                "reserved": kept,
                "basis": starts.basis(row.starts.basis, row.start_data),
                "moved_by": moved_by % {"who": row.moved_by} if row.moved_by else _("moved"),
                "fold": None,
                "url": "",
                "stop": "",
            }
        )
    return cells


def _plain(digits: object) -> SafeString:
    """Text that needs no escaping, marked as safe: faster."""
    return mark_safe(str(digits))


def run_cells(rows: Sequence[RunPageRow]) -> list[dict[str, Any]]:
    """The rows for templates: their fields, and the policy's mark."""
    placed = [row.pk for row in rows if row.status in PLACED]
    run_alerts = alerts.alerts(selectors.listed(placed), timezone.now()) if placed else {}
    return [
        row.values()
        | {
            "needs": units.unbroken(units.needs(row.spec)),
            "alert": run_alerts.get(row.pk),
            "ended": row.status in ENDED,
            "health_text": gateway.service_state(row.health) if row.health else "",
            "tone": TONES[row.health] if row.health else "",
            "took": row.ended_at - row.started_at if row.started_at and row.ended_at else None,
        }
        for row in statuses.worded(rows)
    ]
