"""Actions on waiting runs of the queue page: move, preview a move, undo, set priorities, stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from django.contrib import messages
from django.http import HttpResponse, JsonResponse, QueryDict
from django.urls import reverse
from django.utils.translation import gettext as _, ngettext

from dstackweb.accounts.models import User
from dstackweb.lib.errors import DomainError, Invalid, NotFound
from dstackweb.lib.forms import whole_number
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Queue, Run, Sweep
from dstackweb.runs.queue import reorder
from dstackweb.runs.queue.folding import FoldKey
from dstackweb.runs.queue.listing import runs_of
from dstackweb.runs.queue.move_preview import MoveEffect, MoveTarget
from dstackweb.runs.states import ENDED, RunStatus
from dstackweb.runs.sweeps import services as sweeps
from dstackweb.runs.sweeps.selectors import find_sweeps
from dstackweb.web.common.pages import (
    PageRequest,
    Undo,
    done_here,
    notice,
    project_action,
    project_page,
    sentence,
)
from dstackweb.web.queue.views import fragment
from dstackweb.wording import queue as move_words
from dstackweb.wording.queue_filters import Filters
from dstackweb.wording.sentence import listing

Result = tuple[str, list[Run], int | None]
"""An action's result in words, its runs, and the number of the move for undo."""


AT_MOST = 500
"""Lines that one request may name; a page shows fewer."""


@dataclass(frozen=True)
class Picked:
    """`runs` are all of them, in the form's order. Folds have no etags: those of their runs that wait now are meant."""

    runs: list[Run]
    etags: dict[int, str] | None
    folds: Mapping[FoldKey, Sequence[Run]] = field(default_factory=dict)

    @property
    def single(self) -> list[Run]:
        """Those that are lines of their own."""
        folded = {run.pk for runs in self.folds.values() for run in runs}
        return [run for run in self.runs if run.pk not in folded]

    def sweeps(self) -> list[Sweep]:
        return find_sweeps({key.sweep_id for key in self.folds})

    def places(self, effect: MoveEffect) -> dict[str, int | None]:
        """The new positions of all lines, by what the page calls them."""
        after = {change.run.pk: change.position_after for change in (*effect.changes, *effect.slips)}
        firsts = {str(key): [at for run in runs if (at := after.get(run.pk))] for key, runs in self.folds.items()}
        return {str(pk): at for pk, at in after.items()} | {key: min(at) for key, at in firsts.items() if at}


def read_picked(form: QueryDict, queue: Queue) -> Picked:
    """Raises Invalid without any, NotFound when none of them is in the queue's project."""
    tokens = [token for token in ",".join(form.getlist("run")).split(",") if token][:AT_MOST]
    if not tokens:
        raise Invalid.at("run", msg=_("select at least one run"))
    return pick(queue, tokens)


def pick(queue: Queue, tokens: Sequence[str]) -> Picked:
    """The lines with these tokens, each a FoldKey or `id.etag`. Raises NotFound as `read_picked` does."""
    keys = {token: FoldKey.parse(token) for token in tokens}
    single = {token: token.partition(".") for token, key in keys.items() if key is None}
    known = Run.objects.select_related("queue", "project", "user")
    found = known.in_bulk({whole_number(pk) for pk, _dot, _etag in single.values()})
    runs: dict[int, Run] = {}
    folds: dict[FoldKey, list[Run]] = {}
    for token, key in keys.items():
        if key is not None:
            folds[key] = list(runs_of(queue, key))
            runs |= {run.pk: run for run in folds[key]}
        elif (run := found.get(whole_number(single[token][0]))) and run.project_id == queue.project_id:
            runs[run.pk] = run
    if not runs:
        raise NotFound(_("these runs are no longer in this queue"))
    etags = {whole_number(pk): etag for pk, _dot, etag in single.values() if etag}
    return Picked(list(runs.values()), etags or None, folds)


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


@project_action()
def change(request: PageRequest, queue: str) -> HttpResponse:
    """Apply one action to the runs in the form. Answers with the current list, also when refused."""
    found = services.find_queue(request.project, queue)
    return _list_response(request, found, lambda: _apply(request, found))


@project_action()
def undo(request: PageRequest, queue: str) -> HttpResponse:
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
    """Stop them, folds as whole sweeps: the reader needs permission for each. Runs that end meanwhile are skipped."""
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


@project_action("member")
def set_priority(request: PageRequest, run: str) -> HttpResponse:
    """Change a run's priority on its own page; the etag detects concurrent changes."""
    found = selectors.find_run(request.project, run)
    etags = {found.pk: request.POST["etag"]} if request.POST.get("etag") else None
    text, _runs, move = _prioritise(request, [found], _priority(request.POST.get("priority")), etags)
    return done_here(request, text, "web:run", request.project.name, run, undo=undo_of(found.queue, move))


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
