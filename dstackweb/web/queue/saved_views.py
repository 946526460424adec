"""Filters and columns of the queue page under a name: a person's own, and those managers share with all members."""

from __future__ import annotations

from django.http import HttpResponseBase
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from dstackweb.accounts import saved_views
from dstackweb.accounts.access import need_role
from dstackweb.accounts.models import Role
from dstackweb.web.common.pages import PageRequest, done, project_page, queue_url, yes_or_no
from dstackweb.wording.queue_filters import worth_saving


@require_POST
@project_page()
def save(request: PageRequest, queue: str) -> HttpResponseBase:
    """Save what the page shows. Back to the page, with these filters."""
    query = worth_saving(request.POST.get("query", ""))
    shared = request.POST.get("shared") == "yes"
    if shared:
        need_role(request.role, request.project.name, Role.MANAGER)
    view = saved_views.save(request.project, None if shared else request.user, request.POST.get("name", ""), query)
    return done(request, _("View %s saved") % view.name, f"{queue_url(request.project, queue)}?{view.query}")


@require_POST
@project_page()
def make_default(request: PageRequest, queue: str, view: int) -> HttpResponseBase:
    """Have the reader's queue pages begin with a view, or no longer (`default` is `no`)."""
    is_chosen = yes_or_no(request, "default")
    found = saved_views.set_default(request.project, view, request.user, chosen=is_chosen)
    text = _("The queue opens with %s") if is_chosen else _("The queue no longer opens with %s")
    return done(request, text % found.name, f"{queue_url(request.project, queue)}?{found.query}")


@require_POST
@project_page()
def delete(request: PageRequest, queue: str, view: int) -> HttpResponseBase:
    deleted = saved_views.delete(request.project, view, request.user, shared=request.may["manager"])
    return done(request, _("View %s deleted") % deleted.name, queue_url(request.project, queue))
