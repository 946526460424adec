"""Tokens expire, and may do no more than their scope and project allow, whatever their user may."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from dstackweb.accounts import services, tokens
from dstackweb.accounts.access import allows, limited
from dstackweb.accounts.models import ApiToken, Project, Role, TokenLimit, TokenScope, User
from dstackweb.lib.errors import Invalid, NotFound
from tests.factories import make_project, make_run, make_user
from tests.forms import open_form, submit

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]
PASSWORD, NEW = "correct horse battery", "a better staple 17"
PAGE = "/account/password/"
RUN = {"config": {"type": "task", "commands": ["true"]}}


@pytest.fixture
def boss(project: Project) -> User:
    """A deployment admin."""
    return make_user("boss", is_superuser=True, password=PASSWORD)


def ask(token: str, method: str, path: str, body: Any = None) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    sent = "" if body is None else json.dumps(body)
    return Client().generic(method, f"/api/v1/{path}", sent, "application/json", headers=headers).status_code


@pytest.mark.parametrize(
    ("scope", "reads", "submits", "manages", "administers"),
    [
        ("read", 200, 403, 403, 403),
        ("submit", 200, 201, 403, 403),
        ("manage", 200, 201, 200, 403),
        ("admin", 200, 201, 200, 200),
    ],
)
def test_a_scope_limits_even_a_deployment_admin(
    project: Project, boss: User, scope: str, reads: int, submits: int, manages: int, administers: int
) -> None:
    _row, token = services.create_token(boss, "ci", scope=scope)
    assert ask(token, "GET", "projects/main/runs") == reads
    assert ask(token, "POST", "projects/main/runs", RUN) == submits
    assert ask(token, "PATCH", "projects/main/queues/default", {"paused": True}) == manages
    assert ask(token, "GET", "backends") == administers
    assert ask(token, "GET", "audit") == administers


def test_a_scope_gives_nobody_more_than_their_role(project: Project, member: User) -> None:
    _row, token = services.create_token(member, "ci", scope="admin")
    assert ask(token, "PATCH", "projects/main/queues/default", {"paused": True}) == 403


def test_a_members_read_token_cannot_stop_their_own_run(project: Project, member: User) -> None:
    run = make_run(project, member)
    _row, token = services.create_token(member, "dashboard", scope="read")
    assert ask(token, "POST", f"projects/main/runs/{run.name}/stop") == 403
    run.refresh_from_db()
    assert run.status == "submitted"


def test_a_token_for_one_project_sees_no_other(project: Project, boss: User) -> None:
    make_project("other")
    _row, token = services.create_token(boss, "ci", project=project)
    assert ask(token, "GET", "projects/main/runs") == 200
    assert ask(token, "GET", "projects/other/runs") == 404
    assert ask(token, "GET", "backends") == 403
    answer = Client().get("/api/v1/projects", headers={"Authorization": f"Bearer {token}"}).json()
    assert answer["items"] == [{"name": "main", "role": "admin"}]


def test_what_the_api_says_of_the_tokens_user_is_limited_too(project: Project, boss: User) -> None:
    _row, token = services.create_token(boss, "ci", scope="submit")
    client = Client(headers={"Authorization": f"Bearer {token}"})
    assert client.get("/api/v1/user").json() == {"username": "boss", "is_admin": False}
    assert client.get("/api/v1/projects").json()["items"] == [{"name": "main", "role": "member"}]


def test_an_expired_token_signs_nobody_in(boss: User, monkeypatch: pytest.MonkeyPatch) -> None:
    now = timezone.now()
    _row, token = services.create_token(boss, "ci", expires_at=now + timedelta(days=7))
    assert tokens.authenticate_token(token) == boss
    for days, user in ((6.999, boss), (7, None), (7.001, None)):
        monkeypatch.setattr(timezone, "now", lambda days=days: now + timedelta(days=days))
        assert tokens.authenticate_token(token) == user


def test_a_token_for_a_project_of_others_is_refused(member: User) -> None:
    with pytest.raises(NotFound):
        services.create_token(member, "ci", project=make_project("other"))
    with pytest.raises(Invalid):
        services.create_token(member, "ci", scope="everything")
    assert not ApiToken.objects.exists()


def test_the_page_makes_a_limited_token(project: Project, member: User, client: Client) -> None:
    client.force_login(member)
    form = open_form(client, "/account/tokens/", having="scope")
    wanted = {"name": "ci", "scope": "submit", "project": project.pk, "days": "30"}
    page = form.send(wanted).content.decode()
    row = ApiToken.objects.get()
    assert (row.scope, row.project) == ("submit", project)
    assert row.expires_at is not None
    assert abs(row.expires_at - timezone.now() - timedelta(days=30)) < timedelta(hours=1)
    assert "read and submit" in page
    forged = form.filled(wanted) | {"project": make_project("other").pk}  # which the page doesn't offer
    assert client.post("/account/tokens/create/", forged).status_code == 422
    assert ApiToken.objects.count() == 1


def test_a_changed_password_revokes_all_tokens_when_asked_to(boss: User, client: Client) -> None:
    made = [services.create_token(boss, name)[1] for name in ("laptop", "ci")]
    client.force_login(boss)
    submit(client, PAGE, {"old_password": PASSWORD, "new_password1": NEW, "new_password2": NEW})
    assert [tokens.authenticate_token(token) for token in made] == [boss, boss]
    change = {"old_password": NEW, "new_password1": PASSWORD, "new_password2": PASSWORD}
    submit(client, PAGE, {**change, "revoke_tokens": True})
    assert [tokens.authenticate_token(token) for token in made] == [None, None]


def test_a_wrong_old_password_revokes_nothing(boss: User, client: Client) -> None:
    _row, token = services.create_token(boss, "laptop")
    client.force_login(boss)
    change = {"old_password": "wrong", "new_password1": NEW, "new_password2": NEW}
    submit(client, PAGE, {**change, "revoke_tokens": True})
    assert tokens.authenticate_token(token) == boss


@pytest.mark.parametrize("role", Role.values)
@pytest.mark.parametrize("scope", TokenScope)
def test_a_limit_is_the_lower_of_both(role: str, scope: TokenScope) -> None:
    user = User()
    user.token_limit = TokenLimit(scope, None)
    found = limited(user, 1, role)
    assert found is not None
    assert found in (role, scope.role)
    assert allows(role, found)
    assert allows(scope.role, found)
    user.token_limit = TokenLimit(scope, 2)
    assert limited(user, 1, role) is None
