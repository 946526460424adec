"""Two people or two processes at the same moment, on real connections: one wins, and the other gets an error."""

from __future__ import annotations

import pytest
from pytest_django import Settings

from dstackweb.accounts import services
from dstackweb.accounts.bootstrap import bootstrap
from dstackweb.accounts.models import ApiToken, Membership, Project, User
from dstackweb.lib.errors import Conflict, Invalid
from tests.accounts.races import all_read_before_any_writes, at_once
from tests.factories import join, make_user, project_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.both_sides]
PASSWORD = "correct horse battery"


@pytest.fixture
def project() -> Project:
    return project_of(make_user("ada"), "vision")


def test_of_two_concurrent_users_of_one_invite_one_joins(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    _row, token = services.invite(project, User.objects.get(username="ada"), "member")
    all_read_before_any_writes(monkeypatch, "dstackweb.accounts.services.open_invite", 2)
    outcomes = at_once(
        lambda: services.accept_invite(token, "grace", PASSWORD),
        lambda: services.accept_invite(token, "linus", PASSWORD),
    )
    assert {type(outcome) for outcome in outcomes} == {Membership, Conflict}
    assert User.objects.count() == 2
    assert project.memberships.count() == 2


def test_two_invites_cannot_make_one_name_twice(project: Project) -> None:
    ada = User.objects.get(username="ada")
    tokens = [services.invite(project, ada, "member")[1] for _invite in range(2)]
    outcomes = at_once(*[lambda token=token: services.accept_invite(token, "grace", PASSWORD) for token in tokens])
    assert {type(outcome) for outcome in outcomes} == {Membership, Invalid}
    assert User.objects.filter(username="grace").count() == 1


def test_of_two_concurrent_uses_of_one_login_link_one_signs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    token = services.make_login_link(make_user("ada"))
    all_read_before_any_writes(monkeypatch, "dstackweb.accounts.services.open_login_link", 2)
    outcomes = at_once(*[lambda: services.use_login_link(token)] * 2)
    assert {type(outcome) for outcome in outcomes} == {User, Conflict}


def test_two_admins_who_remove_each_other_leave_one(project: Project) -> None:
    ada = User.objects.get(username="ada")
    bob = make_user("bob")
    for _round in range(5):
        Membership.objects.all().delete()
        join(project, ada, "admin")
        join(project, bob, "admin")
        outcomes = at_once(
            lambda: services.remove_member(project, ada), lambda: services.set_role(project, bob, "viewer")
        )
        assert len([outcome for outcome in outcomes if isinstance(outcome, Conflict)]) == 1
        assert Membership.objects.filter(role="admin").count() == 1


@pytest.mark.parametrize("given", ["", "given-token-0123456789"])
def test_two_concurrent_first_starts_create_one_admin_and_one_gets_the_password(settings: Settings, given: str) -> None:
    settings.DSTACKWEB_ADMIN_PASSWORD = ""
    settings.DSTACKWEB_ADMIN_TOKEN = given
    outcomes = at_once(*[bootstrap] * 3)
    assert sorted(outcome.created for outcome in outcomes) == [False, False, True]
    (password,) = {outcome.password for outcome in outcomes} - {None}
    assert User.objects.get().check_password(password)
    assert Project.objects.get().memberships.count() == 1
    assert ApiToken.objects.filter(revoked_at=None).count() == bool(given)


def test_a_secret_set_twice_concurrently_is_one_row(project: Project) -> None:
    ada = User.objects.get(username="ada")
    values = ("hf_abcdefghij", "hf_klmnopqrst")
    outcomes = at_once(*[lambda value=value: services.set_secret(project, "KEY", value, by=ada) for value in values])
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert services.secret_values(project)["KEY"] in values
