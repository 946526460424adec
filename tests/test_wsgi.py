"""The application as gunicorn calls it, which tests with Django's client don't see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from django.test import RequestFactory

from tests.factories import make_user


@pytest.fixture(autouse=True)
def kept_connection() -> Iterator[None]:
    """A request would close the connection that holds the test's transaction."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


def get(path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a GET."""
    from dstackweb.wsgi import application

    answer: list[Any] = []
    environ = RequestFactory(headers={"Host": "localhost"} | headers).get(path).environ
    body = b"".join(application(environ, lambda status, sent: answer.extend([status, dict(sent)])))
    return int(answer[0].split()[0]), answer[1], body


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/healthz", 200),
        ("/metrics", 200),
        ("/api/v1/openapi.json", 200),
        ("/api/v1/projects", 401),
        ("/api/v1/nothing", 404),
        ("/api/", 404),
    ],
)
def test_programs_are_answered_without_a_session(path: str, status: int) -> None:
    found, headers, _body = get(path)
    assert (found, headers.get("X-Content-Type-Options")) == (status, "nosniff")
    assert "Set-Cookie" not in headers


@pytest.mark.django_db
def test_pages_keep_their_session_and_protection() -> None:
    make_user("mia")
    status, headers, _body = get("/login/")
    assert status == 200
    assert {"Content-Security-Policy", "X-Frame-Options"} <= set(headers)
