"""A request may be as large as its address allows; nothing more of it is stored."""

from __future__ import annotations

import json

import pytest
from waitress.adjustments import Adjustments

from dstackweb import web_limits
from dstackweb.web_limits import ARCHIVE, AT_ONCE, SMALL, USUAL, limit_of
from dstackweb.web_worker import Parser

ARCHIVES = "/api/v1/projects/main/archives/0123"
PIECE = 8192


def request(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def parse(head: bytes, body: bytes = b"", *, held: int = 0) -> Parser:
    """What is known after these bytes have arrived, in pieces as from the network."""
    parser = Parser(Adjustments(), lambda: held)
    for data in (head, *(body[at : at + PIECE] for at in range(0, len(body), PIECE))):
        while data and not parser.completed:
            data = data[parser.received(data) :]
    return parser


def stored(parser: Parser) -> int:
    return len(parser.body_rcv) if parser.body_rcv is not None else 0


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/login/", SMALL), ("/login/in_token/", SMALL), ("/invite/inv_token/", SMALL),
        ("/p/main/queue/", USUAL), ("/api/v1/projects/main/runs", USUAL), ("/", USUAL), ("/loginx/", USUAL),
        (ARCHIVES, ARCHIVE), (f"{ARCHIVES}/more", USUAL), ("/p/main/submit/", ARCHIVE), ("/p/main/submit", USUAL),
    ],
)  # fmt: skip
def test_each_address_has_its_limit(path: str, limit: int) -> None:
    assert limit_of(path) == limit
    assert parse(request(path, f"Content-Length: {limit}")).error is None
    refused = parse(request(path, f"Content-Length: {limit + 1}", "Expect: 100-continue"))
    assert (refused.error.code, refused.completed, refused.expect_continue) == (413, True, False)


def test_a_request_within_its_limit_is_answered_with_continue() -> None:
    taken = parse(request("/login/", f"Content-Length: {SMALL}", "Expect: 100-continue"))
    assert (taken.error, taken.completed, taken.expect_continue) == (None, False, True)


def test_nothing_of_a_body_that_was_announced_too_large_is_stored() -> None:
    refused = parse(request("/login/", "Content-Length: 90000000"), b"x" * 10 * PIECE)
    assert (refused.error.code, stored(refused)) == (413, 0)


def test_chunks_are_stored_up_to_the_limit() -> None:
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    head = request("/login/", "Transfer-Encoding: chunked")
    assert parse(head, chunk * 7 + b"0\r\n\r\n").error is None
    refused = parse(head, chunk * 100)
    assert refused.error.code == 413
    assert stored(refused) <= SMALL + PIECE


def test_what_comes_after_a_refused_header_is_no_request_of_its_own() -> None:
    smuggled = request("/login/", "Content-Length: 90000000") + request("/api/v1/user")
    parser = Parser(Adjustments())
    assert parser.received(smuggled) == len(smuggled)


def test_a_process_that_holds_much_takes_small_requests_only() -> None:
    for size, code in ((SMALL, None), (SMALL + 1, 503)):
        parser = parse(request(ARCHIVES, f"Content-Length: {size}"), b"x" * size, held=AT_ONCE + 1)
        assert (parser.error and parser.error.code, parser.completed) == (code, True)
    assert parse(request(ARCHIVES, f"Content-Length: {SMALL + 1}"), b"x" * (SMALL + 1), held=AT_ONCE).error is None


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", ""])
def test_a_length_that_is_none_is_refused(length: str) -> None:
    assert parse(request("/login/", f"Content-Length: {length}")).error.code == 400


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (web_limits.BodyTooLarge, "413 Content Too Large", "at most 4 MiB"),
        (web_limits.TooMuchAtOnce, "503 Service Unavailable", "try again"),
    ],
)
def test_programs_are_refused_in_json_and_people_with_a_page(
    error: type[web_limits.BodyTooLarge], status: str, says: str
) -> None:
    answered, headers, body = error("/api/v1/projects/main/runs").to_response()
    assert (answered, dict(headers)["Content-Type"]) == (status, "application/json")
    assert says in json.loads(body)["detail"]
    answered, headers, body = error("/login/").to_response()
    assert (answered, dict(headers)["Content-Type"]) == (status, "text/html; charset=utf-8")
    assert b"Nothing was changed" in body
    toast = json.loads(dict(headers)["HX-Trigger"])["toast"]["text"]
    assert toast.startswith("Nothing was changed: ")
    assert ("64 KiB" in toast) == (status[:3] == "413")
    assert ("Retry-After" in dict(headers)) == (status[:3] == "503")


CHUNKED = "Transfer-Encoding: chunked"


def test_a_request_before_the_answer_to_another_is_not_taken_and_ends_the_connection() -> None:
    one = request("/login/", "Content-Length: 3")
    for more, ends in ((b"", False), (b"\r\n", False), (b"GET / HTTP/1.1\r\n", True)):
        parser = Parser(Adjustments())
        data = one + b"abc" + more
        while data:
            data = data[parser.received(data) :] if not parser.completed else b""
        assert (parser.error, parser.completed, parser.has_more) == (None, True, ends)
        assert stored(parser) == 3


@pytest.mark.parametrize(
    "frames",
    [b"a" * 100_000, b"1" + b"0" * 50_000, b"0\r\n" + b"x: y\r\n" * 20_000, b"1\r\na\r\n" * 10_000],
    ids=["no size", "long size", "trailer", "small chunks"],
)
def test_chunks_that_are_mostly_frames_are_refused(frames: bytes) -> None:
    parser = parse(request(ARCHIVES, CHUNKED), frames)
    assert (parser.error.code, parser.completed) == (400, True)
    assert parser.body_bytes_received < 3 * PIECE


def test_chunks_of_a_usual_size_are_taken() -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (1000, b"a" * 1000) for _ in range(1000)) + b"0\r\n\r\n"
    parser = parse(request(ARCHIVES, CHUNKED), body)
    assert (parser.error, parser.completed, stored(parser)) == (None, True, 1_000_000)


def test_a_request_with_two_lengths_is_refused() -> None:
    assert parse(request("/login/", CHUNKED, "Content-Length: 5")).error.code == 400
