"""The WSGI application that gunicorn serves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dstackweb.settings")

import django
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import get_resolver

from dstackweb.lib import latency, logs, proxies, request_locks
from dstackweb.web_limits import limit_parts


class ObservedHandler(WSGIHandler):
    """Gives each request an id and counts how long it takes."""

    def get_response(self, request: HttpRequest) -> HttpResponseBase:
        began = time.perf_counter()
        request_id = logs.take(request.META.get("HTTP_X_REQUEST_ID"))
        response = super().get_response(request)
        response[logs.HEADER] = request_id
        match = request.resolver_match
        took_s = time.perf_counter() - began
        latency.observe(match.route if match else None, request.method, response.status_code, took_s)
        return response


django.setup(set_prefix=False)
request_locks.limit(connections.databases["default"])
handler = ObservedHandler()
# A program that cannot be loaded fails now instead of with its first request.
_ = get_resolver().url_patterns


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer a request."""
    proxies.see_through(environ, settings.DSTACKWEB_TRUSTED_PROXIES)
    limit_parts(environ)
    return handler(environ, start_response)
