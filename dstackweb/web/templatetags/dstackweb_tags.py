"""Template tags and filters of the pages: the sidebar, icons, times, and words for codes."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

from django import template
from django.db.models import Model
from django.http import HttpRequest
from django.template.context import RequestContext
from django.template.defaultfilters import floatformat, stringfilter
from django.template.loader import render_to_string
from django.templatetags.static import static
from django.urls import reverse
from django.utils import dateformat, timezone
from django.utils.html import conditional_escape, escape, format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import Project, User
from dstackweb.lib.commands import server_command
from dstackweb.notifications import services as notifications
from dstackweb.profiles.services import SEED_DESCRIPTION
from dstackweb.runs import selectors
from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.web.cloud import instance_views
from dstackweb.web.common import sidebar as sidebar_pages
from dstackweb.web.common.pages import page_address, queue_url
from dstackweb.web.gpus import alerts
from dstackweb.web.progress import live
from dstackweb.wording import policy as policy_words, progress, sentence, statuses, units
from dstackweb.wording.sentence import Sentence, capitalized, clauses, listing, moment

register = template.Library()


_TIME = "<time datetime={} data-when={}{}>{}</time>"
"""There are many on a page, and neither value ever needs quotes."""

register.filter("count", progress.count)
register.filter("listing", listing)
register.filter("clauses", clauses)
register.filter("capitalized", stringfilter(capitalized), is_safe=True)
register.filter("duration", units.duration)
register.filter("hourly", units.dollars)
register.filter("mebibytes", units.mebibytes)
register.filter("size", units.size)
register.filter("status_word", statuses.status)
register.filter("visible", sentence.visible)
register.filter("as_json", json.dumps)
register.simple_tag(lambda: json.dumps(units.for_scripts()), name="units_json")
register.simple_tag(lambda: live.now_ms(), name="now_ms")
register.simple_tag(queue_url)
register.simple_tag(server_command)


@register.filter
def percent(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{floatformat(share, digits)} %"


@register.filter
def share(part: float | None) -> str:
    """A part of 1 in percent."""
    return percent(part and 100 * part)


@register.filter
def policy_rule(policy: UtilizationPolicy | None) -> str:
    return policy_words.rule(policy) if policy else ""


@register.filter
def code_spans(text: str) -> SafeString:
    """Text with words between backticks as code."""
    parts = conditional_escape(text).split("`")
    if len(parts) % 2 == 0:  # one without its partner
        return mark_safe("`".join(parts))  # escaped above
    return mark_safe("".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts)))


def _instant(at: dt.datetime) -> str:
    """As short as ISO 8601 allows: there are many on a page."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


@register.filter
def profile_description(text: str) -> str:
    """What an admin wrote; that of the profile which the server made, in the reader's language."""
    return _(text) if text == SEED_DESCRIPTION else text


@register.filter
def moments(text: str) -> SafeString:
    """A sentence with its moments in the reader's time zone."""
    parts = text.parts if isinstance(text, Sentence) else (text,)
    return format_html_join("", "{}", ((_moment(part),) for part in parts))


def _moment(part: str | dt.datetime) -> str:
    if isinstance(part, str):
        return part
    return format_html(_TIME, _instant(part), "hour", "", moment(part))


@register.inclusion_tag("common/sidebar.html", takes_context=True)
def sidebar(context: RequestContext) -> dict[str, Any]:
    """The navigation: the project of the page, else the reader's first, and the pages that the reader may open."""
    request = context["request"]
    user = request.user
    if not isinstance(user, User):
        return {"user": user}
    projects = list(visible_projects(user).order_by("name"))
    project = context.get("project") or getattr(request, "project", None) or next(iter(projects), None)
    groups = sidebar_pages.groups(request, user, project) if project else []
    open_pages = (link.page for _group, links, _open in groups for link in links if link.active)
    view = next((page.view for page in open_pages if page.at_least == "viewer"), "web:queue")
    return {
        "csrf_token": context.get("csrf_token"),
        "request": request,
        "user": user,
        "areas": sidebar_pages.admin_areas(context),
        "project": project,
        "projects": [(one, reverse(view, args=[one.name])) for one in projects],
        "groups": groups,
        "waiting": _waiting(context, project) if project else 0,
    }


def _waiting(context: RequestContext, project: Project) -> int:
    known: int | None = context.get("waiting")
    return selectors.counts(project)["submitted"] if known is None else known


@register.simple_tag(takes_context=True)
def this_page(context: RequestContext) -> str:
    return page_address(context["request"])


@register.simple_tag(takes_context=True)
def badge_update(context: RequestContext) -> SafeString | str:
    """With a fragment, the numbers of waiting runs and of unread notifications; nothing inside a page."""
    if not context.get("partial"):
        return ""
    request = context["request"]
    waiting = render_to_string("queue/badge.html", {"waiting": _waiting(context, request.project), "oob": True})
    return waiting + render_to_string("notifications/bell.html", _bell(request, oob=True))


@register.inclusion_tag("notifications/bell.html", takes_context=True)
def bell(context: RequestContext) -> dict[str, Any]:
    """The link to the reader's notifications, with the number of unread ones."""
    return _bell(context["request"])


