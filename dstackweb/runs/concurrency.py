"""Whether a person may change a run, and whether it is still as they saw it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from django.utils.translation import gettext as _

from dstackweb.accounts import access
from dstackweb.accounts.access import allows
from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Forbidden, Invalid, NotFound, Stale
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Move, Run, Sweep
from dstackweb.runs.queue import ordering
from dstackweb.runs.row_fields import QueuePageRow

MOVES_SEARCHED = 20
"""So many of a queue's latest moves are searched for the one that moved a run along."""


def etag(run: Run | QueuePageRow) -> str:
    """Covers only what people edit, so that it goes stale only when a person changed something."""
    text = f"{run.pk}:{run.priority}:{run.queue_id}:{run.seniority_us}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def matches(if_match: str | None, run: Run) -> bool:
    """Whether an `If-Match` names the run as it is. A proxy that compresses answers makes their tags weak (`W/"…"`)."""
    return if_match is None or if_match.removeprefix("W/").strip('"') in ("*", etag(run))


def check_seen(runs: Sequence[Run], now: Mapping[int, Run], if_match: Mapping[int, str] | None) -> list[Run]:
    """The runs as they are `now`. Raises NotFound, and Stale for one that changed since `if_match` (etags by id)."""
    for run in runs:
        if run.pk not in now:
            raise NotFound(_("run %(run)s no longer exists. Nothing was changed.") % {"run": run.name})
        fresh = now[run.pk]
        if fresh.queue_id != run.queue_id or not matches((if_match or {}).get(run.pk), fresh):
            raise stale_error(fresh)
    return [now[run.pk] for run in runs]


def stale_error(run: Run) -> Stale:
    return Stale(
        _(
            "run %(run)s was changed by %(run_)s since you looked: its priority is %(priority)s in queue %(queue)s "
            "now. Your change was not applied. Check the run and try again."
        )
        % {"run": run.name, "run_": _last_editor(run), "priority": run.priority, "queue": run.queue.name},
        run=run.name,
        priority=run.priority,
        queue=run.queue.name,
        etag=etag(run),
    )


def _last_editor(run: Run) -> str:
    """Who last changed the run, or moved another one that it gave way for."""
    kinds = (RunEventKind.PRIORITY, RunEventKind.QUEUE, RunEventKind.MOVED, RunEventKind.MOVE_UNDONE)
    event = run.events.filter(kind__in=kinds).select_related("actor").last()
    latest = Move.objects.filter(queue=run.queue_id).select_related("user").order_by("-at")[:MOVES_SEARCHED]
    move = next((move for move in latest if any(change[0] == run.pk for change in move.changes)), None)
    if move is not None and (event is None or event.at < move.at):
        return move.user.get_username()
    return event.actor.get_username() if event and event.actor else "someone"


def may_change(one: Run | Sweep, user: User, role: str) -> None:
    """Members change their own runs and sweeps, managers any. Raises Forbidden."""
    if access.may_change(role, one.user_id, user):
        return
    if isinstance(one, Run):
        text = _("run %(run)s belongs to %(user)s: they or a manager can change it")
    else:
        text = _("sweep %(sweep)s belongs to %(user)s: they or a manager can change it")
    raise Forbidden(text % {"run": one.name, "sweep": one.name, "user": one.user.get_username()})


def check_priority(project: Project, role: str, priority: int, line: int | None = None) -> None:
    """Refuse what the caller may not ask for, rather than clamp it. Raises Invalid with the line of the file."""
    if not ordering.PRIORITY_MIN <= priority <= ordering.PRIORITY_MAX:
        raise Invalid.at(
            "priority",
            msg=_("priority is a whole number from 0 to 100, not %(priority)s") % {"priority": priority},
            line=line,
        )
    if priority > project.member_max_priority and not allows(role, "manager"):
        msg = _("members may ask for a priority of up to %(most)s here; a manager can raise it to %(priority)s") % {
            "most": project.member_max_priority,
            "priority": priority,
        }
        raise Invalid.at("priority", msg=msg, line=line)
