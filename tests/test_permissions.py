"""Every address, with every role: a new page or operation without a permission fails here.

Addresses are found by the resolver and in the OpenAPI document. Strangers get 404 whatever they send. Who may see but
not change gets 403 for a valid body: a new operation that needs one needs a line in BODIES. Forms are posted by hand,
since no page shows them to those who may not send them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from django.test import Client
from django.urls import get_resolver

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import create_token
from dstackweb.api.app import api
from dstackweb.audit.models import AuditEntry, AuditKind
from dstackweb.runs.models import Move, Run, RunEvent, Sweep
from tests.browser import cloud_demo, demo
from tests.factories import join, make_project, make_user
from tests.test_every_address import pages

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]
CHANGES = ("post", "put", "patch", "delete")
OF_ALL = {
    "/", "/favicon.ico", "/login/", "/logout/", "/healthz", "/readyz", "/metrics", "/login/{token}/",
    "/invite/{token}/", "/login/passkey/", "/login/code/", "/login/sso/", "/login/sso/callback/",
    "/login/sso/cancelled/", "/language/", "/password/forgot/", "/password/{uidb64}/{token}/",
}  # fmt: skip
"""Pages without a project, for everybody or with a secret in the address."""
DOWNLOADS = "/api/v1/tracking.zip"
"""The client of the tasks API: nobody's secret."""
REDIRECT = "/p/{project}/offers/cache/"
"""An old address, which names no project's data."""
READS = {
    "POST /api/v1/projects/{project}/runs/plan", "POST /api/v1/projects/{project}/utilization/what-if",
    "POST /p/{project}/utilization/",
}  # fmt: skip
"""Requests with a body that change nothing: viewers may send them."""
REDIRECTED = {f"/p/{{project}}/queues/{{queue}}/{name}/" for name in ("change", "preview", "undo")}
"""Without scripts the answer is the queue's page, which says what was refused."""
OWN = {
    "POST /p/{project}/members/<int:user_id}/remove/",
    "POST /p/{project}/queues/{queue}/views/",
    "POST /p/{project}/queues/{queue}/views/<int:view}/default/",
    "POST /api/v1/projects/{project}/views",
}
"""What a viewer may do to themselves."""
_LIMITS = dict.fromkeys(
    (
        *("max_running", "max_gpus", "max_running_per_user", "max_gpus_per_user"),
        *("preempt_points", "preempt_gpu_hours", "cohort", "borrow_gpus", "lend_gpus"),
    ),
    "",
) | {"reclaim": "never"}
BODIES: dict[str, dict[str, Any]] = {
    "/p/{project}/queues/{queue}/settings/": {
        "ageing_minutes": "1",
        "fair_share_minutes": "",
        "fair_share_half_life_days": "7",
        "draining": "true",
        "paused": "true",
        **_LIMITS,
    },
    "/p/{project}/queues/{queue}/pause/": {"paused": "yes"},
    "/p/{project}/queues/{queue}/change/": {"do": "stop", "stop": "1", "run": "1.x"},
    "/p/{project}/queues/{queue}/undo/": {"move": "1"},
    "/p/{project}/queues/{queue}/transfer/": {"name": "train-llama-sft", "to": "night"},
    "/p/{project}/utilization/observe/": {"observe_only": "yes"},
    "/api/v1/projects/{project}/runs": {"config": {"type": "task", "commands": ["true"]}},
    "/api/v1/projects/{project}/runs/{name}/extend": {"for": "1h"},
    "/api/v1/projects/{project}/runs/{name}/keep": {"reason": "a checkpoint"},
    "/api/v1/projects/{project}/sweeps/{name}": {"priority": 60},
    "/p/{project}/sweeps/{sweep}/priority/": {"priority": "60"},
    "/api/v1/projects/{project}/utilization": {"observe_only": True},
    "/api/v1/projects/{project}/holds": {"for": "1h", "gpu": "1"},
    "/api/v1/projects/{project}/queues": {"name": "second"},
    "/api/v1/hosts/{name}/gone": {"reason": "it burnt down"},
    "/api/v1/backends/{name}": {"type": "aws", "config": {"regions": ["eu-west-1"]}},
}


