"""How to connect to a dev environment, a hold or a service: panels on the run's page, and the way to its own pages."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from dstackweb.lib.errors import Forbidden
from dstackweb.runs import connections, selectors
from dstackweb.runs.models import Run
from dstackweb.runs.service_codes import ServiceState
from dstackweb.runs.visits import ENTER, may_open, ticket
from dstackweb.web.common.pages import PageRequest, fingerprint, project_page
from dstackweb.web.runs.rows import TONES
from dstackweb.wording import gateway


@require_safe
@project_page("member")
def open_page(request: PageRequest, run: str) -> HttpResponse:
    """To the run's own pages, with a ticket that the gateway takes once.

    The address is made from settings: no page can have a ticket sent elsewhere.
    """
    found = selectors.find_run(request.project, run)
    if not may_open(request.user, found):
        raise Forbidden(
            _("run %(run)s belongs to %(user)s: only they or a manager can open it")
            % {"run": found.name, "user": found.user.get_username()}
        )
    connection = connections.connection_to(found)
    if connections.service_of(found) is None and (connection is None or not connection.opens):
        messages.error(request, _("%(run)s has no pages to open now.") % {"run": found.name})
        return redirect("web:run", request.project.name, found.name)
    response = HttpResponseRedirect(f"{connections.origin_of(found)}{ENTER}?ticket={ticket(request.user, found)}")
    response["Referrer-Policy"], response["Cache-Control"] = "no-referrer", "no-store"
    return response


def of_run(run: Run, may_change: bool, keys: bool) -> dict[str, Any]:
    """The panel's values: for those who may connect alone. `keys`: whether the reader has an SSH key."""
    connection = connections.connection_to(run) if may_change else None
    if connection is None:
        return {}
    stops_at = None
    if connection.stops_s is not None:
        stops_at = timezone.now() + dt.timedelta(seconds=connection.stops_s)
    return {
        "connection": connection,
        "stops_at": stops_at,
        "no_key": bool(settings.DSTACKWEB_SSH_PORT) and not keys,
        "ends_at": run.started_at + dt.timedelta(seconds=run.limit_s) if run.started_at and run.limit_s else None,
    }


def of_service(run: Run, may_call: bool) -> dict[str, Any]:
    """The values of a service's panel. `may_call`: whether the reader may use it."""
    service = connections.service_of(run)
    if service is None:
        return {}
    health, left = service.health, service.use.stops_s
    return {
        "service": service,
        "may_call": may_call,
        "health": gateway.service_state(health.state),
        "tone": TONES[health.state],
        "is_unknown": health.state == ServiceState.UNKNOWN,
        "failure": gateway.check_failure(health.error, health.error_data),
        "stops_at": None if left is None else timezone.now() + dt.timedelta(seconds=left),
        "ends_at": run.started_at + dt.timedelta(seconds=run.limit_s) if run.started_at and run.limit_s else None,
    }


def stamp(run: Run) -> str:
    """What changes with the panel, for the version of the page."""
    service = connections.service_of(run)
    if service is not None:
        used, left = service.use.used_at, service.use.stops_s
        shown = service.health.state, service.health.error, service.health.error_data
        return "." + fingerprint((shown, used and used.replace(second=0, microsecond=0), left and left // 60))
    found = connections.connection_to(run)
    if found is None:
        return ""
    return f".{found.ready:d}.{found.stops_s // 60 if found.stops_s is not None else ''}"
