"""Template tags and filters of the pages: the sidebar, icons, times, and words for codes."""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

from django import template
from django.template.context import RequestContext
from django.templatetags.static import static
from django.utils import timezone
from django.utils.html import conditional_escape, escape, format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from dstackweb.accounts.models import User
from dstackweb.web.cloud import budget as budgets
from dstackweb.web.common import navigation
from dstackweb.web.gpus import alerts
from dstackweb.wording import statuses, units
from dstackweb.wording.sentence import Sentence, moment

register = template.Library()

_TIME = "<time datetime={} data-when={}{}>{}</time>"
"""There are many on a page, and neither value ever needs quotes."""

register.filter("duration", units.duration)
register.filter("hourly", units.dollars)
register.filter("mebibytes", units.mebibytes)
register.filter("status_word", statuses.status)


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
    """The navigation for this reader; `project` of the context (or the request) is the one shown."""
    request = context["request"]
    project = context.get("project") or getattr(request, "project", None)
    return {"csrf_token": context.get("csrf_token"), **navigation.sidebar(request, project, context.get("waiting"))}


@register.inclusion_tag("cloud/budget.html", takes_context=True)
def budget(context: RequestContext) -> dict[str, Any]:
    """The warning that most of the project's cloud budget is spent."""
    project = getattr(context["request"], "project", None)
    return {"project": project, "warned": budgets.warned(project, timezone.now()) if project else None}


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


@register.simple_tag
def now_ms() -> int:
    """The server's clock, from which the page's ages count."""
    return time.time_ns() // 1_000_000


@register.simple_tag
def icon(name: str) -> SafeString:
    """An icon of static/icons.svg; decoration only, so hidden from screen readers."""
    return mark_safe(f'<svg class="icon dw-icon" aria-hidden="true"><use href="{static("icons.svg")}#{name}"/></svg>')


@register.simple_tag
def when(at: dt.datetime | None, style: str = "moment") -> SafeString | str:
    """A moment: `clock`, `hour` and `moment` are shown in the reader's zone; `ago`, `for` and, for what is still to
    come, `in` count on by themselves.

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
