"""A form that lacks its field, as no page sends it, changes no setting: neither what it names nor its opposite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.urls import get_resolver

from dstackweb.accounts.models import Membership, Project, User
from dstackweb.backends.models import Host
from dstackweb.gpus.exemptions import set_observe_only
from dstackweb.gpus.models import ProjectPolicies
from dstackweb.runs.models import Queue
from tests.factories import join, make_host, make_user
from tests.test_every_address import pages
from tests.web.conftest import HTMX

SignIn = Callable[[User], Client]
ODD = ({}, {"on": "", "paused": "", "observe_only": ""}, {"on": "1", "paused": "true", "observe_only": "off"})
MEANT = ("leave", "remove", "revoke", "clear")
"""Addresses whose name alone says what is to change."""


@pytest.fixture
def root(project: Project) -> User:
    return join(project, make_user("root", is_superuser=True, is_staff=True), "admin")


def settings_of_all() -> list[Any]:
    rows: list[Any] = []
    for model in (Queue, Host, ProjectPolicies, Project, Membership):
        rows += model._default_manager.order_by("pk").values()
    return rows


@pytest.mark.slow
def test_no_form_without_its_field_changes_a_setting(project: Project, mia: User, root: User, as_user: SignIn) -> None:
    make_host("box-1", draining=True)
    set_observe_only(project, "admin", True)
    Queue.objects.update(paused=True, draining=True, max_gpus=3)
    names = {
        "project": "main",
        "queue": "default",
        "run": "none",
        "sweep": "none",
        "host": "box-1",
        "form": "csv",
        "name": "none",
        "uuid": "none",
    }
    client, before, asked = as_user(root), settings_of_all(), []
    for template in pages(get_resolver().url_patterns):
        address = template.replace("<int:user_id>", str(mia.pk))
        if address.startswith("/p/") and "<" not in address and not any(f"/{word}/" in address for word in MEANT):
            asked.append(address)
            for fields in ODD:
                client.post(address.format_map(names), fields, headers=HTMX)
    assert len(asked) > 40
    assert settings_of_all() == before


@pytest.mark.parametrize("path", ["queues/default/pause/", "utilization/observe/", "hosts/box-1/drain/"])
@pytest.mark.parametrize("headers", [{}, HTMX])
def test_a_missing_field_is_refused_with_its_name(
    project: Project, root: User, as_user: SignIn, path: str, headers: dict[str, str]
) -> None:
    make_host("box-1")
    answer = as_user(root).post(f"/p/main/{path}", {}, headers=headers)
    assert answer.status_code == 422
    assert "nothing was changed" in answer.content.decode() + answer.headers.get("HX-Trigger", "")
