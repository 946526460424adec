from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator

import pytest

from dstackweb.runner.client import BACKOFF_BASE_S, BACKOFF_CAP_S, Backoff, Client, Refused, Unreachable, check_address
from tests.runner.api import Api


@pytest.fixture
def api() -> Iterator[Api]:
    served = Api()
    yield served
    served.down()


def client(api: Api) -> Client:
    asked = Client(api.url, api.job, api.token, "nonce", timeout_s=0.3)
    asked.post("claim", {"nonce": "nonce"})
    return asked


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8000", "http://example.org", "http://127.0.0.1.example.org", "ftp://x", "x"]
)
def test_the_token_never_crosses_a_network_in_the_clear(url: str) -> None:
    with pytest.raises(ValueError, match=url.replace(".", r"\.")):
        check_address(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost", "http://[::1]:1", "https://example.org/x"]
)
def test_loopback_may_be_plain(url: str) -> None:
    check_address(url)


def test_many_calls_share_one_connection(api: Api) -> None:
    asked = client(api)
    for _ in range(5):
        asked.get("spec")
    assert len(api._sockets) == 1


def test_a_kept_connection_that_the_server_closed_is_replaced_at_once(api: Api) -> None:
    asked = client(api)
    api.down()
    api.up()
    assert asked.get("spec")["job"] == api.job


def test_a_call_whose_answer_was_lost_is_asked_again(api: Api) -> None:
    asked = client(api)
    api.drops["logs"] = 1
    assert asked.log(0, b"abc") == 3
    assert (bytes(api.log), api.count("logs")) == (b"abc", 2)


def test_nobody_there_and_no_answer_in_time_are_unreachable(api: Api) -> None:
    asked = client(api)
    api.hold("spec")
    with pytest.raises(Unreachable):
        asked.get("spec")
    api.release("spec")
    assert asked.get("spec")
    api.down()
    with pytest.raises(Unreachable):
        asked.get("spec")


@pytest.mark.parametrize("status", [301, 302, 400, 413, 422, 429, 500, 502, 503])
def test_answers_that_are_no_verdict_are_tried_again(api: Api, status: int) -> None:
    asked = client(api)
    api.answers["spec"] = lambda: (status, {"detail": "whatever"})
    with pytest.raises(Unreachable):
        asked.get("spec")


@pytest.mark.parametrize("status", [401, 404, 409, 410])
def test_a_no_of_the_api_is_for_good(api: Api, status: int) -> None:
    asked = client(api)
    api.answers["heartbeat"] = lambda: (status, {"detail": "gone"})
    with pytest.raises(Refused, match="gone"):
        asked.post("heartbeat", {})


@pytest.mark.parametrize("body", [b"<html>not found</html>", b"", b"[]", b"{}"])
def test_a_proxys_404_kills_no_job(api: Api, body: bytes) -> None:
    """Only the API's own words count: while it restarts, what stands before it may answer anything."""
    asked = client(api)
    api.answers["heartbeat"] = lambda: (404, body)
    with pytest.raises(Unreachable):
        asked.post("heartbeat", {})


def test_a_gap_is_told_by_the_offset_to_go_on_from(api: Api) -> None:
    asked = client(api)
    asked.log(0, b"abc")
    assert asked.log(7, b"x") == 3


def test_a_download_that_breaks_off_is_no_download() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(Unreachable):
            Client(f"http://127.0.0.1:{server.getsockname()[1]}", "j", "t", "n").download("archive", io.BytesIO())


def test_waits_double_up_to_a_ceiling_and_begin_again() -> None:
    longest = Backoff(uniform=lambda low, high: high)
    assert [longest.failed() for _ in range(7)] == [0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    longest.worked()
    assert longest.failed() == 0.4
    assert all(BACKOFF_BASE_S <= Backoff().failed() <= BACKOFF_CAP_S for _ in range(100))
