"""What a run's jobs left: its section on the run's page, one file as a page, and downloads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.http import HttpResponse, HttpResponseBase
from django.shortcuts import render

from dstackweb.lib.downloads import file_response
from dstackweb.lib.forms import whole_number
from dstackweb.runs import artifact_previews, artifacts, selectors
from dstackweb.runs.models import Artifact, Job, Run, RunArtifacts
from dstackweb.web.common.pages import PageRequest, project_page
from dstackweb.wording import artifacts as words

SHOWN = 200
"""Files on a run's page; the API and the command line have all."""
LEFT_SHOWN = 20


class FileLine(NamedTuple):
    """A file, with the query of its addresses."""

    artifact: Artifact
    query: str


class JobFiles(NamedTuple):
    """The files of one job."""

    job: Job
    lines: list[FileLine]


class LeftLine(NamedTuple):
    """A file that was not kept."""

    job: Job
    path: str
    size: int | None
    why: str


def section(run: Run, jobs: Sequence[Job]) -> dict[str, Any]:
    """The context of the section; empty for a run that left nothing."""
    row = RunArtifacts.objects.filter(pk=run.pk).first()
    jobs = [job for job in jobs if job.artifacts_left]
    if row is None and not jobs:
        return {}
    found = list(artifacts.of_run(run)[: SHOWN + 1]) if row else []
    left = [
        LeftLine(job, one["path"], one["size"], words.left_out(one["why"]))
        for job in jobs
        for one in job.artifacts_left["left_out"]
    ]
    number = sum(job.artifacts_left["number"] for job in jobs)
    return {
        "artifacts": {
            "row": row,
            "groups": [
                JobFiles(files[0].job, [FileLine(one, _query(one)) for one in files])
                for files in (list(same) for _job, same in groupby(found[:SHOWN], lambda one: one.job_id))
            ],
            "more": len(found) > SHOWN,
            "left": left[:LEFT_SHOWN],
            "left_more": number - len(left[:LEFT_SHOWN]),
        }
    }


def _query(artifact: Artifact) -> str:
    return urlencode({"path": artifact.path, "node": artifact.job.node, "attempt": artifact.job.attempt})


@project_page()
def artifact_page(request: PageRequest, run: str) -> HttpResponse:
    """One file: a picture, the first rows of a table, or the beginning of a text, rendered here."""
    found, artifact = _artifact(request, run)
    context = {"run": found, "artifact": artifact, "query": _query(artifact)}
    return render(request, "runs/artifact.html", context | {"preview": artifact_previews.preview(artifact)})


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
        image=artifact_previews.image_of(artifact) if "shown" in request.GET else "",
    )


def _artifact(request: PageRequest, run: str) -> tuple[Run, Artifact]:
    """The run, and the file that the query names. Raises NotFound."""
    found = selectors.find_run(request.project, run)
    node, attempt = whole_number(request.GET.get("node")), whole_number(request.GET.get("attempt")) or None
    return found, artifacts.find(found, request.GET.get("path", ""), node, attempt)
