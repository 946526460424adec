"""Roles in projects by groups of the identity provider (`DSTACKWEB_OIDC_ROLES`), applied at each single sign-on.

The mapping touches what it gave alone: a role that someone gave by hand stays, whatever the groups are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from django.db import transaction

from dstackweb.accounts.access import allows
from dstackweb.accounts.models import Membership, Project, User
from dstackweb.env import GroupRole

log = logging.getLogger(__name__)


def groups_in(claims: Mapping[str, Any], name: str) -> set[str]:
    """The groups in what the provider said of a person: a list, or one name. Anything else counts as none."""
    for part in ("userinfo", "id_token"):
        found = (claims.get(part) or {}).get(name)
        if isinstance(found, str):
            return {found}
        if isinstance(found, list):
            return {one for one in found if isinstance(one, str)}
    return set()


def roles_of(groups: Iterable[str], mapping: Iterable[GroupRole]) -> dict[str, str]:
    """The role in each project that these groups give, the highest of several."""
    wanted: dict[str, str] = {}
    there = {*groups}
    for group, project, role in mapping:
        if group in there and (project not in wanted or allows(role, wanted[project])):
            wanted[project] = role
    return wanted


def apply(user: User, wanted: Mapping[str, str]) -> None:
    """Give the user these roles, by project name, and take back those of groups that they have left."""
    with transaction.atomic():
        projects = {one.name: one for one in Project.objects.select_for_update().filter(name__in=wanted).order_by("pk")}
        if missing := {*wanted} - {*projects}:
            log.warning("DSTACKWEB_OIDC_ROLES names projects that don't exist: %s", ", ".join(sorted(missing)))
        memberships = {one.project_id: one for one in user.memberships.select_related("project")}
        for name, project in projects.items():
            there = memberships.get(project.pk)
            if there is None:
                Membership.objects.create(user=user, project=project, role=wanted[name], by_group=True)
            elif there.by_group and there.role != wanted[name]:
                there.role = wanted[name]
                there.save(update_fields=["role"])
        for membership in memberships.values():
            if membership.by_group and membership.project.name not in projects:
                membership.delete()
