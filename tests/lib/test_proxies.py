"""The address of a client behind proxies."""

from __future__ import annotations

import logging
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dstackweb.lib import proxies

TRUSTED = [ip_network("127.0.0.1"), ip_network("10.0.0.0/8"), ip_network("2001:db8:1::/48")]


@pytest.mark.parametrize(
    ("peer", "claimed", "client"),
    [
        ("127.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("127.0.0.1", "198.51.100.7:4711", "198.51.100.7"),
        ("127.0.0.1", "[2001:db8:2::7]:4711", "2001:db8:2::7"),
        ("127.0.0.1", "::ffff:198.51.100.7", "198.51.100.7"),
        ("127.0.0.1", "192.0.2.1, 198.51.100.7", "198.51.100.7"),  # the first is what the client claims
        ("127.0.0.1", "192.0.2.1, 198.51.100.7, 10.1.2.3", "198.51.100.7"),
        ("127.0.0.1", "10.1.2.3", "10.1.2.3"),
        ("127.0.0.1", "198.51.100.7, unknown, 10.1.2.3", "10.1.2.3"),
        ("127.0.0.1", "", "127.0.0.1"),
    ],
)
def test_the_last_address_that_no_trusted_proxy_has_is_the_client(peer: str, claimed: str, client: str) -> None:
    environ: dict[str, Any] = {"REMOTE_ADDR": peer, "HTTP_X_FORWARDED_FOR": claimed}
    proxies.see_through(environ, TRUSTED)
    assert environ["REMOTE_ADDR"] == client


def test_headers_of_others_are_dropped() -> None:
    environ = {"REMOTE_ADDR": "198.51.100.7", "HTTP_X_FORWARDED_FOR": "10.0.0.1", "HTTP_X_FORWARDED_PROTO": "https"}
    proxies.see_through(environ, TRUSTED)
    assert environ == {"REMOTE_ADDR": "198.51.100.7"}


def test_without_trusted_proxies_no_address_is_believed_and_a_proxy_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "_warned", set())
    environ = {"REMOTE_ADDR": "127.0.0.1", "HTTP_X_FORWARDED_FOR": "198.51.100.7", "HTTP_X_FORWARDED_PROTO": "https"}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            proxies.see_through(environ, [])
    assert environ["REMOTE_ADDR"] == "127.0.0.1"
    assert environ["HTTP_X_FORWARDED_PROTO"] == "https"
    assert len(caplog.messages) == 1
    assert "127.0.0.1" in caplog.messages[0]


@given(
    st.lists(st.ip_addresses().map(str) | st.text("0123456789.:,[]% abcf", max_size=20), max_size=5),
    st.sampled_from(["127.0.0.1", "10.9.9.9", "2001:db8:1::5"]),
)
def test_whatever_is_claimed_the_client_is_an_address_that_a_trusted_proxy_saw(claims: list[str], peer: str) -> None:
    found = proxies.client(peer, ", ".join(claims), TRUSTED)
    ip_address(found)
    seen = [peer, *reversed([part.strip() for part in ", ".join(claims).split(",")])]
    for before in seen:  # each proxy until the client is trusted
        address = proxies._address(before)
        if address is None or str(address) == found:
            break
        assert any(address in network for network in TRUSTED)
