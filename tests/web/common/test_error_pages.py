"""What people read when a request fails for no reason of theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import InterfaceError, OperationalError
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.runs import selectors


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (OperationalError("the connection is lost"), 503, "The database is not responding"),
        (InterfaceError("connection already closed"), 503, "The database is not responding"),
        (RuntimeError("a bug"), 500, "Something went wrong"),
    ],
)
def test_a_page_says_whether_the_database_is_away_or_the_server_is_wrong(
    project: Project,
    ann: User,
    as_user: Callable[[User], Client],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    told: str,
) -> None:
    def fail(*_args: object, **_keys: object) -> None:
        raise error

    monkeypatch.setattr(selectors, "find_run", fail)
    client = as_user(ann)
    client.raise_request_exception = False
    page = client.get("/p/main/runs/hello/")
    assert page.status_code == status
    assert told in page.content.decode()
    assert page.headers.get("Retry-After") == ("5" if status == 503 else None)
