"""What the real server can't be made to show on demand, played at the edge of the network."""

from __future__ import annotations

import signal
import socket
import sys
from subprocess import PIPE, Popen, run as call

import httpx
import pytest

from dstackweb.cli.client import PATIENCE_S, TRIES, Api
from dstackweb.cli.config import Settings
from dstackweb.cli.logs import Cursor, Follower
from dstackweb.cli.output import CliError, Unreachable
from tests.support import REPO

Answer = httpx.Response | Exception
SETTINGS = Settings("http://server.test", "dw_secret-token", "main", "DSTACKWEB_TOKEN")
OK = httpx.Response(200, json={"ok": True})


class Wire:
    """Gives the answers one after the other (the last one for ever) and keeps requests and pauses."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, stream=httpx.ByteStream(answer.content))

    def api(self) -> Api:
        return Api(SETTINGS, httpx.MockTransport(self), sleep=self.pauses.append)


def refused(wire: Wire, method: str = "GET", **request: object) -> str:
    with pytest.raises(CliError) as error:
        wire.api().send(method, "/api/v1/x", **request)  # type: ignore[arg-type]
    assert SETTINGS.token not in str(error.value.notes) + error.value.message
    return "\n".join([error.value.message, *error.value.notes])


def busy(seconds: str) -> httpx.Response:
    return httpx.Response(429, json={"detail": "slow down"}, headers={"Retry-After": seconds})


def test_after_a_429_any_method_waits_for_retry_after() -> None:
    for method in ("GET", "POST", "PATCH"):
        wire = Wire(busy("3"), busy("4"), OK)
        assert wire.api().send(method, "/api/v1/x").is_success
        assert wire.pauses == [3, 4]


def test_waiting_after_429_ends_with_the_time_to_try_again() -> None:
    wire = Wire(busy("40"))
    printed = refused(wire)
    assert sum(wire.pauses) <= PATIENCE_S
    assert "slow down" in printed
    assert "Try again in 40 s" in printed


def test_an_invalid_retry_after_counts_as_one_second() -> None:
    wire = Wire(busy("soon"), OK)
    wire.api().send("GET", "/api/v1/x")
    assert wire.pauses == [1]


@pytest.mark.parametrize("fault", [httpx.Response(503), httpx.ReadError(""), httpx.RemoteProtocolError("cut")])
def test_only_requests_that_are_safe_to_repeat_are_repeated(fault: Answer) -> None:
    wire = Wire(fault, fault, OK)
    assert wire.api().send("GET", "/api/v1/x").is_success
    assert len(wire.requests) == 3
    wire = Wire(fault)
    refused(wire)
    assert len(wire.requests) == TRIES
    for method in ("POST", "PATCH"):
        wire = Wire(fault, OK)
        refused(wire, method)
        assert len(wire.requests) == 1


def test_an_upload_is_sent_whole_again_after_a_dropped_connection() -> None:
    wire = Wire(httpx.WriteError("reset"), OK)
    wire.api().send("PUT", "/api/v1/x", body=lambda: iter([b"ab", b"cd"]), headers={"Content-Length": "4"})
    assert [request.content for request in wire.requests] == [b"abcd", b"abcd"]


def test_a_submission_is_repeated_under_the_same_key() -> None:
    wire = Wire(httpx.ReadError(""), OK)
    wire.api().send("POST", "/api/v1/x", repeatable=True, headers={"Idempotency-Key": "k"}, json={"a": 1})
    assert [request.headers["Idempotency-Key"] for request in wire.requests] == ["k", "k"]


def test_a_lost_answer_warns_that_the_change_may_have_been_made() -> None:
    assert "may have been made" in refused(Wire(httpx.ReadError("")), "PATCH")
    assert "may have been made" in refused(Wire(httpx.ReadTimeout("")), "POST", repeatable=True)
    assert "Nothing was changed" in refused(Wire(httpx.ReadTimeout("")))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(500, text="<h1>oops</h1>"), "HTTP 500"),
        (httpx.Response(404, text="<h1>Not found</h1>"), "is not a dstackweb server"),
        (httpx.Response(403, json=["x"]), "is not a dstackweb server"),
        (httpx.Response(301, headers={"Location": "https://elsewhere.test"}), "redirects to https://elsewhere.test"),
        (httpx.Response(413, json={"detail": "too large\x1b[2J"}), "too large\ufffd[2J"),
        (httpx.ConnectTimeout(""), "no answer within 5 s"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "can't reach http://server.test"),
        (httpx.UnsupportedProtocol("x"), "can't reach"),
        (httpx.ProxyError("403 Forbidden"), "403 Forbidden"),
    ],
)
def test_every_fault_has_its_own_message(answer: Answer, words: str) -> None:
    assert words in refused(Wire(answer))


def test_an_answer_that_is_not_json_is_reported_as_another_server() -> None:
    with pytest.raises(CliError, match="is not a dstackweb server"):
        Wire(httpx.Response(200, text="<html>")).api().get("/api/v1/x")


def test_an_unreachable_server_is_exit_code_3() -> None:
    with pytest.raises(Unreachable) as error:
        Wire(httpx.ConnectError("refused")).api().get("/api/v1/x")
    assert error.value.code == 3


def test_following_outlasts_any_number_of_faults() -> None:
    log = {"X-Next-Offset": "5", "X-Attempt": "1", "X-Log-Complete": "true"}
    run = {"id": "1", "name": "a", "status": "running", "jobs": [{"attempt": 1, "node": 0}]}
    written: list[bytes] = []
    wire = Wire(
        *[httpx.ConnectError("refused")] * 20,
        httpx.Response(502),
        busy("100"),
        httpx.Response(200, headers=log, content=b"hello"),
        httpx.Response(200, headers=log, content=b""),
        *[httpx.Response(500)] * 3,
        httpx.Response(200, headers=log, content=b""),
        httpx.Response(200, json={**run, "status": "done"}),
        httpx.Response(200, headers=log, content=b""),
    )
    follower = Follower(wire.api(), Cursor(attempt=1), write=written.append)
    assert follower.follow(run)["status"] == "done"
    assert b"".join(written) == b"hello"
    assert max(wire.pauses) <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "unknown"), [(["queue", "--pause"], True), (["move", "--undo"], True), (["queue"], False)]
)
def test_ctrl_c_during_a_change_warns_that_it_may_have_been_made(args: list[str], unknown: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {"DSTACKWEB_URL": f"http://127.0.0.1:{silent.getsockname()[1]}", "DSTACKWEB_TOKEN": "dw_x"}
        command = [sys.executable, "-c", "from dstackweb.cli.main import app; app()", *args]
        process = Popen(command, cwd=REPO, env=env, stdout=PIPE, stderr=PIPE, text=True)
        asked, _address = silent.accept()
        with asked:
            asked.recv(1)
            process.send_signal(signal.SIGINT)
            _out, printed = process.communicate(timeout=20)
    assert (process.returncode, "The change may have been made" in printed) == (130, unknown)
    assert "Traceback" not in printed


@pytest.mark.parametrize("args", [["priority", b"\xff", "3"], ["move", b"\xff", "--top"], ["host", "drain", b"\xff"],
                                  ["hold", "--for", "1h", "--cpu", b"\xff"]])  # fmt: skip
def test_an_argument_that_is_not_utf8_is_a_usage_error(args: list[str | bytes]) -> None:
    env = {"DSTACKWEB_URL": "http://127.0.0.1:9", "DSTACKWEB_TOKEN": "dw_x", "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", "from dstackweb.cli.main import app; app()", *args]
    done = call(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "not valid UTF-8" in done.stderr) == (2, True)


def test_help_does_not_import_the_server_or_slow_libraries() -> None:
    """Start-up is felt at each call: what takes long to load is loaded only where it is needed."""
    main = "from dstackweb.cli.main import app; app(['--help'], standalone_mode=False)"
    check = "import sys; assert not {'httpx', 'yaml', 'django', 'pydantic', 'pathspec'} & set(sys.modules)"
    done = call([sys.executable, "-c", f"{main}; {check}"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_of_the_command_line_needs_the_server_s_packages() -> None:
    code = (
        "import sys, dstackweb.cli.main, dstackweb.cli.client, dstackweb.cli.archive; "
        "found = {'django', 'pydantic', 'ninja', 'dstackweb.settings'} & set(sys.modules); assert not found, found"
    )
    done = call([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
