"""Actions of deployment admins on hosts: drain, remove, add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from django.conf import settings
from django.http import HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from dstackweb.backends.hosts import inventory, joining
from dstackweb.lib.errors import Forbidden
from dstackweb.lib.network import is_exposed
from dstackweb.web.common.pages import PageRequest, done, project_page
from dstackweb.web.hosts.views import hosts_page_with

P = ParamSpec("P")


def _admins_only(
    view: Callable[Concatenate[PageRequest, P], HttpResponse],
) -> Callable[Concatenate[PageRequest, P], HttpResponse]:
    def inner(request: PageRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if not request.user.is_superuser:
            raise Forbidden(_("Only deployment admins can manage hosts."))
        return view(request, *args, **kwargs)

    return inner


@project_page()
@require_POST
@_admins_only
def drain(request: PageRequest, host: str) -> HttpResponse:
    """Drain a host, or (`on=no`) undrain it, which also cancels its removal.

    Goes back to the list or, with `back=host`, to the host's page.
    """
    found, on = inventory.find(host), request.POST.get("on") != "no"
    inventory.set_draining(found, request.user, on)
    text = _("%s is draining: it gets no new jobs, running jobs continue.") if on else _("%s accepts jobs again.")
    to = reverse("web:host", args=[request.project.name, found.name]) if request.POST.get("back") == "host" else None
    return _back(request, text % found.name, to)


@project_page()
@require_POST
@_admins_only
def leave(request: PageRequest, host: str) -> HttpResponse:
    """Remove a host once no job uses it."""
    found = inventory.find(host)
    inventory.leave(found, request.user)
    return _back(request, _("%s gets no new jobs, and will be removed once its jobs have ended.") % found.name)


@project_page()
@require_POST
@_admins_only
def invite(request: PageRequest) -> HttpResponse:
    """Create a join command. Its token is only in this response."""
    made, token = joining.invite(request.user)
    url = settings.DSTACKWEB_PUBLIC_URL or request.build_absolute_uri("/").rstrip("/")
    insecure = " --insecure" if is_exposed(url) else ""
    new: dict[str, Any] = {
        "command": f"dstackweb host join {url} --token {token}{insecure}",
        "until": made.expires_at,
    }
    return hosts_page_with(request, new_invite=new)


@project_page()
@require_POST
@_admins_only
def withdraw(request: PageRequest, invite_id: int) -> HttpResponse:
    """Revoke a join command."""
    joining.withdraw(invite_id)
    return _back(request, _("Join command revoked."))


def _back(request: PageRequest, text: str, to: str | None = None) -> HttpResponse:
    return done(request, text, to or reverse("web:hosts", args=[request.project.name]))
