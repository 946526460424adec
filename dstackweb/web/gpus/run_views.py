"""The GPU panel of a run's page, which is polled, and exempting the run from its policy."""

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
from dstackweb.web.gpus.run_panel import Panel, PanelFilters
from dstackweb.web.runs import rows as lists
from dstackweb.wording import units


@project_page()
def run_gpus(request: PageRequest, run: str) -> HttpResponse:
    """The polled panel; opened directly, it redirects to the run's page."""
    found, filters = selectors.find_run(request.project, run), PanelFilters.of(request)
    if not request.htmx:
        return redirect(reverse("web:run", args=[request.project.name, run]) + filters.query() + "#run-gpus")
    panel = Panel(found, selectors.jobs_of(found), filters, timezone.now())

    def context() -> dict[str, Any]:
        return {"run": found, **panel.context(lists.may_change(found, request.user, request.role))}

    return polled(request, "gpus/run_gpus.html", "gpus/run_gpus.html", panel.version, context)


@require_POST
@project_page("member")
def keep(request: PageRequest, run: str) -> HttpResponse:
    """Keep a run from being stopped by its policy, for the project's usual time."""
    found = selectors.find_run(request.project, run)
    exemption = exemptions.exempt(found, request.user, request.role, request.POST.get("reason", ""))
    text = _("%(run)s will not be stopped for %(duration)s") % {
        "run": found.name,
        "duration": units.duration((exemption.until - exemption.at).total_seconds()),
    }
    if request.htmx:
        return notice(HttpResponse(status=204), text)
    return done(request, text, reverse("web:run", args=[request.project.name, run]))
