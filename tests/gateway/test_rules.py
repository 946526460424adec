"""What the gateway lets through, in pure functions."""

from __future__ import annotations

import datetime as dt
from uuid import uuid4

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from dstackweb.gateway.access import RunnerAccess
from dstackweb.gateway.headers import is_own, request_headers, response_headers, token_of
from dstackweb.gateway.ssh import FAILURES_MOST, FAILURES_S, FailedKeys
from dstackweb.gateway.tunnels import Tunnel
from dstackweb.runner.streams import Mux
from dstackweb.runs.inactivity import Use

OWN = "https://run.dev.example.org"


@pytest.mark.parametrize(
    ("method", "headers", "own"),
    [
        ("GET", {}, True),
        ("POST", {"Origin": OWN}, True),
        ("POST", {"Origin": "https://other.dev.example.org"}, False),
        ("POST", {"Origin": "null"}, False),
        ("GET", {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, True),
        ("GET", {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, True),
        ("GET", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}, False),
        ("GET", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, True),
        ("GET", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, False),
        ("POST", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, False),
        ("GET", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "websocket"}, False),
    ],
)
def test_a_request_of_another_page_is_refused(method: str, headers: dict[str, str], own: bool) -> None:
    assert is_own(headers, method, OWN) is own


def test_headers_of_the_connection_and_the_gateways_cookie_stay_behind() -> None:
    given = CIMultiDictProxy(
        CIMultiDict(
            [
                ("Host", "run.localhost"), ("Connection", "keep-alive, X-Mine"), ("X-Mine", "1"), ("TE", "trailers"),
                ("Transfer-Encoding", "chunked"), ("X-Forwarded-For", "6.6.6.6"), ("Accept", "*/*"),
                ("X-Forwarded-User", "admin"), ("Authorization", "bearer dw_secret"), ("Expect", "100-continue"),
                ("X-Dstackweb-Token", "dw_secret"),
                ("Cookie", "a=1; dstackweb-gateway=secret; b=2"),
            ]
        )
    )  # fmt: skip
    assert dict(request_headers(given, "10.0.0.9", "run.localhost", "http", "mia")) == {
        "Accept": "*/*", "Cookie": "a=1; b=2", "Host": "run.localhost", "X-Forwarded-For": "10.0.0.9",
        "X-Forwarded-Host": "run.localhost", "X-Forwarded-Proto": "http", "X-Forwarded-User": "mia",
    }  # fmt: skip
    answer = CIMultiDictProxy(
        CIMultiDict(
            [
                ("Set-Cookie", "a=1; Domain=.example.org; Path=/"), ("Set-Cookie", "dstackweb-gateway=x"),
                ("Strict-Transport-Security", "max-age=1"), ("Keep-Alive", "5"), ("ETag", "x"),
                ("X-Dstackweb-Problem", "ended"),
            ]
        )
    )  # fmt: skip
    assert list(response_headers(answer)) == [("Set-Cookie", "a=1; Path=/"), ("ETag", "x")]


def test_a_network_whose_keys_lead_nowhere_has_to_wait() -> None:
    keys = FailedKeys()
    for at in range(FAILURES_MOST):
        assert not keys.are_too_many("2001:db8::1", at / 100)
        keys.note(f"2001:db8::{at}", at / 100)
    assert keys.are_too_many("2001:db8::ffff", 1.0)
    assert not keys.are_too_many("2001:db8:0:1::1", 1.0)
    assert not keys.are_too_many("2001:db8::1", FAILURES_S + 1.0)


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({"Authorization": "Bearer dw_abc"}, "dw_abc"),
        ({"Authorization": "bearer dw_abc"}, "dw_abc"),
        ({"Authorization": "Bearer sk-theirs"}, None),
        ({"Authorization": "Basic dw_abc"}, None),
        ({"X-Dstackweb-Token": "dw_abc", "Authorization": "Bearer sk-theirs"}, "dw_abc"),
        ({}, None),
    ],
)
def test_an_api_token_is_known_and_others_are_the_services_own(headers: dict[str, str], token: str | None) -> None:
    assert token_of(headers) == token


def test_a_use_is_noted_with_the_moment_of_the_last_request() -> None:
    async def send(_message: bytes) -> None: ...

    noon = dt.datetime(2026, 11, 27, 12, tzinfo=dt.UTC)
    tunnel = Tunnel(RunnerAccess(uuid4(), run_id=1, attempt=2), Mux(send), now=100.0)
    tunnel.used = 103.0
    assert tunnel.use_since(110.0, noon) == Use(2, noon - dt.timedelta(seconds=7), 7.0)
    assert tunnel.use_since(120.0, noon) == Use(2, None, 10.0)
