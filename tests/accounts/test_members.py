"""Projects, roles and invites."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dstackweb.accounts import services
from dstackweb.accounts.access import role_in
from dstackweb.accounts.models import Invite, Project, User
from dstackweb.lib.errors import Conflict, DomainError, Invalid, NotFound
from tests.factories import join, make_user, project_of

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
PASSWORD = "correct horse battery"


@pytest.fixture
def admin() -> User:
    return make_user("ada")


@pytest.fixture
def project(admin: User) -> Project:
    return project_of(admin, "vision")


def test_a_role_is_changed_and_a_member_removed(project: Project) -> None:
    bob = join(project, make_user("bob"))
    services.set_role(project, bob, "manager")
    assert role_in(project, bob) == "manager"
    services.remove_member(project, bob)
    assert role_in(project, bob) is None


def test_the_last_admin_cannot_be_demoted_or_removed(project: Project, admin: User) -> None:
    join(project, make_user("bob"), "manager")
    join(project, make_user("gone", is_active=False), "admin")
    with pytest.raises(Conflict, match="last admin"):
        services.set_role(project, admin, "member")
    with pytest.raises(Conflict, match="last admin"):
        services.remove_member(project, admin)
    assert role_in(project, admin) == "admin"
    services.set_role(project, admin, "admin")


def test_one_of_two_admins_may_be_removed(project: Project, admin: User) -> None:
    join(project, make_user("bob"), "admin")
    services.remove_member(project, admin)
    assert role_in(project, admin) is None


def test_unknown_roles_and_nonmembers_are_refused(project: Project, admin: User) -> None:
    with pytest.raises(Invalid, match="Unknown role owner"):
        services.set_role(project, admin, "owner")
    with pytest.raises(Invalid):
        services.invite(project, admin, "owner")
    for change in (
        lambda: services.set_role(project, make_user(), "member"),
        lambda: services.remove_member(project, make_user()),
    ):
        with pytest.raises(NotFound):
            change()


def test_an_invite_creates_an_account_with_its_role(project: Project, admin: User) -> None:
    row, token = services.invite(project, admin, "viewer")
    membership = services.accept_invite(token, "grace", PASSWORD)
    assert (membership.user.username, membership.project, membership.role) == ("grace", project, "viewer")
    assert membership.user.check_password(PASSWORD)
    assert not membership.user.is_staff
    row.refresh_from_db()
    assert row.used_by == membership.user


def test_an_invite_adds_an_existing_account(project: Project, admin: User) -> None:
    _row, token = services.invite(project, admin, "manager")
    bob = make_user("bob")
    services.join_by_invite(token, bob)
    assert role_in(project, bob) == "manager"


def test_an_invite_is_stored_only_as_a_digest(project: Project, admin: User) -> None:
    row, token = services.invite(project, admin, "member")
    stored = Invite.objects.filter(pk=row.pk).values().get()
    assert token.startswith("inv_")
    assert not any(token in str(value) for value in stored.values())


def test_a_used_expired_withdrawn_or_unknown_invite_is_refused_with_its_reason(project: Project, admin: User) -> None:
    _row, used = services.invite(project, admin, "member")
    services.accept_invite(used, "grace", PASSWORD)
    _row, expired = services.invite(project, admin, "member", ttl=timedelta(0))
    row, withdrawn = services.invite(project, admin, "member")
    services.withdraw_invite(project, row.pk)
    for token, words in {used: "already used", expired: "expired", withdrawn: "withdrawn", "inv_x": "exist"}.items():
        with pytest.raises(DomainError, match=words):
            services.accept_invite(token, "henry", PASSWORD)
        with pytest.raises(DomainError, match=words):
            services.join_by_invite(token, make_user())
    assert not User.objects.filter(username="henry").exists()


def test_an_invite_is_void_once_its_creator_may_no_longer_invite(project: Project, admin: User) -> None:
    bob = join(project, make_user("bob"), "admin")
    _row, token = services.invite(project, bob, "admin")
    services.set_role(project, bob, "member")
    with pytest.raises(Conflict, match="no longer an admin"):
        services.accept_invite(token, "grace", PASSWORD)


def test_a_refused_account_leaves_the_invite_unused(project: Project, admin: User) -> None:
    _row, token = services.invite(project, admin, "member")
    for username, password, field in [
        ("ADA", PASSWORD, "username"),
        ("", PASSWORD, "username"),
        ("two words", PASSWORD, "username"),
        ("grace", "short", "password"),
        ("grace", "", "password"),
        ("grace-hopper", "grace-hopper", "password"),
    ]:
        with pytest.raises(Invalid) as refused:
            services.accept_invite(token, username, password)
        assert {error["loc"][0] for error in refused.value.errors} == {field}
    services.accept_invite(token, "grace", PASSWORD)


def test_all_errors_of_a_new_account_are_reported_together(project: Project, admin: User) -> None:
    _row, token = services.invite(project, admin, "member")
    with pytest.raises(Invalid) as refused:
        services.accept_invite(token, "ada", "short")
    assert {error["loc"][0] for error in refused.value.errors} == {"username", "password"}


def test_a_member_who_opens_an_invite_keeps_their_role_and_the_invite_stays_unused(
    project: Project, admin: User
) -> None:
    _row, token = services.invite(project, admin, "viewer")
    with pytest.raises(Conflict, match="already"):
        services.join_by_invite(token, admin)
    assert role_in(project, admin) == "admin"
    services.accept_invite(token, "grace", PASSWORD)


def test_an_invite_of_another_project_cannot_be_withdrawn(project: Project, admin: User) -> None:
    row, token = services.invite(project, admin, "member")
    with pytest.raises(NotFound):
        services.withdraw_invite(project_of(admin, "speech"), row.pk)
    assert services.open_invite(token) == row
