"""The page of one host: its GPUs, the jobs that run there or did lately, what happened to it, and its drain switch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.accounts.access import visible_projects
from dstackweb.backends.models import Host
from dstackweb.gpus.models import HostSampling
from dstackweb.lib.errors import NotFound
from dstackweb.runs import holds, selectors
from dstackweb.runs.models import Job
from dstackweb.runs.states import JOB_ACTIVE
from dstackweb.scheduler.hosts.selectors import Listed, listed
from dstackweb.web.common.pages import PageRequest, polled, project_page
from dstackweb.web.gpus import gpu_rows
from dstackweb.web.hosts import list_views

POLL_S = 5
JOBS_SHOWN = 30
"""Jobs that have ended; of those that go on, all."""
EVENTS_SHOWN = 20


@dataclass(frozen=True)
class JobLine:
    """A job on the host; that of a run in a project which the reader doesn't see is nameless."""

    of: Job
    hidden: bool


@project_page()
def host_page(request: PageRequest, host: str) -> HttpResponse:
    """One host; also what polls of its page get."""
    now, found = timezone.now(), _found(host)
    seen = {project.pk for project in visible_projects(request.user)}
    known = list_views.Known(seen, holds.held(run.pk for _gpu, run in found.gpus if run))
    line = list_views.host_line(found, known)
    gpus = gpu_rows.of_hosts([found], seen, now)
    look = HostSampling.objects.filter(host=found.host).first()
    running, ended = _jobs(found.host)
    stamp = (
        line.stamp, [gpu.stamp for gpu in gpus], (look.at, look.library, look.error) if look else None,
        [(job.pk, job.status) for job in [*running, *ended]],
    )  # fmt: skip
    version = hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]

    def context() -> dict[str, Any]:
        return {
            "line": line,
            "host": found.host,
            "listed": found,
            "gpus": gpus,
            "look": look,
            "running": [JobLine(job, job.run.project_id not in seen) for job in running],
            "ended": [JobLine(job, job.run.project_id not in seen) for job in ended],
            "may_care": request.user.is_superuser,
            "can_edit": request.user.is_staff,
            "here": True,
            "gpus_url": reverse("web:gpus", args=[request.project.name]),
            "poll_s": POLL_S,
            "waiting": selectors.counts(request.project)["submitted"],
        }

    return polled(request, "hosts/host.html", "hosts/host_body.html", version, context)


def _found(name: str) -> Listed:
    found = listed(name, events=EVENTS_SHOWN)
    if not found:
        raise NotFound(_("no host is called %s") % name)
    return found[0]


def _jobs(host: Host) -> tuple[list[Job], list[Job]]:
    """Those that go on, and those that ended last."""
    jobs = Job.objects.filter(host=host).select_related("run__project", "run__user")
    running = jobs.filter(status__in=JOB_ACTIVE).order_by("placed_at", "pk")
    ended = jobs.exclude(status__in=JOB_ACTIVE).order_by("-ended_at", "pk")[:JOBS_SHOWN]
    return list(running), list(ended)
