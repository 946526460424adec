"""The profiles that a project's runs can use, and which of them is the default."""

from __future__ import annotations

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.utils.translation import gettext as _, gettext_noop

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.profiles.models import Profile
from dstackweb.profiles.resolve import ProfileData
from dstackweb.spec.run_file import parse_profile_settings

SEED = {"backends": ["hosts"], "max_duration": "24h"}
SEED_DESCRIPTION = gettext_noop("Your own hosts, for at most one day")
"""No paid backends unless a run names them, and a time limit."""


def visible(project: Project) -> list[Profile]:
    """The profiles that runs of the project can use, by name; its own hides one with the same name for all projects."""
    found = {profile.name: profile for profile in _own_last(project)}
    return [found[name] for name in sorted(found)]


def named(project: Project, name: str) -> Profile | None:
    """The project's profile of this name, else that of all projects."""
    return _own_last(project).filter(name=name).last()


def default(project: Project) -> Profile | None:
    """The profile of runs that name none: the project's default, else that of all projects."""
    found = Profile.objects.raw(_DEFAULTS, [project.pk])
    return max(found, key=lambda profile: profile.project_id is not None, default=None)


_DEFAULTS = "SELECT * FROM profiles_profile WHERE is_default AND (project_id = %s OR project_id IS NULL)"


def _own_last(project: Project) -> QuerySet[Profile]:
    found = Profile.objects.filter(Q(project=project) | Q(project__isnull=True))
    return found.select_related("project").order_by(F("project").asc(nulls_first=True))


def profile_for(project: Project, name: str | None) -> ProfileData | None:
    """The profile `name`, or the project's default for None, if any. Raises Invalid at `profile`."""
    profile = default(project) if name is None else named(project, name)
    if profile is None:
        if name is None:
            return None
        known = ", ".join(found.name for found in visible(project)) or "none"
        raise Invalid.at(
            "profile", msg=_("no profile %(name)s. Available: %(known)s") % {"name": repr(name), "known": known}
        )
    try:
        return ProfileData(profile.name, parse_profile_settings(profile.settings))
    except DomainError as error:
        msg = _("the profile %(profile)s is invalid, ask an admin to fix it: %(error)s") % {
            "profile": repr(profile.name),
            "error": error.detail,
        }
        raise Invalid.at("profile", msg=msg) from None


def ensure_default_profile() -> None:
    """Create the default profile for all projects unless there is a profile for all projects. Safe to repeat."""
    if not Profile.objects.filter(project=None).exists():
        values = {"is_default": True, "settings": SEED, "description": SEED_DESCRIPTION}
        Profile.objects.get_or_create(project=None, name="default", defaults=values)


def make_default(profile: Profile) -> None:
    with transaction.atomic():
        others = Profile.objects.filter(project=profile.project, is_default=True).exclude(pk=profile.pk)
        for row, is_default in [*((other, False) for other in others), (profile, True)]:
            row.is_default = is_default
            row.save(update_fields=["is_default"])
