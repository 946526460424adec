"""What deployment admins do on the hosts page: drain, have one leave, and let another machine join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from django.conf import settings
from django.http import HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from dstackweb.backends.hosts import care, joining
from dstackweb.lib.addresses import is_exposed
from dstackweb.lib.errors import Forbidden
from dstackweb.web.common.pages import PageRequest, done, project_page
from dstackweb.web.hosts.views import hosts_page_with

P = ParamSpec("P")


def _admins_alone(
    view: Callable[Concatenate[PageRequest, P], HttpResponse],
) -> Callable[Concatenate[PageRequest, P], HttpResponse]:
    def inner(request: PageRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if not request.user.is_superuser:
            raise Forbidden(_("Only admins of the deployment look after its hosts."))
        return view(request, *args, **kwargs)

    return inner


@project_page()
@require_POST
@_admins_alone
def drain(request: PageRequest, host: str) -> HttpResponse:
    """Take no new jobs, or (`on=no`) take them again, which also calls off that it leaves. Then back where it was
    asked for: to the list, or (`back=host`) to the host's own page."""
    found, on = care.find(host), request.POST.get("on") != "no"
    care.set_draining(found, request.user, on)
    text = _("%s takes no new jobs; those that run go on.") if on else _("%s takes jobs again.")
    to = reverse("web:host", args=[request.project.name, found.name]) if request.POST.get("back") == "host" else None
    return _back(request, text % found.name, to)


@project_page()
@require_POST
@_admins_alone
def leave(request: PageRequest, host: str) -> HttpResponse:
    """Gone once it holds nothing."""
    found = care.find(host)
    care.leave(found, request.user)
    return _back(request, _("%s takes no new jobs, and leaves once it holds nothing.") % found.name)


@project_page()
@require_POST
@_admins_alone
def invite(request: PageRequest) -> HttpResponse:
    """The command for another machine; its token is in this answer and nowhere else."""
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
@_admins_alone
def withdraw(request: PageRequest, invite_id: int) -> HttpResponse:
    joining.withdraw(invite_id)
    return _back(request, _("The join token is withdrawn."))


def _back(request: PageRequest, text: str, to: str | None = None) -> HttpResponse:
    return done(request, text, to or reverse("web:hosts", args=[request.project.name]))
