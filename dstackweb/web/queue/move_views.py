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
from dstackweb.lib.forms import whole_number
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import reorder
from dstackweb.runs.queue.folding import FoldKey
from dstackweb.runs.queue.folds import runs_of
from dstackweb.runs.queue.move_preview import MoveTarget
from dstackweb.runs.states import ENDED, RunStatus
from dstackweb.runs.sweeps import services as sweeps
from dstackweb.web.common.pages import PageRequest, Undo, done_here, notice, project_page, sentence
from dstackweb.web.queue.picked import Picked, pick, read_picked
from dstackweb.web.queue.views import fragment
from dstackweb.wording import queue as move_words
from dstackweb.wording.queue_filters import Filters
from dstackweb.wording.sentence import listing

Result = tuple[str, list[Run], int | None]
"""An action's result in words, its runs, and the number of the move for undo."""


@project_page()
def preview(request: PageRequest, queue: str) -> HttpResponse:
    """The effect of a move without making it, or why it is refused."""
    found = services.find_queue(request.project, queue)
    try:
        picked = read_picked(request.GET, found)
        target = _target_from_form(request, request.GET, found, picked.runs)
        effect = reorder.preview(picked.runs, request.user, request.role, target)
    except DomainError as error:
        return JsonResponse({"text": sentence(error.detail), "refused": True, "places": {}, "priorities": {}})
    return JsonResponse(
        {
            "text": move_words.move_preview(effect, request.user),
            "places": picked.places(effect),
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
            picked = pick(queue, [form[verb]])
            return _prioritise_lines(request, picked, picked.runs[0].priority + step)
    picked = read_picked(form, queue)
    runs, etags = picked.runs, picked.etags
    match form.get("do"):
        case "priority":
            return _prioritise_lines(request, picked, _priority(form.get("priority")))
        case "stop":
            return _stop(request, picked)
    moved = reorder.move(runs, request.user, request.role, _target_from_form(request, form, queue, runs), etags)
    return move_words.moved(moved), runs, moved.move_id


def _prioritise_lines(request: PageRequest, picked: Picked, priority: int) -> Result:
    """Of sweeps that are folded the priority of all runs, also of those to come; that has no undo."""
    whole = picked.sweeps()
    if not whole:
        return _prioritise(request, picked.runs, priority, picked.etags)
    for sweep in whole:
        sweeps.may_change(sweep, request.user, request.role)
    if picked.single:
        reorder.set_priorities(picked.single, request.user, request.role, priority, picked.etags)
    for sweep in whole:
        sweeps.set_priority(sweep, request.user, request.role, priority)
    if len(whole) == 1 and not picked.single:
        text = _("Priority of all runs of %(sweep)s set to %(p)d") % {"sweep": whole[0].name, "p": priority}
    else:
        text = _runs_prioritised(len(picked.runs), priority)
    return text, picked.runs, None


def _runs_prioritised(runs: int, priority: int) -> str:
    text = ngettext("Priority of %(n)d run set to %(p)d", "Priority of %(n)d runs set to %(p)d", runs)
    return text % {"n": runs, "p": priority}


def _prioritise(request: PageRequest, runs: list[Run], priority: int, etags: dict[int, str] | None = None) -> Result:
    before = selectors.position(runs[0])
    moved = reorder.set_priorities(runs, request.user, request.role, priority, etags)
    if len(runs) > 1:
        return _runs_prioritised(len(runs), priority), runs, moved.move_id
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


def _stop(request: PageRequest, picked: Picked) -> Result:
    """Stop them: the reader needs permission for each. Runs that end meanwhile are skipped.

    A fold is stopped as its whole sweep.
    """
    runs, whole = picked.single, picked.sweeps()
    for sweep in whole:
        sweeps.may_change(sweep, request.user, request.role)
    stopped = services.stop_all(runs, request.user, request.role)
    for sweep in whole:
        sweeps.stop(sweep, request.user, request.role)
    if whole:
        names = [sweep.name for sweep in whole] + [run.name for run in stopped]
        return _("Stopping %s") % listing(names), picked.runs, None
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


def _target_from_form(request: PageRequest, form: QueryDict, queue: Queue, runs: Sequence[Run]) -> MoveTarget:
    """The target position in a form; `up` and `down` are relative to the current neighbours."""
    verb = form.get("do", "")
    match verb:
        case "top" | "bottom":
            return MoveTarget(verb, None)
        case "before" | "after":
            return MoveTarget(verb, _anchor(form, queue, first=verb == "before"))
        case "up" | "down":
            own = None if request.may["manager"] else request.user
            neighbour = _neighbour(queue, runs, verb == "up", own)
            if neighbour is None:
                raise Invalid.at("do", msg=_("it is already first") if verb == "up" else _("it is already last"))
            neighbour = _edge_of_fold(request, queue, neighbour, first=verb == "up")
            return MoveTarget("before" if verb == "up" else "after", neighbour)
    raise Invalid.at("do", msg=_("unknown action"))


def _anchor(form: QueryDict, queue: Queue, *, first: bool) -> Run:
    """The reference run: by its id, or by a name or position that a person typed. Of a sweep its first or last one."""
    waiting = selectors.in_order(queue).select_related("queue", "project", "user")
    name = form.get("name", "").removeprefix("#")
    if not name:
        key = FoldKey.parse(form.get("anchor", ""))
        runs = waiting.filter(pk=whole_number(form.get("anchor"))) if key is None else runs_of(queue, key)
        found = runs.first() if first else runs.last()
    else:
        found = waiting.filter(name=name).first()
        if found is None:
            of_sweep = waiting.filter(sweep__name=name)
            found = of_sweep.first() if first else of_sweep.last()
        if found is None and 0 < (place := whole_number(name)) <= queue.count.submitted:
            found = waiting[place - 1]
    if found is None:
        raise NotFound(_("no waiting run named %s in this queue") % (name or "?"))
    return found


def _edge_of_fold(request: PageRequest, queue: Queue, run: Run, *, first: bool) -> Run:
    """The first or last run of the line that a run is in: a move by one passes all of it."""
    filters = Filters.read(request.GET)
    if run.sweep_id is None or not filters.folds or run.sweep_id in filters.opened:
        return run
    runs = runs_of(queue, FoldKey.of(run.sweep_id, run.priority, run.moved_at))
    return (runs.first() if first else runs.last()) or run


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