def _bell(request: HttpRequest, *, oob: bool = False) -> dict[str, Any]:
    user = request.user if isinstance(request.user, User) else None
    count = notifications.unread(user) if user else 0
    many = count >= notifications.MOST_UNREAD
    return {"user": user, "unread": f"{notifications.MOST_UNREAD - 1}+" if many else count, "oob": oob}


@register.inclusion_tag("cloud/budget.html", takes_context=True)
def budget(context: RequestContext) -> dict[str, Any]:
    """The warning that most of the project's cloud budget is spent."""
    project = getattr(context["request"], "project", None)
    return {"project": project, "warned": instance_views.budget_warning(project, timezone.now()) if project else None}


@register.inclusion_tag("gpus/banners.html", takes_context=True)
def idle_gpus(context: RequestContext, oob: bool = False) -> dict[str, Any]:
    """Banners for the reader's runs that policies are about to stop, except on the run's own page.

    With `oob` it comes beside a fragment, and takes the place of what the page has.
    """
    request = context["request"]
    project, user = getattr(request, "project", None), getattr(request, "user", None)
    if project is None or not isinstance(user, User):
        return {"alerts": [], "oob": oob}
    here = getattr(context.get("run"), "pk", None)
    found = alerts.banners(user, project, timezone.now())
    return {"oob": oob, "project": project, "alerts": [alert for alert in found if alert.run.pk != here]}


@register.simple_block_tag
def heading(content: str) -> SafeString:
    """A page's heading, to be used for its title too."""
    return mark_safe(content.strip())


@register.simple_block_tag
def kpi(content: str, label: str, value: object) -> SafeString:
    """A card with one number; the content is the note below it."""
    return format_html(
        '<div class="card card-sm m-0"><div class="card-body"><div class="text-secondary small">{}</div>'
        '<div class="kpi">{}</div><div class="small text-secondary">{}</div></div></div>',
        label, value, mark_safe(content),
    )  # fmt: skip


@register.simple_tag
def icon(name: str) -> SafeString:
    """An icon of static/icons.svg; decoration only, so hidden from screen readers."""
    return mark_safe(f'<svg class="icon dw-icon" aria-hidden="true"><use href="{static("icons.svg")}#{name}"/></svg>')


@register.simple_tag
def when(at: dt.datetime | None, style: str = "moment") -> SafeString | str:
    """A moment: `clock`, `hour` and `moment` are shown in the reader's zone; `ago`, `for`, `elapsed` (with its
    seconds) and, for what is still to come, `in` count on by themselves.

    The server's text is UTC, for readers without scripts; app.js replaces it.
    """
    if at is None:
        return "–"
    at = at.astimezone(dt.UTC)
    more = ""
    match style:
        case "clock":
            text = f"{at:%H:%M:%S} UTC"
        case "hour":
            text = f"{at:%H:%M} UTC"
        case "for":
            text = _age(at)
        case "elapsed":
            text = units.elapsed((timezone.now() - at).total_seconds())
        case "ago":
            ago = _("%s ago")
            text, more = escape(ago.replace("%s", _age(at))), format_html(' data-ago="{}"', ago)
        case "in":
            left_s = (at - timezone.now()).total_seconds()
            coming, due = _("in %s"), _("due now")
            text = escape(coming.replace("%s", units.duration(left_s)) if left_s > 0 else due)
            more = format_html(' data-in="{}" data-due="{}"', coming, due)
        case _:
            text = f"{at:%b %d, %H:%M} UTC"
    return mark_safe(_TIME.format(_instant(at), style, more, text))  # digits, and a word of the template


def _age(at: dt.datetime) -> str:
    return units.duration((timezone.now() - at).total_seconds())


@register.simple_tag(takes_context=True)
def admin_entry(context: RequestContext, opts: Any) -> dict[str, Any]:
    """What the admin site calls a model, its line of help, and its area."""
    for area in context.get("available_apps") or []:
        for model in area["models"]:
            if model["label"] == opts.label_lower:
                return {"name": model["name"], "help": model["help"], "area": area}
    return {"name": capfirst(opts.verbose_name_plural), "help": "", "area": None}


@register.simple_tag
def admin_count(counts: dict[str, str], label: str) -> str:
    """The number of rows of a model, as text; empty where it was not counted."""
    return counts.get(label, "")


@register.simple_tag
def admin_class(is_popup: bool) -> str:
    """The class of the body on the admin site."""
    return "dw-admin dw-admin-popup" if is_popup else "dw-admin"


@register.simple_tag
def admin_clock() -> SafeString:
    """How many seconds the time zone of the admin site is ahead of UTC, for Django's date pickers."""
    return format_html('data-admin-utc-offset="{}"', dateformat.format(timezone.localtime(), "Z"))


@register.simple_tag(takes_context=True)
def admin_link(context: RequestContext, row: Model) -> SafeString | str:
    """For staff who may see it there, a link to a row's page on the admin site."""
    user, meta = context["request"].user, row._meta
    if not user.is_staff or not user.has_perm(f"{meta.app_label}.view_{meta.model_name}"):
        return ""
    url = reverse(f"admin:{meta.app_label}_{meta.model_name}_change", args=[row.pk])
    return format_html('<a class="btn btn-sm" href="{}">{}{}</a>', url, icon("admin"), _("Admin"))
