"""What a server's answer means for a batch."""

from __future__ import annotations

import pytest

from dstackweb.tracking.client import LONGEST_WAIT_S, Outcome, Pace, SendResult, TasksClient, classify
from tests.servers import free_port
from tests.tracking.ear import Ear

NO = b'{"detail": "no"}'


@pytest.mark.parametrize(
    ("status", "retry_after", "raw", "answer"),
    [
        (200, None, b'{"applied": 1, "refused": []}', SendResult(Outcome.ACCEPTED)),
        (200, None, b"<html>welcome</html>", SendResult(Outcome.RETRY, None, "200 OK")),
        (
            200,
            None,
            b'{"refused": [{"key": "a", "reason": "state", "detail": "odd"}, {}]}',
            SendResult(Outcome.ACCEPTED, None, "a: odd", 2),
        ),
        (302, None, b"", SendResult(Outcome.RETRY, None, "302 OK")),
        (400, None, NO, SendResult(Outcome.REJECTED, None, "400 no")),
        (401, None, NO, SendResult(Outcome.RETRY, LONGEST_WAIT_S, "401 no")),
        (404, None, NO, SendResult(Outcome.RETRY, LONGEST_WAIT_S, "404 no")),
        (404, None, b"<html>", SendResult(Outcome.RETRY, None, "404 OK")),
        (409, None, NO, SendResult(Outcome.ENDED, None, "409 no")),
        (409, None, b'{"detail": "no", "reason": "run_over"}', SendResult(Outcome.ENDED, None, "409 no")),
        (409, None, b'{"detail": "no", "reason": "not_yet"}', SendResult(Outcome.WAIT, None, "409 no")),
        (413, None, b"<html>", SendResult(Outcome.SPLIT, None, "413 OK")),
        (422, None, b'{"detail": [{"loc": ["body"]}]}', SendResult(Outcome.REJECTED, None, "422 [{'loc': ['body']}]")),
        (429, "2.5", NO, SendResult(Outcome.RETRY, 2.5, "429 no")),
        (429, "-1", NO, SendResult(Outcome.RETRY, 0, "429 no")),
        (429, "86400", NO, SendResult(Outcome.RETRY, LONGEST_WAIT_S, "429 no")),
        (429, "nan", NO, SendResult(Outcome.RETRY, None, "429 no")),
        (503, "Wed, 21 Oct 2026 07:28:00 GMT", b"", SendResult(Outcome.RETRY, None, "503 OK")),
    ],
)
def test_each_response_is_classified(status: int, retry_after: str | None, raw: bytes, answer: SendResult) -> None:
    assert classify(status, "OK", retry_after, raw) == answer


def test_one_connection_is_kept_and_made_again_when_the_server_closed_it(ear: Ear) -> None:
    post = TasksClient(ear.url, "secret")
    ear.answers = [(200, {"Connection": "close"}, b"{}")]
    for number in range(3):
        assert post(b"{}").outcome is Outcome.ACCEPTED, number
    assert ear.tokens == {"Bearer secret"}


def test_the_token_is_not_sent_to_the_target_of_a_redirect(ear: Ear) -> None:
    with Ear() as elsewhere:
        ear.then = (307, {"Location": elsewhere.url}, b"")
        assert TasksClient(ear.url, "secret")(b"{}").outcome is Outcome.RETRY
        assert elsewhere.requests == 0


def test_no_answer_means_later(ear: Ear) -> None:
    assert TasksClient(f"http://127.0.0.1:{free_port()}/", "secret")(b"{}").outcome is Outcome.RETRY
    assert TasksClient("http://name.invalid/", "secret")(b"{}").outcome is Outcome.RETRY
    ear.hold.clear()
    assert TasksClient(ear.url, "secret")(b"{}", 0.05).detail.startswith("TimeoutError")


@pytest.mark.parametrize("url", ["", "ftp://server/", "server:8000/tasks", "http://"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an http:// or https:// URL"):
        TasksClient(url, "secret")


def test_the_pace_is_slower_after_each_refusal_and_recovers() -> None:
    pace = Pace(0.5)
    seen = []
    for _ in range(5):
        pace.slow_down()
        seen.append(pace.s)
    assert seen == [1.0, 2.0, 4.0, 4.0, 4.0]
    for _ in range(20):
        pace.speed_up()
    assert pace.s == 0.5
