"""Parses forms of the queue page: the runs and the target position."""

from __future__ import annotations

from collections.abc import Sequence

from django.http import QueryDict
from django.utils.translation import gettext as _

from dstackweb.accounts.access import allows
from dstackweb.accounts.models import User
from dstackweb.lib.errors import Invalid, NotFound
from dstackweb.runs import selectors
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue.reorder import MoveTarget
from dstackweb.web.common.pages import PageRequest, whole_number

AT_MOST = 500
"""Runs that one request may name; a page shows fewer."""


def runs_from_form(form: QueryDict, queue: Queue) -> tuple[list[Run], dict[int, str] | None]:
    """The runs in a form, sent as `id.etag`, in its order, and the etags by run."""
    tokens = [token.partition(".") for token in ",".join(form.getlist("run")).split(",") if token]
    if not tokens:
        raise Invalid.at("run", msg=_("select at least one run"))
    etags = {whole_number(key): etag for key, _dot, etag in tokens if etag}
    return runs_by_id(queue, [key for key, _dot, _etag in tokens[:AT_MOST]]), etags or None


def runs_by_id(queue: Queue, keys: Sequence[str]) -> list[Run]:
    """The runs with these ids, in this order. Raises NotFound when none of them is in the queue's project."""
    wanted = [whole_number(key) for key in keys]
    found = Run.objects.select_related("queue", "project", "user").in_bulk(wanted)
    runs = [found[key] for key in wanted if key in found and found[key].project_id == queue.project_id]
    if not runs:
        raise NotFound(_("these runs are no longer in this queue"))
    return runs


def target_from_form(request: PageRequest, form: QueryDict, queue: Queue, runs: Sequence[Run]) -> MoveTarget:
    """The target position in a form; `up` and `down` are relative to the current neighbours."""
    verb = form.get("do", "")
    match verb:
        case "top" | "bottom":
            return MoveTarget(verb, None)
        case "before" | "after":
            return MoveTarget(verb, _anchor(form, queue))
        case "up" | "down":
            own = None if allows(request.role, "manager") else request.user
            neighbour = _neighbour(queue, runs, verb == "up", own)
            if neighbour is None:
                raise Invalid.at("do", msg=_("it is already first") if verb == "up" else _("it is already last"))
            return MoveTarget("before" if verb == "up" else "after", neighbour)
    raise Invalid.at("do", msg=_("unknown action"))


def _anchor(form: QueryDict, queue: Queue) -> Run:
    """The reference run: by its id, or by a name or position that a person typed."""
    waiting = selectors.in_order(queue).select_related("queue", "project", "user")
    name = form.get("name", "").removeprefix("#")
    if not name:
        found = waiting.filter(pk=whole_number(form.get("anchor"))).first()
    else:
        found = waiting.filter(name=name).first()
        if found is None and name.isdigit() and 0 < int(name) <= queue.count.submitted:
            found = waiting[int(name) - 1]
    if found is None:
        raise NotFound(_("no waiting run named %s in this queue") % (name or "?"))
    return found


def _neighbour(queue: Queue, runs: Sequence[Run], up: bool, own: User | None) -> Run | None:
    """The run directly ahead of (or behind) these; with `own`, the nearest of this member."""
    edge = (min if up else max)(runs, key=lambda run: (run.rank, run.pk))
    waiting = selectors.in_order(queue)
    if up:
        others = waiting.filter(rank__lte=edge.rank).exclude(rank=edge.rank, pk__gte=edge.pk)
    else:
        others = waiting.filter(rank__gte=edge.rank).exclude(rank=edge.rank, pk__lte=edge.pk)
    others = others.exclude(pk__in=[run.pk for run in runs])
    if own is not None:
        others = others.filter(user=own)
    order = ("-rank", "-id") if up else ("rank", "id")
    return others.select_related("queue", "project", "user").order_by(*order).first()
