"""What the first page of the admin site shows: rows of each model, what needs attention, recent changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from django.apps import apps
from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import User
from dstackweb.audit.models import AuditAction, AuditEntry
from dstackweb.web import health
from dstackweb.web.admin.areas import AREAS
from dstackweb.wording import audit as words

MOST_COUNTED = 1000
"""Rows that are counted of a model; more are shown as `1,000+`, so that large tables cost no more than small ones."""
RECENT = 8
FAULTS = 5
CHANGES = (AuditAction.CREATED, AuditAction.CHANGED, AuditAction.DELETED)
"""And no sign-ins."""


class Change(NamedTuple):
    """An entry of the audit log in words."""

    entry: AuditEntry
    actor: str
    kind: str
    action: str
    changes: list[str]


def overview(request: HttpRequest) -> dict[str, Any]:
    """The context of the first page, beside its areas."""
    user = request.user
    assert isinstance(user, User), "the admin site requires a sign-in"
    project = visible_projects(user).order_by("name").first()
    found: dict[str, Any] = {"counts": dict(_counts(request)), "home": project}
    if project is None:
        return found | {"faults": [], "recent": []}
    lines = [line for area in health.areas(project) for line in area.faults]
    lines.sort(key=lambda line: -health.TONES.index(line.check.tone))
    found |= {"faults": lines[:FAULTS], "more_faults": max(0, len(lines) - FAULTS)}
    if user.has_perm("audit.view_auditentry"):
        found["recent"] = recent(AuditEntry.objects.filter(action__in=CHANGES).order_by("-id")[:RECENT])
        found["audit_url"] = reverse("admin:audit_auditentry_changelist")
    return found


def recent(entries: Iterable[AuditEntry]) -> list[Change]:
    return [
        Change(one, words.actor(one), words.KIND(one.kind), words.ACTION(one.action), words.changes(one))
        for one in entries
    ]


def _counts(request: HttpRequest) -> Iterator[tuple[str, str]]:
    """By the label of each model that the reader may see."""
    for area in AREAS:
        for entry in area.entries:
            model = apps.get_model(entry.model)
            options = admin.site._registry.get(model)
            if not area.fixed and options is not None and options.has_view_permission(request):
                yield entry.model, counted(model)


def counted(model: type[Model]) -> str:
    """The number of rows, exact up to MOST_COUNTED."""
    number = model._default_manager.order_by()[: MOST_COUNTED + 1].count()
    return _("%s+") % f"{MOST_COUNTED:,}" if number > MOST_COUNTED else f"{number:,}"
