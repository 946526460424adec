"""The submit page: a run file, its plan, and submitting it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils.translation import gettext as _

from dstackweb.lib.errors import Conflict, DomainError, Forbidden, Invalid, TooLarge, TooMany
from dstackweb.runs import archives, pipelines, selectors, services
from dstackweb.runs.models import Archive, Sweep
from dstackweb.scheduler.passes.decision import Plan, plan_all
from dstackweb.web.common.pages import PageRequest, done, project_action, project_page, sentence
from dstackweb.web.runs import details
from dstackweb.wording import (
    fair_share,
    offers as offer_words,
    queue as queue_words,
    statuses,
    sweeps as sweep_words,
    units,
    waiting,
)
from dstackweb.wording.sentence import listing

GZIP_MAGIC = b"\x1f\x8b"
REFUSED = (Invalid, Conflict, Forbidden, TooLarge, TooMany)


class Example(NamedTuple):
    """A run file to start from. `about` is its first comment line."""

    name: str
    about: str
    text: str


@cache
def examples() -> tuple[Example, ...]:
    """All example run files by name, read once."""
    folder = settings.ASSETS_DIR / "examples"
    files = sorted(folder.glob("*.y*ml"), key=lambda file: (file.stem != "hello", file.stem))
    texts = [(file.stem, file.read_text()) for file in files]
    return tuple(Example(name, text.partition("\n")[0].lstrip("# ").strip(), text) for name, text in texts)


@project_page("member")
def submit_page(request: PageRequest) -> HttpResponseBase:
    """The form; posting it submits. `from` fills it with another run's file and archive."""
    if request.method != "POST":
        return render(request, "runs/submit.html", _new_form(request))
    archive = None
    try:
        archive = _attached(request)
        submission = services.Submission(_config(request), archive=archive.sha256 if archive else None)
        planned = _planned(request, submission)
        if planned["ask"] and request.POST.get("anyway") != "yes":
            return _answer(request, planned | {"asked": True}, 422, archive)
        made, _new = pipelines.submit(request.project, request.user, request.role, submission)
    except REFUSED as error:
        return _answer(request, _errors(error), 422, archive)
    first = made[0] if isinstance(made, list) else made
    page = "web:sweep" if isinstance(first, Sweep) else "web:run"
    names = listing(run.name for run in made) if isinstance(made, list) else made.name
    return done(request, _("%s submitted") % names, page, request.project.name, first.name)


@project_action("member")
def plan_page(request: PageRequest) -> HttpResponseBase:
    """The plan of a submission; stores nothing, and needs no archive."""
    if not _config(request).strip():
        return render(request, "runs/submit_result.html", {})
    try:
        planned = _planned(request, services.Submission(_config(request)))
    except REFUSED as error:
        return _answer(request, _errors(error), 422)
    return _answer(request, planned, 200)


def _config(request: PageRequest) -> str:
    # Browsers send CRLF, whatever was typed or pasted.
    return request.POST.get("config", "").replace("\r\n", "\n")


def _attached(request: PageRequest) -> Archive | None:
    """The uploaded archive, else the one already attached. Raises Invalid or TooLarge."""
    upload = request.FILES.get("archive")
    if not isinstance(upload, UploadedFile):
        held = request.POST.get("archive_sha256")
        return Archive.objects.filter(project=request.project, sha256=held).first() if held else None
    if upload.read(2) != GZIP_MAGIC:
        raise Invalid.at(
            "archive",
            msg=_("%(upload)s is not a .tar.gz file. Create one with tar -czf code.tar.gz .") % {"upload": upload.name},
        )
    upload.seek(0)
    return archives.store_archive(request.project, upload.chunks())[0]


def _new_form(request: PageRequest) -> dict[str, Any]:
    """An empty form, or the run file and archive of the run that `from` names."""
    if "from" not in request.GET:
        return _form("")
    run = selectors.find_run(request.project, request.GET["from"])
    return _form(run.config_text, run.archive) | {"origin": run.name}


def _form(config: str, archive: Archive | None = None) -> dict[str, Any]:
    return {"config": config, "archive": archive, "examples": examples(), "limit": archives.archive_limit()}


def _answer(request: PageRequest, result: dict[str, Any], status: int, archive: Archive | None = None) -> HttpResponse:
    """The plan or the errors beside the form. Without scripts, the whole page with them, and the archive kept."""
    if request.htmx:
        return render(request, "runs/submit_result.html", result, status=status)
    page = {**_form(_config(request), archive), **result, "result": True}
    return render(request, "runs/submit.html", page, status=status)


def _errors(error: DomainError) -> dict[str, Any]:
    if not isinstance(error, Invalid):
        return {"errors": [{"where": "", "line": None, "msg": sentence(error.detail)}]}
    return {
        "errors": [
            {"where": ".".join(map(str, one["loc"])), "line": one["line"], "msg": sentence(one["msg"])}
            for one in error.errors
        ]
    }


def _planned(request: PageRequest, submission: services.Submission) -> dict[str, Any]:
    """The plan of each run, and whether to ask before they are submitted."""
    plans = plan_all(request.project, request.user, request.role, submission)
    return {
        "plans": [_plan(one) for one in plans],
        "ask": any(one.impossible for one in plans),
        "several_start": sum(not one.waits and not one.follows for one in plans) > 1,
    }


def _plan(planned: Plan) -> dict[str, Any]:
    effective = planned.prepared.effective
    wants, array = effective.spec.requirements, effective.spec.array
    return {
        "name": effective.spec.name,
        "needs": units.needs(effective.spec.model_dump(mode="json")),
        "queue": planned.prepared.queue,
        "position": planned.position,
        "next_at": planned.next_at,
        "share": fair_share.penalty(planned.share.seconds, planned.share.basis),
        "after": statuses.after(planned.follows) if planned.follows else "",
        "sweep": sweep_words.size(array.size, array.max_parallel) if array else "",
        "waits": waiting.reason(planned.waits.reason, planned.waits.data) if planned.waits else None,
        "impossible": planned.impossible,
        "displaces": queue_words.would_displace(planned),
        "work_budget": queue_words.budget_of_work(planned.work_budget, planned.at),
        "notes": [waiting.plan_note(code) for code in planned.notes],
        "offers": [
            (offer, offer_words.availability(offer.availability), offer_words.has(offer), offer_words.why(offer, wants))
            for offer in planned.offers
        ],
        "backends": [
            (one, waiting.reason(one.waits.reason, one.waits.data) if one.waits else None) for one in planned.backends
        ],
        "nodes": effective.spec.nodes,
        "settings": details.settings_of(effective.spec, effective.provenance),
    }
