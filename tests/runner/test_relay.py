"""One request for the heartbeats of all runners on a machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner import relay
from dstackweb.runner.client import Refused, Unreachable
from tests.runner.conftest import Box
from tests.support import eventually

MakeBox = Callable[..., Box]


class Server:
    """Answers the relay's requests by hand, and keeps them."""

    def __init__(self) -> None:
        self.requests: list[list[dict[str, str]]] = []
        self.jobs: dict[str, str] = {}
        """The job of each token."""
        self.error: Exception | None = None
        self.signs: list[str] = []
        """The tokens that requests were sent with."""

    def use_token(self, token: str) -> None:
        self.signs.append(token)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "heartbeats"
        self.requests.append(body["jobs"])
        if self.error is not None:
            raise self.error
        found = [self.jobs[one["token"]] for one in body["jobs"] if one["token"] in self.jobs]
        return {"jobs": {job: {"action": "go", "of": job} for job in found}}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def path(open_home: Path, server: Server) -> str:
    where = str(open_home / "heartbeats")
    there = relay.Relay("http://127.0.0.1:1", where)
    there.client = server  # type: ignore[assignment]
    there.start()
    return where


def test_concurrent_runners_share_a_request_and_each_gets_its_own_answer(server: Server, path: str) -> None:
    server.jobs = {f"token-{index}": f"job-{index}" for index in range(20)}
    answers: dict[str, Any] = {}

    def come(token: str, job: str) -> None:
        answers[job] = relay.ask(path, job, token, "nonce")

    runners = [threading.Thread(target=come, args=pair) for pair in server.jobs.items()]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert answers == {job: {"action": "go", "of": job} for job in server.jobs.values()}
    assert sum(map(len, server.requests)) == 20
    assert len(server.requests) < 10


def test_a_runner_whose_job_is_missing_in_the_relayed_answer_polls_by_itself(server: Server, path: str) -> None:
    server.jobs = {"token-1": "job-1"}
    assert relay.ask(path, "job-2", "token-2", "nonce") is None
    assert relay.ask(path, "job-1", "token-1", "nonce") is not None


@pytest.mark.parametrize("error", [Unreachable("down"), Refused(404, {})])
def test_a_server_that_does_not_answer_leaves_runners_to_themselves(
    server: Server, path: str, error: Exception
) -> None:
    server.jobs, server.error = {"token-1": "job-1"}, error
    assert relay.ask(path, "job-1", "token-1", "nonce") is None
    server.error = None
    assert relay.ask(path, "job-1", "token-1", "nonce") is not None


def test_malformed_data_at_the_socket_does_not_affect_other_runners(server: Server, path: str) -> None:
    server.jobs = {"token-1": "job-1"}
    for text in (b"", b"{", b"[]", b'{"job": 1}', b"\xff" * 1000):
        with relay.socket.socket(relay.socket.AF_UNIX, relay.socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(path)
            stranger.send(text)
    assert relay.ask(path, "job-1", "token-1", "nonce") is not None
    assert server.signs[-1] == "token-1", "a host's heartbeats have a turn of their own"
    relay.ask(path, "job-1", "no header\r\nX: y", "nonce")
    assert server.signs[-1] == ""


def test_without_a_relay_there_is_no_answer(open_home: Path) -> None:
    assert relay.ask(str(open_home / "none"), "job", "token", "nonce") is None
    assert not relay.start_relay("http://127.0.0.1:1", str(open_home / "no" / "folder"), insecure=False)
    assert not relay.start_relay("http://127.0.0.1:1", str(open_home / ("long" * 40)), insecure=False)


def test_a_runner_stops_when_the_relay_brings_the_order(box: MakeBox, server: Server, path: str) -> None:
    job = box("sleep 60")
    job.orders["relay"] = path
    server.jobs = {job.orders["token"]: job.api.job}
    job.launch()
    eventually(lambda: len(server.requests) > 3, every=0.02)
    alone = job.api.count("heartbeat")
    assert alone <= 1  # the one before the start
    server.post = lambda path, body: {  # type: ignore[method-assign]
        "jobs": {job.api.job: {"action": "stop", "reason": "terminated_by_user", "grace_s": 0}}
    }
    assert job.end()["reason"] == "terminated_by_user"


def test_a_runner_without_its_relay_sends_its_heartbeats_itself(box: MakeBox, open_home: Path) -> None:
    job = box("sleep 60")
    job.orders["relay"] = str(open_home / "gone")
    job.launch()
    eventually(lambda: job.api.count("heartbeat") > 3, every=0.02)
