"""How large the body of a request may be, by its address, and of how many parts a form: decided before it is read."""

from __future__ import annotations

import re
from typing import Any

from django.core.exceptions import TooManyFieldsSent
from django.http import HttpRequest
from django.utils import translation
from django.utils.http import parse_header_parameters
from django.utils.translation import get_language_from_request, gettext as _
from waitress.utilities import Error

from dstackweb import settings

USUAL = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
SMALL = 64 * 1024
"""Of forms that anyone may send. Requests up to it are taken however much else arrives."""
ARCHIVE = (settings.DSTACKWEB_ARCHIVE_LIMIT_MB + 1) << 20
"""Of uploads of code, with the form around it."""
AT_ONCE = max(8 * ARCHIVE, 256 << 20)
"""Bytes of requests that a process holds until they are answered; then it takes small ones only."""

PARTS = settings.DATA_UPLOAD_MAX_NUMBER_FIELDS + 200
"""Of a form: its fields, and files."""

LIMITS = (
    (re.compile(r"/api/v1/projects/[^/]+/archives/[^/]+"), ARCHIVE),
    (re.compile(r"/p/[^/]+/submit/(plan/)?"), ARCHIVE),
    (re.compile(r"/(login|logout|invite|password)(/.*)?"), SMALL),
)
"""The limits of addresses in bytes; others have `USUAL`."""


def limit_of(path: str) -> int:
    return next((limit for pattern, limit in LIMITS if pattern.fullmatch(path)), USUAL)


class Form:
    """The body of a form in parts, each of which costs time, however small. Django counts those alone that have a name.

    It is read before anyone is known: the protection against forged requests looks for its token there. Raises
    TooManyFieldsSent.
    """

    def __init__(self, body: Any, boundary: str) -> None:
        self._body, self._boundary, self._left = body, b"--" + boundary.encode("latin-1", "replace"), PARTS

    def read(self, size: int = -1) -> bytes:
        return self._counted(self._body.read(size))

    def readline(self, size: int = -1) -> bytes:
        return self._counted(self._body.readline(size))

    def _counted(self, data: bytes) -> bytes:
        self._left -= data.count(self._boundary)
        if self._left < 0:
            raise TooManyFieldsSent(f"a form has more than {PARTS} parts")
        return data


def limit_parts(environ: dict[str, Any]) -> None:
    """Have a request's form be refused while it is read, if it has too many parts."""
    try:
        kind, more = parse_header_parameters(environ.get("CONTENT_TYPE", ""))
    except ValueError:  # Django refuses it too
        return
    if kind == "multipart/form-data" and more.get("boundary"):
        environ["wsgi.input"] = Form(environ["wsgi.input"], more["boundary"])


class BodyTooLarge(Error):
    """An answer that the application is not asked for: its body is larger than its address allows.

    `languages` is the request's `Accept-Language`.
    """

    code = 413
    reason = "Content Too Large"
    retry_after = 0

    def __init__(self, path: str, languages: str = "") -> None:
        super().__init__("too large")
        self.path, self.languages = path, languages

    def detail(self) -> str:
        return _("a request to this address can have at most %s") % _size(limit_of(self.path))

    def to_response(self, ident: str | None = None) -> tuple[str, list[tuple[str, str]], bytes]:
        """Status, headers and body: JSON below /api/, else a page."""
        from dstackweb.web.common.views import refusal  # Django is loaded by now

        request = HttpRequest()
        request.META["HTTP_ACCEPT_LANGUAGE"] = self.languages
        with translation.override(get_language_from_request(request)):
            answer = refusal(self.path, self.code, self.detail())
        headers = list(answer.headers.items())
        if self.retry_after:
            headers.append(("Retry-After", str(self.retry_after)))
        return f"{self.code} {self.reason}", headers, answer.content


class TooMuchAtOnce(BodyTooLarge):
    """The process has too much to hold already."""

    code = 503
    reason = "Service Unavailable"
    retry_after = 5

    def detail(self) -> str:
        return _("too many uploads at once; try again in a few seconds")


def _size(limit: int) -> str:
    return f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
