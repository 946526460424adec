"""Moves waiting runs to another queue: a page that shows the effect first."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _

from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.runs import rows, selectors, services
from dstackweb.runs.concurrency import etag
from dstackweb.runs.models import Queue
from dstackweb.runs.queue import transfer
from dstackweb.runs.queue.transfer import Transfer
from dstackweb.scheduler.passes.decision import foresee_waits
from dstackweb.web.common.pages import PageRequest, done, project_page, queue_url, sentence
from dstackweb.web.queue.move_views import Picked, read_picked
from dstackweb.wording import fair_share, queue as move_words, starts

RUNS_SHOWN = 10


@project_page("member")
def transfer_page(request: PageRequest, queue: str) -> HttpResponse:
    """The effect of moving runs to the queue `to`; posting moves them. Without runs, a redirect to the queue."""
    found = services.find_queue(request.project, queue)
    form = request.POST if request.method == "POST" else request.GET
    if not form.get("run") and not form.get("name"):
        return redirect(queue_url(request.project, found.name))
    picked = _picked(form, found)
    if request.method == "POST":
        if not form.get("to"):
            raise Invalid.at("to", msg=_("choose a queue"))
        moved = transfer.transfer(picked.runs, request.user, request.role, form["to"], picked.etags)
        return done(request, move_words.transferred(moved), queue_url(request.project, form["to"]))
    template = "queue/transfer_body.html" if request.htmx else "queue/transfer.html"
    return render(request, template, _context(request, found, picked))


def _picked(form: QueryDict, queue: Queue) -> Picked:
    """The runs to move, as the reader saw them; `all` are those of the member in this queue."""
    name = form.get("name", "")
    picked = Picked([selectors.find_run(queue.project, name)], None) if name else read_picked(form, queue)
    if form.get("all") == "yes":
        return Picked(transfer.waiting_of(queue, picked.runs[0].user.username), None)
    return picked


def _context(request: PageRequest, queue: Queue, picked: Picked) -> dict[str, Any]:
    runs = picked.runs
    others = list(Queue.objects.filter(project=request.project).exclude(pk=queue.pk).order_by("name"))
    usual = next((other.name for other in others if not other.draining), others[0].name if others else "")
    target = request.GET.get("to") or usual
    effect, refused = None, ""
    try:
        effect = transfer.preview(runs, request.user, request.role, target) if target else None
    except DomainError as error:
        refused = sentence(error.detail)
    owners = {run.user.username for run in runs}
    return {
        "queue": queue,
        "queues": others,
        "to": target,
        "runs": runs,
        "chosen": ",".join([*(f"{run.pk}.{etag(run)}" for run in picked.single), *map(str, picked.folds)]),
        "all": request.GET.get("all") == "yes",
        "owner": owners.pop() if len(owners) == 1 else "",
        "refused": refused,
        **(_effect(effect) if effect else {}),
    }


def _effect(effect: Transfer) -> dict[str, Any]:
    """What the page shows of a preview."""
    estimate, data = rows.starts_of(effect.beside) if effect.beside else (None, {})
    shares = {run.pk: share for run, share in effect.entries}
    return {
        "changes": [
            (change, fair_share.penalty(share.seconds, share.basis))
            for change in effect.changes[:RUNS_SHOWN]
            for share in [shares[change.run.pk]]
        ],
        "more": max(0, len(effect.changes) - RUNS_SHOWN),
        "slips": move_words.pushed_back(effect),
        "reordered": effect.is_reordered,
        "waits": move_words.foreseen(foresee_waits([run for run, _share in effect.entries])),
        "beside": effect.beside,
        "starts": estimate,
        "basis": starts.basis(estimate.basis, data) if estimate else None,
    }
