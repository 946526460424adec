"""What people read when a request fails for no reason of theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.conf import LazySettings
from django.db import InterfaceError, OperationalError
from django.test import Client

from dstackweb.accounts.models import Project, User
from dstackweb.runs import selectors
from tests.forms import open_form


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (OperationalError("the connection is lost"), 503, "The database is not responding"),
        (InterfaceError("connection already closed"), 503, "The database is not responding"),
        (RuntimeError("a bug"), 500, "Something went wrong"),
    ],
)
def test_an_error_page_distinguishes_a_database_outage_from_an_internal_error(
    project: Project,
    ann: User,
    as_user: Callable[[User], Client],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    shown: str,
) -> None:
    def fail(*_args: object, **_keys: object) -> None:
        raise error

    monkeypatch.setattr(selectors, "find_run", fail)
    client = as_user(ann)
    client.raise_request_exception = False
    page = client.get("/p/main/runs/hello/")
    assert page.status_code == status
    assert shown in page.content.decode()
    assert page.headers.get("Retry-After") == ("5" if status == 503 else None)


@pytest.mark.parametrize(("path", "field"), [("/login/", "username"), ("/p/main/submit/", "config")])
def test_a_form_that_is_too_large_is_refused_on_a_page(
    ann: User, as_user: Callable[[User], Client], settings: LazySettings, path: str, field: str
) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    form = open_form(as_user(ann) if "/p/" in path else Client(), path, having=field)
    page = form.send({field: "x" * 2000}, button="Submit" if field == "config" else "", scripts=False)
    assert page.status_code == 413
    assert "Nothing was changed" in page.content.decode()


def test_a_host_that_is_not_ours_is_refused_as_its_client_reads_it(db: None) -> None:
    client = Client(headers={"Host": "evil.example"})
    page, answer = client.get("/login/"), client.get("/api/v1/projects")
    assert (page.status_code, page["Content-Type"].partition(";")[0]) == (400, "text/html")
    assert (answer.status_code, answer.json()) == (400, {"detail": "the request can't be read"})
