"""What every page shares: who may see it, how a poll is answered, and how errors and results are shown.

One URL serves the page and its fragment. A poll sends the version it shows (`HX-PTag`); the version is read before
the data, so that a change in between is shown by the next poll and never missed.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypedDict, cast
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.views import redirect_to_login
from django.db import DataError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render, resolve_url
from django.urls import is_valid_path, resolve, reverse
from django.utils.cache import patch_cache_control, patch_vary_headers
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST
from django_htmx.middleware import HtmxDetails

from dstackweb.accounts.access import allows, project_for
from dstackweb.accounts.models import Project, Role, User
from dstackweb.lib.errors import DomainError, Invalid, NotFound
from dstackweb.runs.history import parse_zone
from dstackweb.wording.sentence import capitalized

P = ParamSpec("P")


class PageRequest(HttpRequest):
    """A request of a signed-in member, with the project of its URL and their role in it.

    `may` has each role: whether the member may do what it may.
    """

    htmx: HtmxDetails
    user: User
    project: Project
    role: str
    may: dict[str, bool]


View = Callable[Concatenate[PageRequest, P], HttpResponseBase]
SENTENCE_MAX = 2000
Routed = Callable[..., HttpResponseBase]
"""A view as the URL resolver calls it: with the project's name, and the rest by keyword."""


