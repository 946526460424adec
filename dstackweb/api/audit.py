"""The audit log, for admins of the deployment and of a project."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _
from ninja import P, Path, QueryEx, Router, Schema

from dstackweb.api.app import REFUSALS, admin, project_of
from dstackweb.audit import log
from dstackweb.audit.log import AuditFilter
from dstackweb.audit.models import AuditAction, AuditKind

router = Router(tags=["deployment"])
of_project = Router(tags=["deployment"])
Kind = QueryEx[AuditKind | None, P(description="Only entries about this")]
Actor = QueryEx[str, P(max_length=150, description="Only entries of this user")]
Text = QueryEx[str, P(max_length=200, description="Part of a name, a user or an address")]
Limit = QueryEx[int, P(ge=1, le=1000)]
Cursor = QueryEx[int | None, P(ge=1, le=2**53, description="The `next` of the page before")]


class AuditEntryOut(Schema):
    """A change or a sign-in. `via` is the name of the API token that was used.

    `changes` has each changed field with its old and new value, or null where the values are secret.
    """

    at: dt.datetime
    actor: str
    via: str | None
    address: str | None
    kind: AuditKind
    action: AuditAction
    name: str
    project: str | None
    changes: dict[str, list[Any] | None]


class AuditOut(Schema):
    """The newest first."""

    items: list[AuditEntryOut]
    next: int | None


@router.get("", response={200: AuditOut, **REFUSALS}, summary="The audit log")
def deployment_log(
    request: HttpRequest, kind: Kind = None, actor: Actor = "", q: Text = "", limit: Limit = 100, cursor: Cursor = None
) -> dict[str, Any]:
    """For deployment admins: sign-ins, and changes of users, projects, members, settings, backends and hosts."""
    admin(request, _("the audit log"))
    return _page(AuditFilter(kind=kind or "", actor=actor, text=q), limit, cursor)


@of_project.get("", response={200: AuditOut, **REFUSALS}, summary="A project's audit log")
def project_log(
    request: HttpRequest, project: Path[str], kind: Kind = None, actor: Actor = "", q: Text = "", limit: Limit = 100,
    cursor: Cursor = None,
) -> dict[str, Any]:  # fmt: skip
    """For project admins: changes of the project, its members, queues, profiles, policies and secrets."""
    found, _role = project_of(request, project, "admin")
    return _page(AuditFilter(found, kind=kind or "", actor=actor, text=q), limit, cursor)


def _page(wanted: AuditFilter, limit: int, cursor: int | None) -> dict[str, Any]:
    rows, following = log.page(wanted, limit, cursor)
    return {"items": [log.facts(row) for row in rows], "next": following}
