"""The start page: a member lands on a queue."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.templatetags.static import static

from dstackweb.accounts.access import visible_projects


@login_required
def home(request: HttpRequest) -> HttpResponse:
    """The queue of the first project; who has none is told how to get into one."""
    first = visible_projects(request.user).order_by("name").first()
    if first is None:
        return render(request, "common/no_project.html")
    return redirect("web:queue", first.name)


def favicon(request: HttpRequest) -> HttpResponse:
    """What browsers ask for on pages that name no icon, such as the admin's."""
    return redirect(static("favicon.svg"), permanent=False)
