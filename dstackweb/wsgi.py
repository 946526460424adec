"""The WSGI application that gunicorn serves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dstackweb.settings")

from django.core.handlers.exception import convert_exception_to_response
from django.core.handlers.wsgi import WSGIHandler
from django.core.wsgi import get_wsgi_application
from django.utils.module_loading import import_string

FOR_PROGRAMS = ("/api/", "/healthz", "/readyz", "/metrics")
MIDDLEWARE = (
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.locale.LocaleMiddleware",  # a thread otherwise keeps the language of the page it served before
    "django.middleware.common.CommonMiddleware",
)


class ProgramHandler(WSGIHandler):
    """Answers programs, which send a token: without sessions, forms and what else only pages need."""

    def load_middleware(self, is_async: bool = False) -> None:
        this: Any = self  # the stubs leave out what a handler is made of
        this._view_middleware, this._template_response_middleware, this._exception_middleware = [], [], []
        handler = convert_exception_to_response(this._get_response)
        for path in reversed(MIDDLEWARE):
            handler = convert_exception_to_response(import_string(path)(handler))
        this._middleware_chain = handler


for_pages = get_wsgi_application()
for_programs = ProgramHandler()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer a request: a program's or a browser's, by its path."""
    handler = for_programs if environ["PATH_INFO"].startswith(FOR_PROGRAMS) else for_pages
    return handler(environ, start_response)