class Address(NamedTuple):
    template: str
    path: str


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What stands in addresses, all of the project `main`, of others than the callers."""
    project, mia = demo.build()
    demo.sweep(project, mia)
    cloud_demo.build(project, monkeypatch)
    return {
        "project": "main", "queue": "default", "run": "train-llama-sft", "host": "gpu-box-1", "name": "train-llama-sft",
        "sweep": "lr-grid",
        "uuid": "GPU-1", "form": "csv", "token": "none", "user_id": mia.pk, "token_id": 1, "invite_id": 1, "rest": "x",
        "sha256": "0" * 64, "instance": "00000000-0000-0000-0000-000000000001", "session_id": 1,
        "uid": "00000000-0000-0000-0000-000000000001",
        "handle": "1", "filename": "x", "number": 1, "job": "1", "prefix": "train-baseline",
    }  # fmt: skip


def filled(template: str, names: dict[str, Any]) -> str:
    template = template.replace("/sweeps/{name}", "/sweeps/{sweep}")
    return re.sub(r"(?:<\w+:|\{)(\w+)[>}]", lambda found: str(names.get(found[1], "1")), template)


def project_pages(names: dict[str, Any]) -> list[Address]:
    templates = [one for one in pages(get_resolver().url_patterns) if "{project}" in one and one != REDIRECT]
    found = [Address(one, filled(one, names)) for one in templates]
    assert len(found) > 50
    return found


def operations() -> Iterator[tuple[str, str]]:
    """Method and template of each operation for users; runners and agents have tokens of their own."""
    for template, methods in api.get_openapi_schema()["paths"].items():
        for method in methods:
            if not template.startswith("/api/v1/runner"):
                yield method, template


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def with_token(user: User) -> Client:
    return Client(headers={"Authorization": f"Bearer {create_token(user, 'test')[1]}"})


def send(client: Client, method: str, template: str, path: str) -> int:
    body = json.dumps(BODIES.get(template, {}))
    more: dict[str, Any] = {} if method in ("get", "head") else {"content_type": "application/json", "data": body}
    return getattr(client, method)(path, **more).status_code


def post(client: Client, page: Address) -> int | None:
    """The status; None where the page is only read, and answers as to a GET."""
    code = client.post(page.path, BODIES.get(page.template, {})).status_code
    return None if code in (200, 302) and client.get(page.path).status_code == code else code


def state() -> list[Any]:
    """What a change of a run, or one that is audited, leaves behind."""
    sweeps = list(Sweep.objects.order_by("pk").values())
    return [
        list(Run.objects.order_by("pk").values()),
        sweeps,
        RunEvent.objects.count(),
        Move.objects.count(),
        _audited(),
    ]


def _audited() -> int:
    return AuditEntry.objects.exclude(kind__in=(AuditKind.TOKEN, AuditKind.USER, AuditKind.MEMBER)).count()


def test_nobody_who_is_not_signed_in_gets_past_the_login(names: dict[str, Any]) -> None:
    wrong = {}
    for template in pages(get_resolver().url_patterns):
        if template in OF_ALL | {REDIRECT} or template.startswith("/api/"):
            continue
        for method in ("get", "post"):
            answer = getattr(Client(), method)(filled(template, names))
            to_login = answer.status_code == 302 and answer["Location"].startswith("/login/?next=")
            if not to_login and answer.status_code != 405:
                wrong[method, template] = answer.status_code
    for method, template in operations():
        if (code := send(Client(), method, template, filled(template, names))) != 401 and template != DOWNLOADS:
            wrong[method, template] = code
    assert not wrong, "\n".join(f"{key}: {code}" for key, code in wrong.items())


def test_members_of_another_project_find_nothing(names: dict[str, Any]) -> None:
    stranger = join(make_project("elsewhere"), make_user("stranger"), "admin")
    wrong = {}
    page, program = signed_in(stranger), with_token(stranger)
    for one in project_pages(names):
        for method in ("get", "post"):
            if (code := getattr(page, method)(one.path).status_code) not in (404, 405):
                wrong[method, one.template] = code
    for method, template in operations():
        if "{project}" in template and (code := send(program, method, template, filled(template, names))) != 404:
            wrong[method, template] = code
    assert not wrong, "\n".join(f"{key}: {code}" for key, code in wrong.items())


ACCOUNT = "/api/v1/user/"
"""What everybody changes of themselves."""


def test_viewers_change_nothing(names: dict[str, Any]) -> None:
    viewer = join(Project.objects.get(name="main"), make_user("viewer"), "viewer")
    page, program, wrong = signed_in(viewer), with_token(viewer), {}
    before = state()
    for one in project_pages(names):
        refused = (303, 403, 404, 405) if one.template in REDIRECTED else (403, 404, 405)
        if f"POST {one.template}" not in READS | OWN and (code := post(page, one)) not in (None, *refused):
            wrong["post", one.template] = code
    for method, template in operations():
        if method in CHANGES and f"{method.upper()} {template}" not in READS | OWN and not template.startswith(ACCOUNT):
            code = send(program, method, template, filled(template, names))
            if code not in (403, 404):
                wrong[method, template] = code
    assert not wrong, "\n".join(f"{key}: {code}" for key, code in wrong.items())
    assert state() == before


def test_only_deployment_admins_change_what_belongs_to_no_project(names: dict[str, Any]) -> None:
    admin = join(Project.objects.get(name="main"), make_user("project-admin"), "admin")
    program, before = with_token(admin), state()
    answers = {
        (method, template): send(program, method, template, filled(template, names))
        for method, template in operations()
        if method in CHANGES and "{project}" not in template and not template.startswith(ACCOUNT)
    }
    assert answers
    assert {key: code for key, code in answers.items() if code not in (403, 404)} == {}
    assert state() == before


def test_members_manage_nothing(names: dict[str, Any]) -> None:
    """Settings, people, secrets and hosts are their managers' and admins'."""
    member = join(Project.objects.get(name="main"), make_user("member"), "member")
    page, before, wrong = signed_in(member), state(), {}
    managed = (
        "/members/", "/secrets/", "/hosts/", "/settings/", "/pause/", "/queues/", "/observe/", "/audit",
        "/notifications/",
    )  # fmt: skip
    for one in project_pages(names):
        if any(part in one.template for part in managed) and one.template not in REDIRECTED:
            code = post(page, one)
            if code not in (None, 403, 404, 405) and f"POST {one.template}" not in OWN:
                wrong[one.template] = code
    assert not wrong, wrong
    assert state() == before


def test_no_page_takes_a_form_without_its_csrf_token(names: dict[str, Any]) -> None:
    root = Client(enforce_csrf_checks=True)
    root.force_login(User.objects.get(username="root"))
    before, wrong = state(), {}
    for template in pages(get_resolver().url_patterns):
        if not template.startswith(("/api/", "/healthz", "/readyz", "/metrics")):
            code = root.post(filled(template, names), BODIES.get(template, {})).status_code
            if code not in (403, 405):
                wrong[template] = code
    assert not wrong, wrong
    assert state() == before
