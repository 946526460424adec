"""Compression of pages: a long queue is 60 KB of similar rows, and a tenth of that compressed."""

from __future__ import annotations

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware


class CompressedPages(GZipMiddleware):
    """Compresses HTML and nothing else: the API's ETags stay strong, and the bytes of logs what they are.

    Answers get a random length on top, so that nobody reads a secret of a page from how well it was compressed.
    """

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if not response.get("Content-Type", "").startswith("text/html"):
            return response
        return super().process_response(request, response)
