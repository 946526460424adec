"""What is done with profiles: giving a run its own, seeding the first, choosing the default."""

from __future__ import annotations

from django.db import transaction

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import DomainError, Invalid
from dstackweb.profiles import selectors
from dstackweb.profiles.models import Profile
from dstackweb.profiles.resolve import ProfileData
from dstackweb.spec.run_file import parse_profile_settings

SEED = {"backends": ["hosts"], "max_duration": "24h"}
"""Paid backends only where somebody names them, and no run for ever."""


def profile_for(project: Project, name: str | None) -> ProfileData | None:
    """The profile that a run names, or with None its project's default, if there is one.

    Raises Invalid at `profile` when there is none of that name, or it can't be used.
    """
    profile = selectors.default(project) if name is None else selectors.named(project, name)
    if profile is None:
        if name is None:
            return None
        known = ", ".join(found.name for found in selectors.visible(project)) or "none"
        raise Invalid.at("profile", msg=f"no profile is called {name!r}; there is: {known}")
    try:
        return ProfileData(profile.name, parse_profile_settings(profile.settings))
    except DomainError as error:
        msg = f"the profile {profile.name!r} can't be used until an admin mends it: {error.detail}"
        raise Invalid.at("profile", msg=msg) from None


def ensure_default_profile() -> None:
    """Seed the default profile of all projects where there is no profile for all projects. Safe to repeat."""
    if not Profile.objects.filter(project=None).exists():
        Profile.objects.get_or_create(
            project=None,
            name="default",
            defaults={
                "is_default": True,
                "settings": SEED,
                "description": "The team's own hosts, for at most a day",
            },
        )


def make_default(profile: Profile) -> None:
    """Make a profile the default of its project, or of all, in place of the one that was."""
    with transaction.atomic():
        Profile.objects.filter(project=profile.project, is_default=True).exclude(pk=profile.pk).update(is_default=False)
        Profile.objects.filter(pk=profile.pk).update(is_default=True)
