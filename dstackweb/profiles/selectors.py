"""The profiles that a project's runs can use, and its default."""

from __future__ import annotations

from django.db.models import F, Q, QuerySet

from dstackweb.accounts.models import Project
from dstackweb.profiles.models import Profile


def visible(project: Project) -> list[Profile]:
    """The profiles that runs of the project can use, by name; its own hides one with the same name for all projects."""
    found = {profile.name: profile for profile in _own_last(project)}
    return [found[name] for name in sorted(found)]


def named(project: Project, name: str) -> Profile | None:
    """The project's profile of this name, else that of all projects."""
    return _own_last(project).filter(name=name).last()


def default(project: Project) -> Profile | None:
    """The profile of runs that name none: the project's default, else that of all projects."""
    return _own_last(project).filter(is_default=True).last()


def _own_last(project: Project) -> QuerySet[Profile]:
    found = Profile.objects.filter(Q(project=project) | Q(project__isnull=True))
    return found.select_related("project").order_by(F("project").asc(nulls_first=True))
