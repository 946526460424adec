"""Whether this server answers at its public URL."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from django.urls import resolve

from dstackweb.backends.aws import public_url


class Healthz(BaseHTTPRequestHandler):
    answer: tuple[int, str, bytes] = (200, "", b'{"status": "ok"}')
    runner: tuple[int, str, bytes] = (200, "", b"PK")

    def do_GET(self) -> None:
        answers = {"/healthz": self.answer, "/api/v1/runner/pyz": self.runner}
        status, to, body = answers.get(self.path, (404, "", b""))
        self.send_response(status)
        if to:
            self.send_header("Location", to)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Healthz)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("", "missing"),
        ("http://gpus.example.org", "not_https"),
        ("https://10.1.2.3", "private"),
        ("https://localhost", "private"),
    ],
)
def test_an_unusable_url_is_rejected_without_a_request(url: str, code: str) -> None:
    assert public_url.check(url, allow_private=False)["code"] == code


def test_this_server_is_known_by_its_answer(server: str) -> None:
    assert public_url.check(server, allow_private=True)["code"] == "ok"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((200, "", b"<html>"), "other_server"),
        ((200, "", b'{"status": "fine"}'), "other_server"),
        ((403, "", b""), "other_server"),
        ((302, "https://login.example.org/", b""), "redirect"),
    ],
)
def test_anything_else_is_not_this_server(
    server: str, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, bytes], code: str
) -> None:
    monkeypatch.setattr(Healthz, "answer", answer)
    assert public_url.check(server, allow_private=True)["code"] == code


@pytest.mark.parametrize("answer", [(403, "", b""), (200, "", b"<html>"), (302, "https://login.example.org/", b"")])
def test_a_sign_in_before_the_api_is_found(
    server: str, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, bytes]
) -> None:
    monkeypatch.setattr(Healthz, "runner", answer)
    assert public_url.check(server, allow_private=True)["code"] == "api_blocked"


def test_the_runner_is_where_instances_fetch_it() -> None:
    assert resolve(public_url.RUNNER)


def test_no_answer_from_here_proves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = public_url.check(f"http://127.0.0.1:{port}", allow_private=True)
    assert found["code"] == "no_answer"
    assert "no_answer" in public_url.UNSURE


def test_a_name_without_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(public_url.urllib.request, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert public_url.check("https://gpus.example.org", allow_private=False)["code"] == "no_such_name"


def test_a_name_that_resolves_to_a_private_address_is_a_warning_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_url.urllib.request, "getproxies", dict)
    monkeypatch.setattr(public_url, "_addresses", lambda host, port: ["10.0.0.5"])
    monkeypatch.setattr(public_url, "_get", lambda *_: "ok")
    found = public_url.check("https://gpus.example.org", allow_private=False)
    assert (found["code"], found["address"]) == ("resolves_private", "10.0.0.5")
    assert public_url.check("https://gpus.example.org", allow_private=True)["code"] == "ok"
