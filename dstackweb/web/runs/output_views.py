"""What a run's jobs wrote: the log of one for its viewer, and the files that were kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.shortcuts import render
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _

from dstackweb.lib.downloads import SANDBOX, file_response
from dstackweb.lib.errors import Gone
from dstackweb.lib.forms import whole_number
from dstackweb.lib.storage import Missing
from dstackweb.runs import artifacts, logs, selectors
from dstackweb.runs.models import Artifact, Job, Run, RunArtifacts
from dstackweb.web.common.pages import PageRequest, Routed, project_page, sentence
from dstackweb.wording import storage as words, units

LOG_BYTES = logs.BLOCK


def _log_page(view: Callable[[PageRequest, str], HttpResponseBase]) -> Routed:
    """That a log or a part of it is gone is said as text to the viewer, and by a page of its own elsewhere."""

    @project_page()
    @functools.wraps(view)
    def page(request: PageRequest, run: str) -> HttpResponseBase:
        try:
            return view(request, run)
        except Missing as missing:
            error = Gone(_("part of the log is lost (%(error)s is not there)") % {"error": missing})
        except Gone as gone:
            error = gone
        if not request.htmx:
            raise error
        return HttpResponse(sentence(error.detail), status=error.status, content_type="text/plain; charset=utf-8")

    return page


@_log_page
def log(request: PageRequest, run: str) -> HttpResponseBase:
    """Raw bytes of one job's log from `offset`, or its last `tail` lines; all of it with `download` or `view`."""
    found = selectors.find_run(request.project, run)
    node, attempt = whole_number(request.GET.get("node")), whole_number(request.GET.get("attempt")) or None
    tail = whole_number(request.GET["tail"]) if "tail" in request.GET else None
    offset = whole_number(request.GET.get("offset"))
    part = selectors.log_part(found, node=node, attempt=attempt, offset=offset, tail=tail, limit=LOG_BYTES)
    if ("download" in request.GET or "view" in request.GET) and part.job:
        size, data = logs.whole_log(part.job.pk)
        name = content_disposition_header("download" in request.GET, f"{found.name}-{part.attempt}-{node}.log")
        headers = {"Content-Disposition": name or "", "Content-Length": str(size), "Content-Security-Policy": SANDBOX}
        return StreamingHttpResponse(data, content_type="text/plain; charset=utf-8", headers=headers)
    response = HttpResponse(part.data, content_type="application/octet-stream")
    response["X-Start-Offset"] = str(part.next_offset - len(part.data))
    response["X-Next-Offset"] = str(part.next_offset)
    response["X-Log-Size"] = str(part.size)
    response["X-Log-Complete"] = "true" if part.complete else "false"
    response["X-Log-Missing"] = units.size(part.missing) if part.missing else ""
    response["X-Log-Cut"] = part.cut
    response["X-Log-More"] = "true" if len(part.data) == LOG_BYTES else "false"
    return response


@_log_page
def lines(request: PageRequest, run: str) -> HttpResponseBase:
    """How many line ends each complete block has, from the number `first` on; `more`: ask again for those behind."""
    job = _job(request, run)
    part = logs.lines(job.pk, whole_number(request.GET.get("first"))) if job else logs.Lines(0, [], False)
    return JsonResponse({"size": part.size, "block": logs.BLOCK, "counts": part.counts, "more": part.more})


@_log_page
def search(request: PageRequest, run: str) -> HttpResponseBase:
    """Offsets at which the text `q` is, from `offset` on; `next` is where to go on, null at the end."""
    job = _job(request, run)
    text, start = request.GET.get("q", ""), whole_number(request.GET.get("offset"))
    found = logs.search(job.pk, text, start) if job else logs.Matches([], None)
    return JsonResponse({"offsets": found.offsets, "next": found.following})


@_log_page
def marks(request: PageRequest, run: str) -> HttpResponseBase:
    """Records of `runner.spool` from their own `offset` on."""
    job = _job(request, run)
    data = logs.marks(job.pk, whole_number(request.GET.get("offset"))) if job else b""
    return HttpResponse(data, content_type="application/octet-stream")


def _job(request: PageRequest, run: str) -> Job | None:
    """The job whose log is asked for. Raises NotFound and Gone."""
    found = selectors.find_run(request.project, run)
    node, attempt = whole_number(request.GET.get("node")), whole_number(request.GET.get("attempt")) or None
    return selectors.log_job(found, node=node, attempt=attempt)


SHOWN = 200
"""Files on a run's page; the API and the command line have all."""
LEFT_SHOWN = 20


def section(run: Run, jobs: Sequence[Job]) -> dict[str, Any]:
    """The context of the section of files; empty for a run that left nothing."""
    row = RunArtifacts.objects.filter(pk=run.pk).first()
    jobs = [job for job in jobs if job.artifacts_left]
    if row is None and not jobs:
        return {}
    found = list(artifacts.of_run(run)[: SHOWN + 1]) if row else []
    left = [one for job in jobs for one in job.artifacts_left["left_out"]][:LEFT_SHOWN]
    number = sum(job.artifacts_left["number"] for job in jobs)
    return {
        "artifacts": {
            "row": row,
            "groups": [
                (logs[0].job, [(one, _query(one)) for one in logs])
                for logs in (list(same) for _job, same in groupby(found[:SHOWN], lambda one: one.job_id))
            ],
            "more": len(found) > SHOWN,
            "left": [(one["path"], one["size"], words.left_out(one["why"])) for one in left],
            "left_more": number - len(left),
        }
    }


def _query(artifact: Artifact) -> str:
    return urlencode({"path": artifact.path, "node": artifact.job.node, "attempt": artifact.job.attempt})


@project_page()
def artifact_page(request: PageRequest, run: str) -> HttpResponse:
    """One file: a picture, the first rows of a table, or the beginning of a text, rendered here."""
    found, artifact = _artifact(request, run)
    context = {"run": found, "artifact": artifact, "query": _query(artifact)}
    return render(request, "runs/artifact.html", context | {"preview": artifacts.preview(artifact)})


@project_page()
def artifact_file(request: PageRequest, run: str) -> HttpResponseBase:
    """Its bytes, to be saved; with `shown` as the picture that it is."""
    _run, artifact = _artifact(request, run)
    return file_response(
        request,
        partial(artifacts.read, artifact),
        size=artifact.size,
        sha256=artifact.sha256,
        name=artifact.name,
        image=artifacts.image_of(artifact) if "shown" in request.GET else "",
    )


def _artifact(request: PageRequest, run: str) -> tuple[Run, Artifact]:
    """The run, and the file that the query names. Raises NotFound."""
    found = selectors.find_run(request.project, run)
    node, attempt = whole_number(request.GET.get("node")), whole_number(request.GET.get("attempt")) or None
    return found, artifacts.find(found, request.GET.get("path", ""), node, attempt)
