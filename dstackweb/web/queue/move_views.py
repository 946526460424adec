"""Actions on waiting runs of the queue page: move, preview a move, undo, set priorities, stop."""

from __future__ import annotations

from collections.abc import Sequence

from django.contrib import messages
from django.http import HttpResponse, JsonResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_POST

from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.runs import selectors, services
from dstackweb.runs.models import Queue, Run
from dstackweb.runs.queue import reorder
from dstackweb.runs.states import ENDED, RunStatus
from dstackweb.web.common.pages import PageRequest, Undo, notice, project_page, sentence, whole_number
from dstackweb.web.queue import move_targets
from dstackweb.web.queue.views import fragment, queue_called
from dstackweb.wording import moves as move_words


@project_page()
def preview(request: PageRequest, queue: str) -> HttpResponse:
    """The effect of a move without making it, or why it is refused."""
    found = queue_called(request, queue)
    try:
        runs, _etags = move_targets.runs_from_form(request.GET, found)
        target = move_targets.target_from_form(request, request.GET, found, runs)
        effect = reorder.preview(runs, request.user, request.role, target)
    except DomainError as error:
        return JsonResponse({"text": sentence(error.detail), "refused": True, "places": {}, "priorities": {}})
    return JsonResponse(
        {
            "text": move_words.would(effect, request.user),
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
    found = queue_called(request, queue)
    try:
        text, runs, undo = _apply(request, found)
    except DomainError as error:
        return _list_response(request, found, sentence(error.detail), "error", status=error.status)
    return _list_response(request, found, text, "success", moved=runs, undo=undo)


@require_POST
@project_page()
def undo(request: PageRequest, queue: str) -> HttpResponse:
    """Undo a move within its time limit."""
    found = queue_called(request, queue)
    try:
        moved = reorder.undo(whole_number(request.POST.get("move")), request.user, request.role)
    except DomainError as error:
        return _list_response(request, found, sentence(error.detail), "error", status=error.status)
    return _list_response(
        request, found, move_words.undone(moved), "success", moved=[change.run for change in moved.changes]
    )


def _list_response(
    request: PageRequest,
    queue: Queue,
    text: str,
    level: str,
    *,
    moved: Sequence[Run] = (),
    undo: int | None = None,
    status: int = 200,
) -> HttpResponse:
    """The current list with a notice of the result; without scripts, a redirect with a message."""
    if not request.htmx:
        messages.add_message(request, messages.ERROR if level == "error" else messages.SUCCESS, text)
    response = fragment(request, queue, {run.pk for run in moved}, status)
    return notice(response, text, level, undo_of(queue, undo))


def undo_of(queue: Queue, move: int | None) -> Undo | None:
    """How a page undoes this move."""
    if move is None:
        return None
    url = reverse("web:undo", args=[queue.project.name, queue.name])
    return {"url": url, "move": move, "seconds": reorder.UNDO_S}


def _apply(request: PageRequest, queue: Queue) -> tuple[str, list[Run], int | None]:
    """The result in words, the runs, and the number of the move for undo."""
    form = request.POST
    for step, verb in ((1, "raise"), (-1, "lower"), (0, "stop")):
        if verb in form:  # a row's own button, on a page without scripts
            runs = move_targets.runs_by_id(queue, [form[verb]])
            if verb == "stop":
                return _stop(request, runs)
            return _prioritise(request, runs, runs[0].priority + step)
    runs, etags = move_targets.runs_from_form(form, queue)
    match form.get("do"):
        case "priority":
            return _prioritise(request, runs, _priority(form.get("priority")), etags)
        case "stop":
            return _stop(request, runs)
    moved = reorder.move(
        runs, request.user, request.role, move_targets.target_from_form(request, form, queue, runs), etags
    )
    return move_words.done(moved), runs, moved.move_id


def _prioritise(
    request: PageRequest, runs: list[Run], priority: int, etags: dict[int, str] | None = None
) -> tuple[str, list[Run], int | None]:
    before = selectors.position(runs[0])
    moved = reorder.set_priorities(runs, request.user, request.role, priority, etags)
    if len(runs) > 1:
        text = ngettext("Priority of %(n)d run set to %(p)d", "Priority of %(n)d runs set to %(p)d", len(runs))
        return text % {"n": len(runs), "p": priority}, runs, moved.move_id
    return (
        move_words.prioritised(runs[0].name, priority, before, selectors.position(_reread(runs[0]))),
        runs,
        moved.move_id,
    )


def _priority(text: str | None) -> int:
    """A typed priority. Raises Invalid if it is not an integer."""
    try:
        return int((text or "").strip())
    except ValueError:
        raise Invalid.at("priority", msg=f"priority must be an integer from 0 to 100, not {text!r}") from None


def _reread(run: Run) -> Run:
    return Run.objects.select_related("queue", "project").get(pk=run.pk)


def _stop(request: PageRequest, runs: list[Run]) -> tuple[str, list[Run], None]:
    """Stop all of them or none: the reader needs permission for each. Runs that end meanwhile are skipped."""
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
    if not request.htmx:
        messages.success(request, text)
        return HttpResponse(status=303, headers={"Location": reverse("web:run", args=[request.project.name, run])})
    return notice(HttpResponse(status=204), text, undo=undo_of(found.queue, move))
