"""The audit log's page and its export."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from dstackweb.audit import log
from dstackweb.audit.log import AuditFilter
from dstackweb.audit.models import AuditKind
from dstackweb.lib import exports
from dstackweb.lib.forms import whole_number
from dstackweb.web.common.pages import PageRequest, project_page
from dstackweb.wording import audit as words

PER_PAGE = 50


@require_safe
@project_page("admin")
def audit_page(request: PageRequest) -> HttpResponse:
    """The entries of the project; of the whole deployment for its admins, with `all=yes`."""
    wanted, fields = _wanted(request)
    rows, following = log.page(wanted, PER_PAGE, whole_number(request.GET.get("before")) or None)
    values: dict[str, Any] = {
        "entries": words.described(rows),
        "kinds": [(kind.value, words.KIND(kind)) for kind in AuditKind],
        "fields": fields,
        "query": urlencode(fields),
        "next_query": urlencode({**fields, "before": following}) if following else "",
        "is_first": "before" not in request.GET,
    }
    return render(request, "audit/audit.html", values)


@require_safe
@project_page("admin")
def export(request: PageRequest, form: str) -> HttpResponseBase:
    """All entries of a filter, as a file."""
    return exports.response("audit", form, log.COLUMNS, log.every(_wanted(request)[0]))


def _wanted(request: PageRequest) -> tuple[AuditFilter, dict[str, str]]:
    """The filter of the address, and its fields that are set."""
    given = {name: request.GET.get(name, "").strip()[:200] for name in ("kind", "actor", "q", "all")}
    if given["kind"] not in list(AuditKind):
        given["kind"] = ""
    if given["all"] != "yes" or not request.user.is_superuser:
        given["all"] = ""
    wanted = AuditFilter(request.project, kind=given["kind"], actor=given["actor"], text=given["q"])
    if given["all"]:
        wanted = replace(wanted, project=None)
    return wanted, {name: text for name, text in given.items() if text}
