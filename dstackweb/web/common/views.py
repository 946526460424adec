"""What belongs to no room: the start page, icon, palette and errors; and that all pages are readable and compressed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from csp.middleware import CSPMiddleware
from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.core.exceptions import RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware
from django.shortcuts import redirect, render
from django.template.loader import render_to_string
from django.templatetags.static import static
from django.utils.translation import gettext as _, gettext_lazy
from django.views import defaults

from dstackweb.accounts.access import visible_projects
from dstackweb.lib.text import seen_page
from dstackweb.runs import rows
from dstackweb.runs.row_fields import RunPageRow
from dstackweb.runs.states import ENDED, WAITING, RunStatus
from dstackweb.web.common.pages import PageRequest, notice, project_page
from dstackweb.wording import statuses, units


@login_required
def home(request: HttpRequest) -> HttpResponse:
    """Redirect to the queue of the first project; without a project, a page on how to join one."""
    first = visible_projects(request.user).order_by("name").first()
    return redirect("web:queue", first.name) if first is not None else render(request, "common/no_project.html")


@project_page()
def project_home(request: PageRequest) -> HttpResponse:
    """Redirect to its queue, for those who shorten an address."""
    return redirect("web:queue", request.project.name)


@login_required
def health(request: HttpRequest) -> HttpResponse:
    """Redirect to the health page, which is the same in all projects but for its menu."""
    first = visible_projects(request.user).order_by("name").first()
    return redirect("web:health", first.name) if first is not None else redirect("home")


def favicon(request: HttpRequest) -> HttpResponse:
    """The icon for pages that name none, such as the admin's."""
    return redirect(static("favicon.svg"), permanent=False)


class CompressedPages(GZipMiddleware):
    """Compresses HTML only: a long queue is 60 KB of similar rows, and a tenth of that compressed.

    The API's ETags stay strong, and the bytes of logs are sent as they are. Responses get a random length on top, so
    that the compressed size reveals no secret of a page.
    """

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if not response.get("Content-Type", "").startswith("text/html"):
            return response
        return super().process_response(request, response)


class PagePolicy(CSPMiddleware):
    """Content-Security-Policy of pages: no program applies one, and each answer takes 60 µs to make it."""

    def __call__(self, request: HttpRequest) -> Any:
        if request.path_info.startswith(settings.PROGRAM_PATHS):
            return self.get_response(request)
        return super().__call__(request)


def readable_pages(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """Middleware: whatever a text on a page is from, no character of it is hidden or changes what stands around it."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        if isinstance(response, HttpResponse) and response.get("Content-Type", "").startswith("text/html"):
            response.content = seen_page(response.content)
        return response

    return respond


API = "/api/"


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    """400; 413 for a body that is too large."""
    if isinstance(exception, RequestDataTooBig):
        limit = _("a request can have at most %(size)s MiB") % {"size": settings.DATA_UPLOAD_MAX_MEMORY_SIZE >> 20}
        return refusal(request.path, 413, limit)
    if request.path.startswith(API):
        return _json(400, _("the request can't be read"))
    return render(request, "400.html", status=400)


def refusal(path: str, status: int, detail: str) -> HttpResponse:
    """The answer to a request that was not taken in: 413, or 503."""
    if path.startswith(API):
        return _json(status, detail)
    page = HttpResponse(render_to_string("413.html", {"later": status == 503}), status=status)
    return notice(page, _("Nothing was changed: %s.") % detail, "error")


def denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    if request.path.startswith(API):
        return _json(403, _("not allowed"))
    return defaults.permission_denied(request, exception)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if request.path.startswith(API):
        return _json(404, _("%s does not exist; see /api/v1/openapi.json") % request.path)
    return defaults.page_not_found(request, exception)


def server_error(request: HttpRequest) -> HttpResponse:
    """500; 503 where the database did not answer, which is usually over soon."""
    away = isinstance(sys.exc_info()[1], OperationalError | InterfaceError)
    status = 503 if away else 500
    if request.path.startswith(API):
        failed = _("Internal server error; details are in the server's log.")
        lost = _(
            "The database is not responding. Your change was made completely or not at all: check, then try again."
        )
        response: HttpResponse = _json(status, lost if away else failed)
    else:
        response = HttpResponse(render_to_string("500.html", {"away": away}), status=status)
    if away:
        response["Retry-After"] = "5"
    return response


def _json(status: int, detail: str) -> JsonResponse:
    return JsonResponse({"detail": detail}, status=status)


RUNS_OFFERED = 8


KEYS = (
    (("Ctrl+K",), gettext_lazy("Go to a page or run, stop, set a priority, submit again")),
    (("?",), gettext_lazy("Show these keys")),
    (("/",), gettext_lazy("Search the list")),
    (("g", "q"), gettext_lazy("Queue")),
    (("g", "r"), gettext_lazy("Runs")),
    (("g", "p"), gettext_lazy("Progress")),
    (("g", "g"), gettext_lazy("GPUs")),
    (("g", "u"), gettext_lazy("Utilization")),
    (("g", "o"), gettext_lazy("Offers")),
    (("g", "h"), gettext_lazy("Hosts")),
    (("g", "e"), gettext_lazy("Health")),
    (("j", "k"), gettext_lazy("On a row of the queue: next, previous row")),
    (("m",), gettext_lazy("On a row: its menu")),
    (("x",), gettext_lazy("On a row: select it")),
    (("Shift+J", "Shift+K"), gettext_lazy("On a row: move it down, up by one")),
    (("↑", "↓"), gettext_lazy("On a handle: move the row; Enter drops it, Esc puts it back")),
    (("Ctrl+Z",), gettext_lazy("Undo the last change")),
)
"""Keys to press one after the other, or, with a slash between them, alternatives."""


@project_page()
def palette(request: PageRequest) -> HttpResponse:
    """Both dialogs, as a fragment."""
    return render(request, "common/palette.html", {"keys": KEYS})


@project_page()
def palette_runs(request: PageRequest) -> HttpResponse:
    """The newest runs whose name contains `q`, of those that the reader may do `verb` to; without one all of them."""
    verb, text = request.GET.get("verb", ""), request.GET.get("q", "").strip()
    open_ones = [status for status in RunStatus if status not in ENDED]
    wanted = {"why": [RunStatus.SUBMITTED], "stop": open_ones, "priority": open_ones}.get(verb, [])
    own = verb in ("stop", "priority") and not request.may["manager"]
    found, _next = rows.newest_rows(
        request.project,
        statuses=[status.value for status in wanted],
        user=request.user.username if own else "",
        text=text,
        limit=RUNS_OFFERED,
        kind=RunPageRow,
    )
    return JsonResponse({"runs": [_cell(row) for row in found]})


def _cell(row: RunPageRow) -> dict[str, Any]:
    waits = row.status in WAITING
    question = _("Cancel %s? It will be marked terminated.") if waits else _("Stop %s? Its processes can exit first.")
    return {
        "id": str(row.id),
        "name": row.name,
        "priority": row.priority,
        "about": f"{statuses.status(row.status)} · {row.user} · {units.needs(row.spec)}",
        "question": question % row.name,
        "yes": _("Cancel run") if waits else _("Stop run"),
    }
