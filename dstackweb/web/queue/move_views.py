"""Actions on waiting runs of the queue page: move, preview a move, undo, set priorities, stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from django.contrib import messages
from django.http import HttpResponse, JsonResponse, QueryDict
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_POST

from dstackweb.accounts.models import User
from dstackweb.lib.errors import DomainError, Invalid, NotFound
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import reorder
from dstackweb.runs.queue.reorder import MoveTarget
from dstackweb.runs.states import ENDED, RunStatus
from dstackweb.web.common.pages import PageRequest, Undo, done_here, notice, project_page, sentence, whole_number
from dstackweb.web.queue.views import fragment
from dstackweb.wording import queue as move_words

AT_MOST = 500
"""Runs that one request may name; a page shows fewer."""
Result = tuple[str, list[Run], int | None]
"""An action's result in words, its runs, and the number of the move for undo."""


@project_page()
def preview(request: PageRequest, queue: str) -> HttpResponse:
    """The effect of a move without making it, or why it is refused."""
    found = services.find_queue(request.project, queue)
    try:
        runs, _etags = runs_from_form(request.GET, found)
        target = _target_from_form(request, request.GET, found, runs)
        effect = reorder.preview(runs, request.user, request.role, target)
    except DomainError as error:
        return JsonResponse({"text": sentence(error.detail), "refused": True, "places": {}, "priorities": {}})
    return JsonResponse(
        {
            "text": move_words.move_preview(effect, request.user),
            "places": {change.run.pk: change.position_after for change in (*effect.changes, *effect.slips)},
            "priorities": {
                change.run.pk: change.priority_after
                for change in effect.changes
                if change.priority_after != change.priority_before
            },
        }
    )


@require_POST
@project_page()
def change(request: PageRequest, queue: str) -> HttpResponse:
    """Apply one action to the runs in the form. Answers with the current list, also when refused."""
    found = services.find_queue(request.project, queue)
    return _list_response(request, found, lambda: _apply(request, found))


@require_POST
@project_page()
def undo(request: PageRequest, queue: str) -> HttpResponse:
    """Undo a move within its time limit."""

    def act() -> Result:
        moved = reorder.undo(whole_number(request.POST.get("move")), request.user)
        return move_words.move_undone(moved), [change.run for change in moved.changes], None

    return _list_response(request, services.find_queue(request.project, queue), act)


def _list_response(request: PageRequest, queue: Queue, act: Callable[[], Result]) -> HttpResponse:
    """The current list with a notice of the result; without scripts, a redirect with a message."""
    try:
        text, runs, move = act()
        status, level = 200, "success"
    except DomainError as error:
        text, runs, move = sentence(error.detail), [], None
        status, level = error.status, "error"
    if not request.htmx:
        messages.add_message(request, getattr(messages, level.upper()), text)
    return notice(fragment(request, queue, {run.pk for run in runs}, status), text, level, undo_of(queue, move))


def undo_of(queue: Queue, move: int | None) -> Undo | None:
    """How a page undoes this move."""
    if move is None:
        return None
    url = reverse("web:undo", args=[queue.project.name, queue.name])
    return {"url": url, "move": move, "seconds": reorder.UNDO_S}


def _apply(request: PageRequest, queue: Queue) -> Result:
    form = request.POST
    for step, verb in ((1, "raise"), (-1, "lower")):
        if verb in form:  # a row's own button, on a page without scripts
            runs = _runs_by_id(queue, [form[verb]])
            return _prioritise(request, runs, runs[0].priority + step)
    runs, etags = runs_from_form(form, queue)
    match form.get("do"):
        case "priority":
            return _prioritise(request, runs, _priority(form.get("priority")), etags)
        case "stop":
            return _stop(request, runs)
    moved = reorder.move(runs, request.user, request.role, _target_from_form(request, form, queue, runs), etags)
    return move_words.moved(moved), runs, moved.move_id


def _prioritise(request: PageRequest, runs: list[Run], priority: int, etags: dict[int, str] | None = None) -> Result:
    before = selectors.position(runs[0])
    moved = reorder.set_priorities(runs, request.user, request.role, priority, etags)
    if len(runs) > 1:
        text = ngettext("Priority of %(n)d run set to %(p)d", "Priority of %(n)d runs set to %(p)d", len(runs))
        return text % {"n": len(runs), "p": priority}, runs, moved.move_id
    return (
        move_words.priority_set(runs[0].name, priority, before, selectors.position(_reread(runs[0]))),
        runs,
        moved.move_id,
    )


def _priority(text: str | None) -> int:
    """A typed priority. Raises Invalid if it is not an integer."""
    try:
        return int((text or "").strip())
    except ValueError:
        raise Invalid.at(
            "priority", msg=_("priority must be an integer from 0 to 100, not %(text)s") % {"text": repr(text)}
        ) from None


def _reread(run: Run) -> Run:
    return Run.objects.select_related("queue", "project").get(pk=run.pk)


def _stop(request: PageRequest, runs: list[Run]) -> Result:
    """Stop them: the reader needs permission for each. Runs that end meanwhile are skipped."""
    stopped = services.stop_all(runs, request.user, request.role)
    if len(stopped) == 1:
        text = _("%s ended") if stopped[0].status in ENDED else _("Stopping %s")
        return text % stopped[0].name, runs, None
    over = sum(run.status == RunStatus.TERMINATED for run in stopped)
    return ngettext("%d run stopped", "%d runs stopped", over) % over, runs, None


@require_POST
@project_page("member")
def set_priority(request: PageRequest, run: str) -> HttpResponse:
    """Change a run's priority on its own page; the etag detects concurrent changes."""
    found = selectors.find_run(request.project, run)
    etags = {found.pk: request.POST["etag"]} if request.POST.get("etag") else None
    text, _runs, move = _prioritise(request, [found], _priority(request.POST.get("priority")), etags)
    url = reverse("web:run", args=[request.project.name, run])
    return done_here(request, text, url, undo_of(found.queue, move))


def runs_from_form(form: QueryDict, queue: Queue) -> tuple[list[Run], dict[int, str] | None]:
    """The runs in a form, sent as `id.etag`, in its order, and the etags by run."""
    tokens = [token.partition(".") for token in ",".join(form.getlist("run")).split(",") if token]
    if not tokens:
        raise Invalid.at("run", msg=_("select at least one run"))
    etags = {whole_number(key): etag for key, _dot, etag in tokens if etag}
    return _runs_by_id(queue, [key for key, _dot, _etag in tokens[:AT_MOST]]), etags or None


def _runs_by_id(queue: Queue, keys: Sequence[str]) -> list[Run]:
    """The runs with these ids, in this order. Raises NotFound when none of them is in the queue's project."""
    wanted = [whole_number(key) for key in keys]
    found = Run.objects.select_related("queue", "project", "user").in_bulk(wanted)
    runs = [found[key] for key in wanted if key in found and found[key].project_id == queue.project_id]
    if not runs:
        raise NotFound(_("these runs are no longer in this queue"))
    return runs


def _target_from_form(request: PageRequest, form: QueryDict, queue: Queue, runs: Sequence[Run]) -> MoveTarget:
    """The target position in a form; `up` and `down` are relative to the current neighbours."""
    verb = form.get("do", "")
    match verb:
        case "top" | "bottom":
            return MoveTarget(verb, None)
        case "before" | "after":
            return MoveTarget(verb, _anchor(form, queue))
        case "up" | "down":
            own = None if request.may["manager"] else request.user
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
        if found is None and 0 < (place := whole_number(name)) <= queue.count.submitted:
            found = waiting[place - 1]
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