def account_page(view: View[P]) -> Routed:
    """A page of the signed-in user; errors are worded for them."""

    @functools.wraps(view)
    def inner(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        page = cast(PageRequest, request)
        if not request.user.is_authenticated:
            return _sign_in(page)
        try:
            response = view(page, *args, **kwargs)
        except DomainError as error:
            response = _error_response(page, error)
        except DataError:
            # PostgreSQL holds no NUL character: nothing can have a name with one.
            response = _error_response(page, NotFound(_("nothing has such an address")))
        patch_vary_headers(response, ["HX-Request"])
        patch_cache_control(response, no_store=True, private=True)
        return response

    return inner


def project_page(at_least: str = "viewer") -> Callable[[View[P]], Routed]:
    """A view under `/p/<project>/`: as `account_page`, and the caller must be a member with this role.

    A stranger gets 404, whether or not the project exists.
    """

    def wrap(view: View[P]) -> Routed:
        def inner(request: PageRequest, /, project: str, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            request.project, request.role = project_for(request.user, project, at_least)
            request.may = {role: allows(request.role, role) for role in Role.values}
            return view(request, *args, **kwargs)

        return functools.wraps(view)(account_page(inner))

    return wrap


def only_forms(view: Callable[..., HttpResponseBase]) -> Routed:
    """As `require_POST`, and known for it: `page_address` leads nobody there."""
    posted = require_POST(view)
    posted.__dict__["takes_only_forms"] = True  # which `functools.wraps` copies
    return posted


def account_action(view: View[P]) -> Routed:
    """As `account_page`, of what forms post to."""
    return account_page(only_forms(view))


def project_action(at_least: str = "viewer") -> Callable[[View[P]], Routed]:
    """As `project_page`, of what forms post to."""
    return lambda view: project_page(at_least)(only_forms(view))


def page_address(request: HttpRequest) -> str:
    """Return the address that shows the reader's page again; where a form was sent, the page that it was on.

    A page that answers a form may be at an address that can't be opened. Above it is the page that has such forms.
    """
    if request.method in ("GET", "HEAD"):
        return request.get_full_path()
    page = urlsplit(request.headers.get("Referer") or request.path)
    parts = page.path.strip("/").split("/")
    while parts:
        path = f"/{'/'.join(parts)}/"
        if is_valid_path(path) and not hasattr(resolve(path).func, "takes_only_forms"):
            return path + (f"?{page.query}" if page.query and path == page.path else "")
        parts.pop()
    return "/"


def _sign_in(request: PageRequest) -> HttpResponseBase:
    """Redirect to the sign-in page and back afterwards, from a form to its page; a poll reloads its whole page."""
    if request.htmx:
        return HttpResponse(status=401, headers={"HX-Refresh": "true"})
    return redirect_to_login(page_address(request))


def _error_response(request: PageRequest, error: DomainError) -> HttpResponse:
    """A domain error as a notice on the page it came from, or as a page of its own."""
    if request.htmx:
        return notice(HttpResponse(status=error.status), sentence(error.detail), "error")
    return render(request, "common/error.html", {"error": error, "detail": sentence(error.detail)}, status=error.status)


def sentence(text: str) -> str:
    """An error's detail as a sentence: capitalized, with a full stop. What was typed may be in it, and be megabytes."""
    text = capitalized(text[:SENTENCE_MAX]) + ("…" if len(text) > SENTENCE_MAX else "")
    return text if text.endswith((".", "!", "?", "…", "。", "！", "？")) else text + _(".")


def fingerprint(*shown: object) -> str:
    """A page's version: a hash of everything on it that can change."""
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def polled(
    request: PageRequest, page: str, fragment: str, version: str, context: Callable[[], dict[str, Any]],
    parts: Callable[[], dict[str, str]] | None = None,
) -> HttpResponse:  # fmt: skip
    """Answer a page or a poll of it: nothing (204) when the poller shows `version` already.

    `context` is called only when there is something to show, after `version` was read. `parts`: of elements that have
    requests of their own, the id and what changes with them; a poll's answer says it, so that they need no polls.
    """
    named = json.dumps(parts()) if request.htmx and parts else ""
    if request.htmx and request.headers.get("HX-PTag") == version:
        response = HttpResponse(status=204)
    else:
        response = shown(request, fragment if request.htmx else page, version, context())
    if named:
        response["DW-Parts"] = named
    return response


def shown(
    request: PageRequest, template: str, version: str, context: dict[str, Any], status: int = 200
) -> HttpResponse:
    """A page or fragment that shows `version`, whatever the reader has: what an action is answered with."""
    values = {**context, "version": version, "partial": bool(request.htmx)}
    response = render(request, template, values, status=status)
    response["HX-PTag"] = version
    return response


class SortHeader(NamedTuple):
    """A column header that sorts the list: its query string, and the current `aria-sort`."""

    query: str
    aria: str = "none"

    @classmethod
    def of(cls, by: str, sort: str, query: Callable[..., str], first: str = "", most_first: bool = False) -> SortHeader:
        """Of the column `by` of a list that is sorted by `sort`, with a minus for the other way round.

        `query` makes the address, `first` is how a click sorts first. `most_first`: without a minus, the most is first.
        """
        if sort.removeprefix("-") != by:
            return cls(query(sort=first or by))
        turned = sort.startswith("-")
        return cls(query(sort=by if turned else f"-{by}"), "ascending" if turned == most_first else "descending")


class Undo(TypedDict):
    """How the page undoes a move: where to post its number, and for how long."""

    url: str
    move: int
    seconds: int


def notice(response: HttpResponse, text: str, level: str = "success", undo: Undo | None = None) -> HttpResponse:
    """Add a notice that the page shows when it gets this response."""
    toast = {"text": text, "level": level} | ({"undo": undo} if undo else {})
    response["HX-Trigger"] = json.dumps({"toast": toast})
    return response


def done(request: PageRequest, text: str, to: str, *args: object) -> HttpResponse:
    """Redirect with a message, after a plain or an htmx form. `to`: an address, or a page's name with its `args`."""
    messages.success(request, text)
    url = resolve_url(to, *args)
    return HttpResponse(headers={"HX-Redirect": url}) if request.htmx else redirect(url)


def done_here(request: PageRequest, text: str, to: str, *args: object, undo: Undo | None = None) -> HttpResponse:
    """A notice on the page, whose next poll shows the result; without scripts, as `done`."""
    if request.htmx:
        return notice(HttpResponse(status=204), text, undo=undo)
    return done(request, text, to, *args)


def queue_url(project: Project, name: str) -> str:
    """The page of a queue; that of the default queue has no name in its address."""
    return reverse("web:queue", args=[project.name] if name == "default" else [project.name, name])


def public_url(request: HttpRequest) -> str:
    """The server's address for people and other machines, without a slash at its end."""
    return settings.DSTACKWEB_PUBLIC_URL or request.build_absolute_uri("/").rstrip("/")


def reader_zone(request: HttpRequest) -> dt.tzinfo:
    """The reader's time zone, from the cookie that times.js sets; UTC without it."""
    try:
        return parse_zone(request.COOKIES.get("zone", ""))
    except ValueError:
        return parse_zone("UTC")


def yes_or_no(request: HttpRequest, name: str) -> bool:
    """A field of a form. Raises Invalid where it is missing or anything else: then nothing may change."""
    given = request.POST.get(name)
    if given not in ("yes", "no"):
        msg = _("the form lacks “%s” (yes or no), so nothing was changed: reload the page and try again") % name
        raise Invalid.at(name, msg=msg)
    return given == "yes"
