"""Requests to addresses that people have typed reach public addresses, or those that are allowed, and end in time."""

from __future__ import annotations

import email.utils
import socket
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from dstackweb.lib import outbound
from tests.notifications.receiver import Receiver

LOCAL = [ip_network("127.0.0.0/8")]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "ff02::1", "::127.0.0.1", "64:ff9b:1::7f00:1",
        "::ffff:0:127.0.0.1", "fec0::1",
    ],
)  # fmt: skip
def test_no_address_of_this_machine_or_of_a_private_network_is_public(address: str) -> None:
    assert not outbound.is_public(ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_other_addresses_are(address: str) -> None:
    assert outbound.is_public(ip_address(address))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0x7f.1", "2130706433"])
def test_this_machine_is_not_reached(receiver: Receiver, host: str) -> None:
    with pytest.raises((outbound.Refused, outbound.Unreachable)):
        outbound.post(f"http://{host}:{receiver.port}/", b"", {})
    assert receiver.requests == []


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("", 0), ("120", 120), ("Thu, 01 Jan 1970 00:00:00 GMT", 0)]
    + [(odd, 0) for odd in ("-5", "1.5", "soon", "1" * 10, "Sat, 99 Nov 2026", "Fri, 31 Dec 99999 23:59:59 GMT")],
)
def test_an_answer_says_for_how_long_nothing_more_is_wanted(receiver: Receiver, header: str, seconds: float) -> None:
    receiver.answers, receiver.retry_after = [429], header
    assert outbound.post(receiver.url, b"", {}, LOCAL) == (429, seconds)


def test_the_end_of_a_pause_may_be_a_date(receiver: Receiver) -> None:
    receiver.retry_after = email.utils.formatdate(time.time() + 90, usegmt=True)
    assert 80 <= outbound.post(receiver.url, b"", {}, LOCAL).retry_after_s <= 90


def test_an_allowed_network_is_reached_and_no_redirect_followed(receiver: Receiver) -> None:
    receiver.answers = [302]
    assert outbound.post(receiver.url, b"hello", {"X-Test": "1"}, LOCAL).status == 302
    (request,) = receiver.requests
    assert (request.body, request.headers["x-test"]) == (b"hello", "1")
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"


def test_a_public_address_is_not_reached_without_encryption() -> None:
    with pytest.raises(outbound.Refused):
        outbound.post("http://93.184.216.34/", b"", {})


def test_the_address_that_was_checked_is_the_one_that_is_reached(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has another address at each look-up."""
    asked: list[str] = []

    def look_up(host: str, port: int, *_args: Any, **_kwargs: Any) -> list[Any]:
        if host != "rebinding.example":
            return real(host, port, *_args, **_kwargs)
        asked.append(host)
        address = "93.184.216.34" if len(asked) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    connected: list[str] = []

    def connect(address: tuple[str, int], *_args: Any, **_kwargs: Any) -> socket.socket:
        connected.append(address[0])
        raise ConnectionRefusedError

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(outbound.Unreachable):
        outbound.post(f"https://rebinding.example:{receiver.port}/", b"", {})
    assert (asked, connected) == (["rebinding.example"], ["93.184.216.34"])


def test_a_receiver_that_trickles_its_answer_is_left_at_the_deadline() -> None:
    """Each byte comes in time, and the answer never does."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            connection, _from = server.accept()
            with connection:
                while not stop.wait(0.02):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(outbound.NoAnswer):
                outbound.post(f"http://127.0.0.1:{server.getsockname()[1]}/", b"", {}, LOCAL, timeout_s=0.3)
        finally:
            stop.set()
            thread.join()


def test_the_next_address_is_tried_where_one_leads_nowhere(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on the first."""
    real = socket.getaddrinfo

    def look_up(host: str, *args: Any, **more: Any) -> list[Any]:
        if host != "two.example":
            return real(host, *args, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert outbound.post(f"http://two.example:{receiver.port}/", b"", {}, LOCAL).status == 204
    assert receiver.requests[0].headers["host"] == f"two.example:{receiver.port}"


@pytest.mark.parametrize(
    "url", ["ftp://example.org/", "https://", "example.org", "https://a:b@example.org/", "https://é.org/", ""]
)
def test_what_is_no_address_of_a_receiver_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        outbound.check_url(url)
