"""The application as gunicorn calls it, which tests with Django's client don't see."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext

import dstackweb
from dstackweb import web_limits
from dstackweb.accounts.models import Project
from dstackweb.accounts.services import create_token
from dstackweb.audit.models import AuditEntry
from dstackweb.cli.client import VERSION_HEADER
from tests.factories import join, make_user


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
    return send(RequestFactory(headers={"Host": "localhost"} | headers).get(path))


def send(request: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a request."""
    from dstackweb.wsgi import application

    answer: list[Any] = []
    body = b"".join(application(request.environ, lambda status, sent: answer.extend([status, dict(sent)])))
    return int(answer[0].split()[0]), answer[1], body


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/healthz", 200),
        ("/metrics", 401),
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
@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/metrics", "/api/v1/openapi.json", "/api/v1/projects", "/api/x"]
)
def test_no_program_is_refused_as_a_forged_form(path: str) -> None:
    status, headers, body = send(RequestFactory(headers={"Host": "localhost"}).post(path, {"a": 1}))
    assert status != 403 or headers["Content-Type"].startswith("application/json")
    assert b"CSRF" not in body


@pytest.mark.django_db
def test_a_browsers_cookies_count_for_nothing_where_programs_are_answered(project: Project, client: Client) -> None:
    mia = join(project, make_user("mia", is_superuser=True, is_staff=True, language="zh-hans"))
    client.force_login(mia)
    cookies = f"{client.cookies.output(header='', sep=';')}; {django_settings.LANGUAGE_COOKIE_NAME}=zh-hans"
    status, headers, body = get("/api/v1/projects", Cookie=cookies)
    assert (status, b"Send a valid API token" in body) == (401, True)
    assert not {"Set-Cookie", "Content-Security-Policy"} & {*headers}
    assert get("/api/v1/projects", **{"Accept-Language": "zh-CN"})[2] != body
    _row, token = create_token(mia, "ci")
    with CaptureQueriesContext(connection) as queries:
        status, headers, _body = get("/api/v1/projects", Cookie=cookies, Authorization=f"Bearer {token}")
    assert status == 200
    assert not [query["sql"] for query in queries if "accounts_session" in query["sql"]]
    assert not {"Set-Cookie", "Content-Security-Policy"} & {*headers}


@pytest.mark.django_db
def test_the_command_line_hears_of_the_servers_version(project: Project) -> None:
    _row, token = create_token(join(project, make_user("mia")), "ci")
    assert get("/api/v1/projects", Authorization=f"Bearer {token}")[1][VERSION_HEADER] == dstackweb.__version__
    assert VERSION_HEADER not in get("/api/v1/projects")[1]


@pytest.mark.django_db
def test_pages_keep_their_session_and_protection() -> None:
    make_user("mia")
    status, headers, _body = get("/login/")
    assert status == 200
    assert {"Content-Security-Policy", "X-Frame-Options"} <= set(headers)


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/healthz", "/login/", "/api/nothing"])
def test_each_answer_names_its_request(path: str) -> None:
    assert get(path, **{"X-Request-ID": "abc-1"})[1]["X-Request-ID"] == "abc-1"
    first, second = (get(path, **{"X-Request-ID": "not an id"})[1]["X-Request-ID"] for _ in range(2))
    assert len(first) == len(second) == 16
    assert first != second


def counts() -> dict[str, float]:
    """Requests so far, by their labels."""
    lines = get("/metrics", Authorization=f"Bearer {django_settings.DSTACKWEB_METRICS_TOKEN}")[2].decode().splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith("dstackweb_http_request_seconds_count")]
    return {labels.partition("{")[2].rstrip("}"): float(value) for labels, value in found}


@pytest.mark.django_db
def test_requests_are_timed_by_route_method_and_class_of_status() -> None:
    before = counts()
    for path in ("/login/", "/healthz", "/api/v1/projects/one/runs", "/api/v1/projects/two/runs", "/a/b", "/a/c"):
        get(path)
    more = {labels: count - before.get(labels, 0) for labels, count in counts().items()}
    assert {labels: count for labels, count in more.items() if count and "metrics" not in labels} == {
        'method="GET",route="login/",status="2xx"': 1,
        'method="GET",route="healthz",status="2xx"': 1,
        'method="GET",route="api/v1/projects/<project>/runs",status="4xx"': 2,
        'method="GET",route="none",status="4xx"': 2,
    }


@pytest.mark.django_db
def test_a_change_over_the_api_is_recorded_with_its_user_and_address_behind_a_proxy(
    project: Project, settings: Any
) -> None:
    from dstackweb.wsgi import application

    settings.DSTACKWEB_TRUSTED_PROXIES = [ip_network("127.0.0.1")]
    boss = join(project, make_user("boss"), "manager")
    _row, token = create_token(boss, "ci")
    headers = {"Host": "localhost", "Authorization": f"Bearer {token}", "X-Forwarded-For": "192.0.2.1, 198.51.100.7"}
    request = RequestFactory(headers=headers).patch(
        "/api/v1/projects/main/queues/default", {"paused": True}, "application/json"
    )
    answer: list[str] = []
    list(application(request.environ, lambda status, _sent: answer.append(status)))
    assert answer == ["200 OK"]
    entry = AuditEntry.objects.get(kind="queue", action="changed")
    assert (entry.actor_name, entry.via, entry.address) == ("boss", "ci", "198.51.100.7")


def post_parts(part: bytes, count: int) -> int:
    """The status of a stranger's form of such parts."""
    from dstackweb.wsgi import application

    body = part * count + b"--b--\r\n"
    headers = {"Host": "localhost", "Cookie": f"{django_settings.CSRF_COOKIE_NAME}={'a' * 32}"}
    request = RequestFactory(headers=headers).post("/p/main/submit/", body, "multipart/form-data; boundary=b")
    answer: list[str] = []
    list(application(request.environ, lambda status, _sent: answer.append(status)))
    return int(answer[0].split()[0])


@pytest.mark.django_db
@pytest.mark.parametrize(
    "part",
    [
        b"--b\r\n\r\n",
        b"--b\r\nContent-Disposition: form-data; filename=a\r\n\r\n\r\n",
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n',
    ],
)
def test_a_form_of_very_many_parts_is_refused_while_it_is_read(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is signed in yet, and a body for code has room for a million parts."""
    monkeypatch.setattr(web_limits, "PARTS", 20)
    assert post_parts(part, 15) == 403  # no token against forged requests
    assert post_parts(part, 50_000) == 400


def test_the_web_server_imports_nothing_from_the_folder_it_is_started_in(tmp_path: Path) -> None:
    (tmp_path / "stray.py").write_text("application = print")
    argv = [sys.executable, "-P", "-m", "dstackweb.web_server", "--check-config", "stray"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "No module named 'stray'" in done.stderr
