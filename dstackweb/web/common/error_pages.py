"""The page for what no view expected."""

from __future__ import annotations

import sys

from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string


def server_error(request: HttpRequest) -> HttpResponse:
    """500; 503 where the database did not answer, which is nobody's fault here and over soon."""
    away = isinstance(sys.exc_info()[1], OperationalError | InterfaceError)
    response = HttpResponse(render_to_string("500.html", {"away": away}), status=503 if away else 500)
    if away:
        response["Retry-After"] = "5"
    return response
