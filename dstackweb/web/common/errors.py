"""Django's handlers of errors: a page for people; JSON below /api/, as the API's own errors."""

from __future__ import annotations

import sys

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from django.views import defaults

from dstackweb.web.common.pages import notice

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
