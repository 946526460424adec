"""The WSGI application that gunicorn serves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dstackweb.settings")

import django
from django.conf import settings
from django.core.handlers.exception import convert_exception_to_response
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import get_resolver
from django.utils.module_loading import import_string

from dstackweb.lib import latency, logs, proxies
from dstackweb.web_limits import limit_parts
from dstackweb.web_turns import FOR_PROGRAMS

MIDDLEWARE = (
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.locale.LocaleMiddleware",  # a thread otherwise keeps the language of the page it served before
    "django.middleware.common.CommonMiddleware",
    "dstackweb.audit.recorder.middleware",
)


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


class ProgramHandler(ObservedHandler):
    """Answers programs, which send a token: without sessions, forms and what else only pages need."""

    def load_middleware(self, is_async: bool = False) -> None:
        this: Any = self  # the stubs leave out what a handler is made of
        this._view_middleware, this._template_response_middleware, this._exception_middleware = [], [], []
        handler = convert_exception_to_response(this._get_response)
        for path in reversed(MIDDLEWARE):
            handler = convert_exception_to_response(import_string(path)(handler))
        this._middleware_chain = handler


django.setup(set_prefix=False)
for_pages = ObservedHandler()
for_programs = ProgramHandler()
# A program that cannot be loaded fails now instead of with its first request.
_ = get_resolver().url_patterns


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer a request: a program's or a browser's, by its path."""
    proxies.see_through(environ, settings.DSTACKWEB_TRUSTED_PROXIES)
    if environ["PATH_INFO"].startswith(FOR_PROGRAMS):
        return for_programs(environ, start_response)
    limit_parts(environ)
    return for_pages(environ, start_response)
