"""Who sees what: the promise that a stranger gets 404."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import AnonymousUser

from dstackweb.accounts.access import allows, project_for, role_in, visible_projects
from dstackweb.lib.errors import Forbidden, NotFound
from tests.factories import join, make_project, make_user

pytestmark = pytest.mark.django_db
ROLES = ["viewer", "member", "manager", "admin"]


def test_each_role_may_do_what_the_ones_before_it_may() -> None:
    for place, role in enumerate(ROLES):
        assert [allows(role, wanted) for wanted in ROLES] == [at <= place for at in range(4)]


def test_people_see_the_projects_they_are_members_of_and_no_others() -> None:
    ada = make_user("ada")
    join(make_project("vision"), ada, "viewer")
    make_project("speech")
    assert [project.name for project in visible_projects(ada)] == ["vision"]


def test_a_superuser_is_admin_of_every_project() -> None:
    root = make_user("root", is_superuser=True)
    project = make_project("vision")
    assert list(visible_projects(root)) == [project]
    assert project_for(root, "vision", "admin") == (project, "admin")


def test_signed_out_and_inactive_users_see_no_project() -> None:
    project = make_project("vision")
    gone = join(project, make_user("gone", is_active=False), "admin")
    inactive_root = make_user("root", is_superuser=True, is_active=False)
    for user in (gone, inactive_root, AnonymousUser()):
        assert not visible_projects(user).exists()
        assert role_in(project, user) is None
        with pytest.raises(NotFound):
            project_for(user, "vision")


def test_a_project_of_others_and_a_missing_one_are_refused_alike() -> None:
    make_project("vision")
    stranger = make_user()
    with pytest.raises(NotFound) as hidden:
        project_for(stranger, "vision")
    with pytest.raises(NotFound) as missing:
        project_for(stranger, "nothing")
    assert hidden.value.detail.replace("vision", "nothing") == missing.value.detail


def test_a_member_with_too_low_a_role_gets_an_error_that_names_the_required_one() -> None:
    ada = join(make_project("vision"), make_user("ada"), "member")
    assert project_for(ada, "vision", "member")[1] == "member"
    with pytest.raises(Forbidden, match="Your role in vision is member; this needs the role manager"):
        project_for(ada, "vision", "manager")
