"""The start page, the icon, and what holds for all pages: they are readable, and compressed."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware
from django.shortcuts import redirect, render
from django.templatetags.static import static

from dstackweb.accounts.access import visible_projects
from dstackweb.lib.text import seen_page
from dstackweb.web.common.pages import PageRequest, project_page


@login_required
def home(request: HttpRequest) -> HttpResponse:
    """Redirect to the queue of the first project; without a project, a page on how to join one."""
    first = visible_projects(request.user).order_by("name").first()
    if first is None:
        return render(request, "common/no_project.html")
    return redirect("web:queue", first.name)


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


def readable_pages(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[..., HttpResponseBase]:
    """Middleware: whatever a text on a page is from, no character of it is hidden or changes what stands around it."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        if isinstance(response, HttpResponse) and response.get("Content-Type", "").startswith("text/html"):
            response.content = seen_page(response.content)
        return response

    return respond
