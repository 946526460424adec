from __future__ import annotations

import json
from typing import Any

import pytest
from django.http import HttpResponse
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.accounts.services import create_token
from tests.factories import join, make_user


class Api:
    """A client of the REST API with one user's token."""

    def __init__(self, user: User | None) -> None:
        self.client = Client(raise_request_exception=False)
        self.headers = {"Authorization": f"Bearer {create_token(user, 'test')[1]}"} if user else {}

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> HttpResponse:
        data = b"" if body is None else json.dumps(body).encode()
        return self.client.generic(
            method,
            f"/api/v1/{path}",
            data,
            content_type="application/json",
            headers={**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}},
        )


@pytest.fixture
def api(member: User) -> Api:
    return Api(member)


@pytest.fixture
def stranger(db: None) -> Api:
    return Api(make_user("eve"))


@pytest.fixture
def manager(project: Project) -> Api:
    return Api(join(project, make_user("grace"), "manager"))
