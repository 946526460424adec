"""Profiles as rows: which one a run gets, what the schema forbids, and the seed."""

from __future__ import annotations

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import Invalid
from dstackweb.profiles.models import Profile
from dstackweb.profiles.services import ensure_default_profile, make_default, profile_for, visible

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]


@pytest.fixture
def project() -> Project:
    return Project.objects.create(name="vision")


def add(name: str, project: Project | None = None, *, default: bool = False, **settings: object) -> Profile:
    return Profile.objects.create(name=name, project=project, is_default=default, settings=settings)


def test_without_profiles_a_run_gets_none(project: Project) -> None:
    assert profile_for(project, None) is None


def test_a_projects_default_overrides_the_deployments(project: Project) -> None:
    add("everyone", default=True)
    chosen = profile_for(project, None)
    assert chosen is not None
    assert chosen.name == "everyone"
    add("ours", project, default=True)
    add("theirs", Project.objects.create(name="other"), default=True)
    chosen = profile_for(project, None)
    assert chosen is not None
    assert chosen.name == "ours"


def test_a_projects_own_profile_hides_one_of_all_with_its_name(project: Project) -> None:
    add("nightly", max_duration="8h")
    add("nightly", project, max_duration="12h")
    add("other")
    chosen = profile_for(project, "nightly")
    assert chosen is not None
    assert chosen.fields.max_duration == 12 * 3600
    assert [profile.project for profile in visible(project)] == [project, None]


def test_an_unknown_profile_is_refused_with_those_there_are(project: Project) -> None:
    add("nightly")
    add("theirs", Project.objects.create(name="other"))
    with pytest.raises(Invalid, match=r"no profile 'theirs'\. Available: nightly") as caught:
        profile_for(project, "theirs")
    assert caught.value.errors == [{"loc": ["profile"], "line": None, "msg": caught.value.detail}]


def test_an_invalid_stored_profile_is_not_reported_as_an_error_of_the_run_file(project: Project) -> None:
    add("old", gone=1)
    with pytest.raises(Invalid, match="'old' is invalid, ask an admin to fix it: unknown key `gone`"):
        profile_for(project, "old")


def test_the_seed_keeps_runs_off_paid_backends_and_ends_them_after_a_day(project: Project) -> None:
    ensure_default_profile()
    chosen = profile_for(project, None)
    assert chosen is not None
    assert (chosen.name, chosen.fields.backends, chosen.fields.max_duration) == ("default", ("hosts",), 86400)


def test_seeding_again_changes_nothing_that_an_admin_did() -> None:
    ensure_default_profile()
    Profile.objects.update(settings={"max_duration": "1h"}, name="short")
    ensure_default_profile()
    assert [(profile.name, profile.settings) for profile in Profile.objects.all()] == [
        ("short", {"max_duration": "1h"})
    ]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("names", [("a", "a"), ("a", "b")])
def test_names_and_defaults_are_unique_in_the_schema(project: Project, own: bool, names: tuple[str, str]) -> None:
    where = project if own else None
    add(names[0], where, default=names[0] != names[1])
    with pytest.raises(IntegrityError), transaction.atomic():
        add(names[1], where, default=names[0] != names[1])


def test_the_default_changes_hands_in_its_own_project_only(project: Project) -> None:
    everyone, first, second = (
        add("everyone", default=True),
        add("first", project, default=True),
        add("second", project),
    )
    make_default(second)
    make_default(second)
    for profile, is_default in ((everyone, True), (first, False), (second, True)):
        profile.refresh_from_db()
        assert profile.is_default is is_default


def test_invalid_settings_are_an_error_at_their_field() -> None:
    with pytest.raises(ValidationError) as caught:
        Profile(name="x", settings={"max_duration": "soon", "comands": 1}).full_clean()
    assert len(caught.value.message_dict["settings"]) == 2
    with pytest.raises(ValidationError) as caught:
        Profile(name="x", settings=["a"]).full_clean()
    assert "mapping" in caught.value.message_dict["settings"][0]
