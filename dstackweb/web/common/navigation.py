"""The navigation of every page: the pages that this reader may open."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext_lazy as _

from dstackweb.accounts.access import allows, project_for, visible_projects
from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import DomainError
from dstackweb.runs import selectors


class Page(NamedTuple):
    """A page of a project. `view` is its URL's name; a page without a URL isn't shown."""

    key: str
    view: str
    label: Any
    icon: str
    at_least: str = "viewer"


PAGES = (
    Page("queue", "web:queue", _("Queue"), "queue"),
    Page("runs", "web:runs", _("Runs"), "runs"),
    Page("progress", "web:progress", _("Progress"), "progress"),
    Page("gpus", "web:gpus", _("GPUs"), "gpu"),
    Page("utilization", "web:utilization", _("Utilization"), "gauge"),
    Page("offers", "web:offers", _("Offers"), "offers"),
    Page("machines", "web:machines", _("Cloud instances"), "machines"),
    Page("hosts", "web:hosts", _("Hosts"), "hosts"),
    Page("profiles", "web:profiles", _("Profiles"), "profiles"),
    Page("members", "members", _("Members"), "members"),
    Page("secrets", "secrets", _("Secrets"), "secrets", "member"),
    Page("health", "web:health", _("Health"), "health"),
)


def sidebar(request: HttpRequest, project: Project | None, waiting: int | None = None) -> dict[str, Any]:
    """What `common/sidebar.html` shows this reader, inside `project` if there is one; `waiting` where known."""
    user = request.user
    if not isinstance(user, User):
        return {"user": user, "items": []}
    projects = list(visible_projects(user).order_by("name"))
    if project is None and projects:
        project = projects[0]
    return {
        "user": user,
        "project": project,
        "projects": projects,
        "items": _items(request, user, project) if project else [],
        "waiting": waiting if waiting is not None else _waiting(project),
        "account_items": _account_items(user),
        "sign_out_url": _url("logout"),
    }


def _waiting(project: Project | None) -> int:
    return selectors.counts(project)["submitted"] if project else 0


def _items(request: HttpRequest, user: User, project: Project) -> list[dict[str, Any]]:
    try:
        role = getattr(request, "role", None) or project_for(user, project.name)[1]
    except DomainError:  # they left the project while the page was rendered
        return []
    items = []
    for page in PAGES:
        url = _url(page.view, project.name)
        if url and allows(role, page.at_least):
            active = request.path.startswith(url)
            items.append({"key": page.key, "url": url, "label": page.label, "icon": page.icon, "active": active})
    return items


def _account_items(user: User) -> list[dict[str, Any]]:
    items = [{"url": _url("tokens"), "label": _("API tokens"), "icon": "token"}]
    if user.is_staff:
        items.append({"url": _url("admin:index"), "label": _("Admin"), "icon": "admin"})
    return [item for item in items if item["url"]]


def _url(view: str, *args: str) -> str:
    """The address of a page, or empty if the deployment doesn't have it."""
    try:
        return reverse(view, args=args)
    except NoReverseMatch:
        return ""
