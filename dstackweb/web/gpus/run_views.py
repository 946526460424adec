"""The GPUs of a run: the part of its page that is asked for again with each sample, and keeping it from its policy."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from dstackweb.gpus.policy import exemptions
from dstackweb.runs import selectors
from dstackweb.web.common.pages import PageRequest, done, notice, polled, project_page
from dstackweb.web.gpus.run_panel import Asked, Panel
from dstackweb.web.runs import rows as lists
from dstackweb.wording import units


@project_page()
def run_gpus(request: PageRequest, run: str) -> HttpResponse:
    """What polls of the panel get; whoever opens its address is led to the run's page."""
    found = selectors.find_run(request.project, run)
    if not request.htmx:
        return redirect(reverse("web:run", args=[request.project.name, run]) + Asked.of(request).query() + "#run-gpus")
    panel = Panel(found, selectors.jobs_of(found), Asked.of(request), timezone.now())

    def context() -> dict[str, Any]:
        return {"run": found, **panel.context(lists.may_change(found, request.user, request.role))}

    return polled(request, "gpus/run_gpus.html", "gpus/run_gpus.html", panel.version, context)


@require_POST
@project_page("member")
def keep(request: PageRequest, run: str) -> HttpResponse:
    """Keep a run from being stopped by its policy, for the project's usual time."""
    found = selectors.find_run(request.project, run)
    made = exemptions.keep(found, request.user, request.role, request.POST.get("reason", ""))
    text = _("%(run)s is kept for %(more)s") % {
        "run": found.name,
        "more": units.duration((made.until - made.at).total_seconds()),
    }
    if request.htmx:
        return notice(HttpResponse(status=204), text)
    return done(request, text, reverse("web:run", args=[request.project.name, run]))
