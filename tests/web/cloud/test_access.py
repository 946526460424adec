"""Who may see and do what about clouds, over pages and API, and that no secret of a backend is anywhere there."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import create_token
from dstackweb.backends import services
from dstackweb.backends.models import Backend, Instance, InstanceStatus
from dstackweb.runs.models import RunEvent
from tests.factories import join, make_project, make_user, scraper

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
KEY_ID = "AKIAIOSFODNN7EXAMPLE"
PEOPLE = ("anonymous", "outsider", "viewer", "member", "manager", "admin", "root")
PAGES = ("offers/", "offers/quotas/", "machines/")
LOOKS = ("projects/main/offers", "backends/aws/quotas", "backends/aws/cache")
ADMINS_LOOKS = ("backends", "backends/aws")


@pytest.fixture
def backend(project: Project) -> Backend:
    credentials = {"access_key_id": KEY_ID, "secret_access_key": SECRET}
    return services.put("aws", "aws", {"regions": ["us-east-1"], "credentials": credentials})[0]


@pytest.fixture
def people(project: Project) -> dict[str, User | None]:
    found: dict[str, User | None] = {
        role: join(project, make_user(role), role) for role in ("viewer", "member", "manager", "admin")
    }
    # Somebody else's admin is nobody here.
    outsider = join(make_project("elsewhere"), make_user("outsider"), "admin")
    root = make_user("root", is_superuser=True, is_staff=True)
    return {"anonymous": None, "outsider": outsider, **found, "root": root}


def browser(user: User | None) -> Client:
    client = Client(enforce_csrf_checks=False)
    if user is not None:
        client.force_login(user)
    return client


def api(user: User | None, method: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {create_token(user, uuid4().hex)[1]}"} if user else {}
    data = b"" if body is None else json.dumps(body).encode()
    return Client().generic(method, f"/api/v1/{path}", data, content_type="application/json", headers=headers)


def machine(project: Project, backend: Backend) -> Instance:
    return Instance.objects.create(
        project=project, backend=backend, region="us-east-1", instance_type="g5.xlarge", status=InstanceStatus.RUNNING
    )


def statuses(people: dict[str, User | None], ask: Any) -> list[int]:
    return [ask(people[name]).status_code for name in PEOPLE]


def test_pages_are_for_the_projects_people(people: dict[str, User | None], backend: Backend) -> None:
    for page in PAGES:
        assert statuses(people, lambda user, page=page: browser(user).get(f"/p/main/{page}")) == [302, 404] + [200] * 5


def test_a_refresh_is_for_members(people: dict[str, User | None], backend: Backend) -> None:
    """Also by a request that the pages of others don't send."""
    by_page = statuses(people, lambda user: browser(user).post("/p/main/offers/refresh/"))
    assert by_page == [302, 404, 403, 302, 302, 302, 302]
    by_api = statuses(people, lambda user: api(user, "POST", "projects/main/offers/refresh", {}))
    assert by_api == [401, 404, 403, 200, 200, 200, 200]


def test_only_admins_of_the_project_terminate_instances(
    people: dict[str, User | None], project: Project, backend: Backend
) -> None:
    """Also by a request that the pages of others don't send."""

    def stop(user: User | None) -> Any:
        return browser(user).post(f"/p/main/machines/{machine(project, backend).pk}/stop/")

    assert statuses(people, stop) == [302, 404, 403, 403, 403, 302, 302]
    theirs = machine(make_project("theirs"), backend)
    assert browser(people["admin"]).post(f"/p/main/machines/{theirs.pk}/stop/").status_code == 404
    theirs.refresh_from_db()
    assert theirs.status == InstanceStatus.RUNNING


def test_the_api_has_the_access_rules_of_the_pages(people: dict[str, User | None], backend: Backend) -> None:
    assert statuses(people, lambda user: api(user, "GET", LOOKS[0])) == [401, 404] + [200] * 5
    for path in LOOKS[1:]:  # of the deployment, for everybody who is signed in
        assert statuses(people, lambda user, path=path: api(user, "GET", path)) == [401] + [200] * 6
    for path in ADMINS_LOOKS:
        assert statuses(people, lambda user, path=path: api(user, "GET", path)) == [401] + [403] * 5 + [200]
    body = {"type": "aws", "config": {"regions": ["us-east-1"]}}
    assert statuses(people, lambda user: api(user, "PUT", "backends/other", body)) == [401] + [403] * 5 + [201]
    assert statuses(people, lambda user: api(user, "DELETE", "backends/other")) == [401] + [403] * 5 + [204]


def test_the_admin_needs_permission_to_change_backends(people: dict[str, User | None], backend: Backend) -> None:
    for path in ("", "add/", f"{backend.pk}/change/", "test/", f"{backend.pk}/test/"):
        got = statuses(people, lambda user, path=path: browser(user).get(f"/admin/backends/backend/{path}"))
        assert got == [302] * 6 + [405 if "test" in path else 200]


def test_posts_need_the_forms_token(people: dict[str, User | None], backend: Backend, project: Project) -> None:
    """Which the page of another site doesn't have."""
    strict = Client(enforce_csrf_checks=True)
    root = people["root"]
    assert root is not None
    strict.force_login(root)
    idle = machine(project, backend)
    for path in ("/p/main/offers/refresh/", f"/p/main/machines/{idle.pk}/stop/", "/admin/backends/backend/test/"):
        assert strict.post(path).status_code == 403


def test_a_backends_secret_is_nowhere(
    people: dict[str, User | None], project: Project, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    root = people["root"]
    shown = [browser(root).get(f"/p/main/{page}").content.decode() for page in (*PAGES, "health/")]
    shown += [api(root, "GET", path).content.decode() for path in (*LOOKS, *ADMINS_LOOKS)]
    shown += [api(root, "GET", "metrics").content.decode(), scraper().get("/metrics").content.decode()]
    shown += [
        browser(root).get(f"/admin/backends/backend/{path}").content.decode() for path in ("", f"{backend.pk}/change/")
    ]
    wrong = {"type": "aws", "config": {**backend.config, "credentials": {"secret_access_key": SECRET, "key": SECRET}}}
    shown += [api(root, "PUT", "backends/aws", wrong).content.decode()]
    shown += [caplog.text, repr(backend), str(backend), repr(list(LogEntry.objects.values()))]
    shown += [repr(list(RunEvent.objects.values()))]
    backend.refresh_from_db()
    for text in shown:
        assert SECRET not in text
        assert backend.secret not in text
    for text in shown[: len(PAGES)]:  # nor is whose key it is for everybody
        assert KEY_ID not in text
