"""What a server's answer means for a batch."""

from __future__ import annotations

import pytest

from dstackweb.tracking.post import LONGEST_WAIT_S, Answer, Post, Verdict, meaning
from tests.servers import free_port
from tests.tracking.ear import Ear

NO = b'{"detail": "no"}'


@pytest.mark.parametrize(
    ("status", "retry_after", "raw", "answer"),
    [
        (200, None, b'{"applied": 1, "refused": []}', Answer(Verdict.TAKEN)),
        (200, None, b"<html>welcome</html>", Answer(Verdict.LATER, None, "200 OK")),
        (
            200,
            None,
            b'{"refused": [{"key": "a", "reason": "state", "detail": "odd"}, {}]}',
            Answer(Verdict.TAKEN, None, "a: odd", 2),
        ),
        (302, None, b"", Answer(Verdict.LATER, None, "302 OK")),
        (400, None, NO, Answer(Verdict.LOST, None, "400 no")),
        (401, None, NO, Answer(Verdict.LATER, LONGEST_WAIT_S, "401 no")),
        (404, None, NO, Answer(Verdict.LATER, LONGEST_WAIT_S, "404 no")),
        (404, None, b"<html>", Answer(Verdict.LATER, None, "404 OK")),
        (409, None, NO, Answer(Verdict.OVER, None, "409 no")),
        (413, None, b"<html>", Answer(Verdict.SPLIT, None, "413 OK")),
        (422, None, b'{"detail": [{"loc": ["body"]}]}', Answer(Verdict.LOST, None, "422 [{'loc': ['body']}]")),
        (429, "2.5", NO, Answer(Verdict.LATER, 2.5, "429 no")),
        (429, "-1", NO, Answer(Verdict.LATER, 0, "429 no")),
        (429, "86400", NO, Answer(Verdict.LATER, LONGEST_WAIT_S, "429 no")),
        (429, "nan", NO, Answer(Verdict.LATER, None, "429 no")),
        (503, "Wed, 21 Oct 2026 07:28:00 GMT", b"", Answer(Verdict.LATER, None, "503 OK")),
    ],
)
def test_each_answer_has_its_meaning(status: int, retry_after: str | None, raw: bytes, answer: Answer) -> None:
    assert meaning(status, "OK", retry_after, raw) == answer


def test_one_connection_is_kept_and_made_again_when_the_server_closed_it(ear: Ear) -> None:
    post = Post(ear.url, "secret")
    ear.answers = [(200, {"Connection": "close"}, b"{}")]
    for number in range(3):
        assert post(b"{}").verdict is Verdict.TAKEN, number
    assert ear.tokens == {"Bearer secret"}


def test_the_token_goes_nowhere_else(ear: Ear) -> None:
    with Ear() as elsewhere:
        ear.then = (307, {"Location": elsewhere.url}, b"")
        assert Post(ear.url, "secret")(b"{}").verdict is Verdict.LATER
        assert elsewhere.requests == 0


def test_no_answer_means_later(ear: Ear) -> None:
    assert Post(f"http://127.0.0.1:{free_port()}/", "secret")(b"{}").verdict is Verdict.LATER
    assert Post("http://name.invalid/", "secret")(b"{}").verdict is Verdict.LATER
    ear.hold.clear()
    assert Post(ear.url, "secret")(b"{}", 0.05).detail.startswith("TimeoutError")


@pytest.mark.parametrize("url", ["", "ftp://server/", "server:8000/tasks", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no http:// or https:// URL"):
        Post(url, "secret")
