"""The first start, and every other one."""

from __future__ import annotations

from io import StringIO
from urllib.parse import urlsplit

import pytest
from django.core.management import call_command
from pytest_django import Settings

from dstackweb.accounts import services
from dstackweb.accounts.access import role_in
from dstackweb.accounts.bootstrap import bootstrap
from dstackweb.accounts.models import ApiToken, Project, User
from dstackweb.accounts.tokens import authenticate_token
from dstackweb.lib.errors import Conflict, Invalid
from tests.factories import make_user

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]


@pytest.fixture(autouse=True)
def nothing_given(settings: Settings) -> None:
    settings.DSTACKWEB_ADMIN_PASSWORD = ""
    settings.DSTACKWEB_ADMIN_TOKEN = ""


def test_the_first_start_makes_an_admin_with_a_password_and_the_project_main() -> None:
    first = bootstrap()
    admin = User.objects.get()
    assert first.created
    assert first.username == admin.username == "admin"
    assert first.password
    assert admin.check_password(first.password)
    assert admin.is_superuser
    assert role_in(Project.objects.get(name="main"), admin) == "admin"


def test_the_password_is_returned_once_and_is_in_no_repr() -> None:
    first = bootstrap()
    again = bootstrap()
    assert str(first.password) not in repr(first)
    assert (again.created, again.username, again.password) == (False, "admin", None)


def test_a_configured_password_is_used_and_not_returned(settings: Settings) -> None:
    settings.DSTACKWEB_ADMIN_PASSWORD = "given at the start"
    first = bootstrap()
    assert (first.created, first.password) == (True, None)
    assert User.objects.get().check_password("given at the start")


def test_a_configured_password_is_applied_at_every_start_and_keeps_sessions_if_unchanged(settings: Settings) -> None:
    bootstrap()
    settings.DSTACKWEB_ADMIN_PASSWORD = "given at the start"
    bootstrap()
    stored = User.objects.get().password
    assert User.objects.get().check_password("given at the start")
    bootstrap()
    assert User.objects.get().password == stored


def test_a_restart_keeps_changes_made_by_users(settings: Settings) -> None:
    bootstrap()
    User.objects.update(username="root")
    Project.objects.update(name="vision")
    again = bootstrap()
    assert (again.created, again.username) == (False, "root")
    assert [project.name for project in Project.objects.all()] == ["vision"]


def test_the_environments_token_is_the_first_admins(settings: Settings) -> None:
    settings.DSTACKWEB_ADMIN_TOKEN = "a-token-that-somebody-chose"
    for _start in range(2):
        bootstrap()
        user = authenticate_token("a-token-that-somebody-chose")
        assert user
        assert user.username == "admin"
    assert ApiToken.objects.get().name == "environment"


def test_a_changed_token_replaces_the_old_one_and_may_be_set_again(settings: Settings) -> None:
    tokens = ["first-token-0123456789", "second-token-0123456789", "first-token-0123456789"]
    for current in tokens:
        settings.DSTACKWEB_ADMIN_TOKEN = current
        bootstrap()
        assert [bool(authenticate_token(token)) for token in tokens[:2]] == [token == current for token in tokens[:2]]


def test_a_changed_environment_token_leaves_other_tokens_alone(settings: Settings) -> None:
    bootstrap()
    admin = User.objects.get()
    _row, own = services.create_token(admin, "laptop")
    settings.DSTACKWEB_ADMIN_TOKEN = "first-token-0123456789"
    bootstrap()
    settings.DSTACKWEB_ADMIN_TOKEN = "second-token-0123456789"
    bootstrap()
    assert authenticate_token(own) == admin


def test_an_admin_name_that_another_user_has_is_an_error(settings: Settings) -> None:
    make_user("admin")
    with pytest.raises(Conflict, match="createsuperuser"):
        bootstrap()


def test_login_link_prints_an_address_that_signs_the_admin_in_once(settings: Settings) -> None:
    settings.DSTACKWEB_API_URL = "https://gpus.example.org"
    bootstrap()
    out = StringIO()
    call_command("login_link", stdout=out)
    url = urlsplit(out.getvalue().strip())
    assert (url.scheme, url.netloc) == ("https", "gpus.example.org")
    assert services.use_login_link(url.path.split("/")[2]).username == "admin"


def test_login_link_works_for_any_user_and_fails_for_a_missing_one() -> None:
    with pytest.raises(SystemExit, match="no admin yet"):
        call_command("login_link")
    with pytest.raises(SystemExit, match="no user bob"):
        call_command("login_link", user="bob")
    make_user("bob", is_active=False)
    with pytest.raises(SystemExit, match="not active"):
        call_command("login_link", user="bob")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PASSWORD", "short"), ("PASSWORD", "password"), ("PASSWORD", "12345678901"), ("PASSWORD", "admin"),
        ("TOKEN", "secret"), ("TOKEN", "a" * 64),
    ],
)  # fmt: skip
def test_a_weak_password_or_token_is_refused_and_changes_nothing(settings: Settings, name: str, value: str) -> None:
    setattr(settings, f"DSTACKWEB_ADMIN_{name}", value)
    with pytest.raises(Invalid, match=f"DSTACKWEB_ADMIN_{name} is too weak"):
        bootstrap()
    assert not User.objects.exists()
