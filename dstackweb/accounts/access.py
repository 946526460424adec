"""Which projects a user sees, and what their role allows. Every query starts here.

A project that the user may not see gives the same `NotFound` as one that doesn't exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib.auth.models import AnonymousUser
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from dstackweb.accounts.models import Membership, Project, Role, TokenLimit, TokenScope, User
from dstackweb.lib.errors import Forbidden, NotFound

_LEVELS = {str(role): level for level, role in enumerate(Role)}


def allows(role: str, at_least: str) -> bool:
    """Whether `role` may do what `at_least` may: roles are ordered viewer < member < manager < admin."""
    return _LEVELS[role] >= _LEVELS[at_least]


def visible_projects(user: User | AnonymousUser) -> QuerySet[Project]:
    """The projects that the user is a member of, by name; all for a superuser, none for an inactive user."""
    if not user.is_active:
        return Project.objects.none()
    there = Project.objects.filter(deleting_since=None)
    found = there if user.is_superuser else there.filter(memberships__user=user)
    limit = _limit(user)
    return found if limit is None or limit.project_id is None else found.filter(pk=limit.project_id)


def role_in(project: Project, user: User | AnonymousUser) -> str | None:
    """The user's role, `admin` for superusers; None for others, for inactive users, and while a project is deleted."""
    if not user.is_active or project.deleting_since is not None:
        return None
    if user.is_superuser:
        return limited(user, project.pk, Role.ADMIN)
    membership = Membership.objects.filter(project=project, user=user).first()
    return limited(user, project.pk, membership.role) if membership else None


def limited(user: User | AnonymousUser, project_id: int, role: str) -> str | None:
    """What the token that the user is signed in with leaves of their role; None: nothing in this project."""
    limit = _limit(user)
    if limit is None:
        return role
    if limit.project_id not in (None, project_id):
        return None
    return role if allows(limit.scope.role, role) else str(limit.scope.role)


def scope_for(role: str) -> TokenScope:
    """The least scope of a token that leaves its user this role."""
    return next(scope for scope in TokenScope if allows(scope.role, role))


def _limit(user: User | AnonymousUser) -> TokenLimit | None:
    return user.token_limit if isinstance(user, User) else None


_PROJECT_AND_ROLE = """
SELECT project.*, membership.role AS role_there
FROM accounts_project project
LEFT JOIN accounts_membership membership ON membership.project_id = project.id AND membership.user_id = %s
WHERE project.name = %s AND project.deleting_since IS NULL
"""


def project_for(user: User | AnonymousUser, name: str, at_least: str = Role.VIEWER) -> tuple[Project, str]:
    """The project and the user's role there. Raises NotFound for who is no member, Forbidden below `at_least`."""
    found = Project.objects.raw(_PROJECT_AND_ROLE, [user.pk, name]) if user.is_active else ()
    project: Any = next(iter(found), None)
    entered, role = enter(user, name, project, project and project.role_there)
    need_role(role, name, at_least)
    return entered, role


def enter(user: User | AnonymousUser, name: str, project: Project | None, role: str | None) -> tuple[Project, str]:
    """The project with what its name and the user's role by membership leave them. Raises NotFound."""
    if project is not None and user.is_superuser:
        role = str(Role.ADMIN)
    role = limited(user, project.pk, role) if project is not None and role else None
    if project is None or role is None:
        raise NotFound(_("There is no project %(name)s, or you are not a member of it.") % {"name": name})
    return project, role


def need_role(role: str, name: str, at_least: str) -> None:
    """Raises Forbidden if the user's role in the project `name` is below `at_least`."""
    if not allows(role, at_least):
        raise Forbidden(
            _("Your role in %(name)s is %(role)s; this needs the role %(at_least)s.")
            % {"name": name, "role": role, "at_least": at_least}
        )


def may_change(role: str, owner_id: int, user: User) -> bool:
    """Members change what is theirs, managers anything."""
    return allows(role, "manager") or (allows(role, "member") and owner_id == user.pk)


def may_set_passwords(by: User, users: Sequence[User]) -> set[int]:
    """Of these users, the ids of those for whom `by` may make a link that sets a new password, and signs in with it.

    Only of people who may do less: a deployment admin's link for anyone. Others need, in each of the person's
    projects, the role admin, or manager where theirs is lower; never for deployment admins and staff.
    """
    if by.may_administer:
        return {user.pk for user in users if user.is_active}
    mine = dict(Membership.objects.filter(user=by).values_list("project", "role"))
    people = {user.pk for user in users if user.is_active and not (user.is_superuser or user.is_staff)}
    for user, project, role in Membership.objects.filter(user__in=people).values_list("user", "project", "role"):
        own = mine.get(project, str(Role.VIEWER))
        if not (own == Role.ADMIN or (own == Role.MANAGER and not allows(role, Role.MANAGER))):
            people.discard(user)
    return people
