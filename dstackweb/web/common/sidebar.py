"""The sidebar: the pages of a project by group, and the areas of the admin site."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.http import HttpRequest
from django.template.context import RequestContext
from django.urls import reverse
from django.utils.translation import gettext_lazy

from dstackweb.accounts.access import allows, project_for
from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import DomainError


class SidebarPage(NamedTuple):
    """A page of a project. `view` is its URL's name; `views` belong to it, though their URLs are not below its own."""

    key: str
    view: str
    label: Any
    icon: str
    at_least: str = "viewer"
    views: tuple[str, ...] = ()


class SidebarGroup(NamedTuple):
    """Pages that stand together in the sidebar; `key` is what browsers remember of a closed one."""

    key: str
    label: Any
    pages: tuple[SidebarPage, ...]


GROUPS = (
    SidebarGroup(
        "work",
        gettext_lazy("Work"),
        (
            SidebarPage(
                "queue", "web:queue", gettext_lazy("Queue"), "queue", views=("web:queue", "web:queue-settings")
            ),
            SidebarPage("runs", "web:runs", gettext_lazy("Runs"), "runs", views=("web:compare",)),
            SidebarPage("progress", "web:progress", gettext_lazy("Progress"), "progress"),
            SidebarPage("history", "web:history", gettext_lazy("History"), "clock", views=("web:queue-history",)),
        ),
    ),
    SidebarGroup(
        "capacity",
        gettext_lazy("Capacity"),
        (
            SidebarPage("gpus", "web:gpus", gettext_lazy("GPUs"), "gpu"),
            SidebarPage("utilization", "web:utilization", gettext_lazy("Utilization"), "gauge"),
            SidebarPage("hosts", "web:hosts", gettext_lazy("Hosts"), "hosts"),
            SidebarPage("offers", "web:offers", gettext_lazy("Offers"), "offers"),
            SidebarPage("instances", "web:instances", gettext_lazy("Cloud instances"), "instances"),
        ),
    ),
    SidebarGroup(
        "team",
        gettext_lazy("Team"),
        (
            SidebarPage("usage", "web:usage", gettext_lazy("Usage"), "coin"),
            SidebarPage("members", "members", gettext_lazy("Members"), "members"),
            SidebarPage("profiles", "web:profiles", gettext_lazy("Profiles"), "profiles"),
            SidebarPage("secrets", "secrets", gettext_lazy("Secrets"), "secrets", "member"),
            SidebarPage("notifications", "project-notifications", gettext_lazy("Notifications"), "bell", "manager"),
        ),
    ),
    SidebarGroup(
        "system",
        gettext_lazy("System"),
        (
            SidebarPage("health", "web:health", gettext_lazy("Health"), "health"),
            SidebarPage("audit", "web:audit", gettext_lazy("Audit log"), "file", "admin"),
        ),
    ),
)
CLOSED = "closed"
"""The cookie with the keys of the groups that the reader closed, with dots between them."""


class SidebarLink(NamedTuple):
    """A page of the project with its URL, and whether it or one below it is open."""

    page: SidebarPage
    url: str
    active: bool


def groups(request: HttpRequest, user: User, project: Project) -> list[tuple[SidebarGroup, list[SidebarLink], bool]]:
    """What the reader may open, and which groups are open: that of this page always."""
    try:
        role = getattr(request, "role", None) or project_for(user, project.name)[1]
    except DomainError:  # they left the project while the page was rendered
        return []
    closed = request.COOKIES.get(CLOSED, "").split(".")
    found = []
    for group in GROUPS:
        links = [_link(request, page, project) for page in group.pages if allows(role, page.at_least)]
        found.append((group, links, group.key not in closed or any(link.active for link in links)))
    return found


def _link(request: HttpRequest, page: SidebarPage, project: Project) -> SidebarLink:
    url = reverse(page.view, args=[project.name])
    view = request.resolver_match and request.resolver_match.view_name
    return SidebarLink(page, url, view in page.views or request.path.startswith(url))


def admin_areas(context: RequestContext) -> list[tuple[dict[str, Any], bool, list[tuple[dict[str, Any], bool]]]]:
    """On the admin site its areas and models, each with whether it is open; elsewhere nothing."""
    found, path = context.get("available_apps") or [], context["request"].path
    closed = context["request"].COOKIES.get(CLOSED, "").split(".")
    areas = []
    for area in found:
        models = [(model, bool(model["admin_url"]) and path.startswith(model["admin_url"])) for model in area["models"]]
        is_open = any(active for _model, active in models)
        areas.append((area, is_open or not (area["fixed"] or f"admin_{area['app_label']}" in closed), models))
    return areas
