"""Services over HTTP, with real clients, servers, gateways and runners."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.test_exec_targets import listener
from tests.gateway.test_pages import Browser, dashboard
from tests.server import TOKEN, kill
from tests.servers import free_port
from tests.support import eventually, run_async

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("services")]  # one server for all of them
FILES = [Path(__file__).with_name(name) for name in ("fake_jupyter.py", "fake_service.py")]
COPIED = [f"echo {base64.b64encode(path.read_bytes()).decode()} | base64 -d > {path.name}" for path in FILES]
CHECK = {"path": "/health", "interval": "1s", "unhealthy_after": 2}


def submit(gateway: Gateway, *commands: str, port: int, **keys: Any) -> str:
    """A service; returns its name."""
    config = {
        "type": "service", "commands": [*COPIED, *commands], "port": port, "resources": {"cpu": 1},
        "health_check": CHECK, **keys,
    }  # fmt: skip
    return str(gateway.server.api("POST", "runs", json={"config": config}).json()["name"])


def state(gateway: Gateway, name: str) -> str:
    service = gateway.server.run(name)["service"]
    return str(service["health"]["state"]) if service else ""


def becomes(gateway: Gateway, name: str, wanted: str, deadline: float = 60) -> dict[str, Any]:
    """Wait until the service is in this state."""
    eventually(lambda: state(gateway, name) == wanted, deadline=deadline)
    return gateway.server.run(name)


class Caller:
    """A program with an API token."""

    def __init__(self, gateway: Gateway, run: dict[str, Any], token: str) -> None:
        self.base = f"http://127.0.0.1:{gateway.http_port}"
        self.headers = {"Host": f"{run['id']}.localhost:{gateway.http_port}", "Authorization": f"Bearer {token}"}
        self.client = httpx.Client(timeout=30)

    def __call__(self, path: str, method: str = "GET", **kwargs: Any) -> httpx.Response:
        headers = {**self.headers, **kwargs.pop("headers", {})}
        return self.client.request(method, f"{self.base}{path}", headers=headers, **kwargs)


@pytest.fixture(scope="module")
def run(gateway: Gateway) -> Iterator[dict[str, Any]]:
    name = submit(gateway, "exec python3 fake_service.py", port=free_port(), name="llm")
    yield becomes(gateway, name, "healthy")
    gateway.server.api("POST", f"runs/{name}/stop")


@pytest.fixture
def call(gateway: Gateway, run: dict[str, Any]) -> Caller:
    return Caller(gateway, run, TOKEN)


def test_any_method_and_body_reach_it_and_our_secrets_do_not(call: Caller, run: dict[str, Any]) -> None:
    assert run["service"]["url"] == f"http://{call.headers['Host']}"
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        answer = call("/v1/models?a=%2Fb", method, content=b"x" * 300_000, headers={"Accept": "*/*"})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["method"], found["path"], found["size"]) == (method, "/v1/models?a=%2Fb", 300_000)
    sent = {name.lower(): value for name, value in found["headers"]}
    assert "authorization" not in sent
    assert (sent["x-forwarded-user"], sent["x-forwarded-proto"]) == ("admin", "http")
    assert sent["host"] == call.headers["Host"]
    own = {"X-Dstackweb-Token": call.headers["Authorization"].removeprefix("Bearer "), "Authorization": "Bearer sk-1"}
    sent = {name.lower(): value for name, value in call("/", headers=own).json()["headers"]}
    assert sent["authorization"] == "Bearer sk-1"
    assert "x-dstackweb-token" not in sent


def test_a_browser_of_a_member_opens_it_from_its_page(gateway: Gateway, run: dict[str, Any]) -> None:
    browser = Browser(gateway, run["id"])
    assert browser.get("/").json()["problem"] == "sign_in"
    page = dashboard(gateway)
    address = httpx.URL(page.get(httpx.URL(run["service"]["open_url"]).path).headers["Location"])
    assert browser.get(address.raw_path.decode()).status_code == 303
    sent = {name.lower() for name, _value in browser.get("/").json()["headers"]}
    assert not sent & {"cookie", "authorization"}
    foreign = {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    assert browser.get("/", headers=foreign).json()["problem"] == "other_origin"


def test_without_a_valid_token_nothing_is_passed_on(call: Caller) -> None:
    assert call("/", headers={"Authorization": "Bearer dw_wrong"}).json()["problem"] == "bad_token"
    assert call("/", headers={"Authorization": ""}).status_code == 401
    other = {"Host": f"00000000-0000-4000-8000-000000000000.localhost:{call.base.rpartition(':')[2]}"}
    assert call("/", headers=other).json()["problem"] == "no_run"


def test_parts_of_an_answer_arrive_as_they_are_sent(call: Caller) -> None:
    times = []
    with call.client.stream("GET", f"{call.base}/events", headers=call.headers) as answer:
        for _part in answer.iter_raw():
            times.append(time.monotonic())
    assert len(times) == 3
    assert times[2] - times[0] > 0.8


def test_a_body_and_its_answer_stream_at_the_same_time(call: Caller) -> None:
    """Each part is sent only once the part before has come back."""

    async def talk() -> list[bytes]:
        came, found = asyncio.Queue[bytes](), []

        async def parts() -> AsyncIterator[bytes]:
            for number in range(4):
                yield b"part %d" % number
                found.append(await asyncio.wait_for(came.get(), 10))

        async with aiohttp.ClientSession() as session:
            headers = {**call.headers, "Expect": ""}
            async with session.post(f"{call.base}/mirror", headers=headers, data=parts()) as answer:
                async for data in answer.content.iter_any():
                    came.put_nowait(data)
        return found

    assert run_async(talk()) == [b"part %d" % number for number in range(4)]


def test_websockets_with_a_token(call: Caller) -> None:
    async def talk() -> tuple[str, bytes]:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{call.base}/live", headers=call.headers) as socket,
        ):
            await socket.send_str("hello")
            text = await socket.receive_str(timeout=10)
            await socket.send_bytes(b"x" * 300_000)
            return text, await socket.receive_bytes(timeout=10)

    assert run_async(talk()) == ("hello", b"x" * 300_000)


def test_what_breaks_off_is_not_taken_for_whole(call: Caller) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        call("/cut")
    answer = call("/break", "POST", content=b"x")
    assert (answer.status_code, answer.json()["problem"]) == (502, "no_answer")
    assert "repeat it only if that is safe" in answer.json()["detail"]


def test_many_requests_at_once(call: Caller, gateway: Gateway, run: dict[str, Any]) -> None:
    async def all_of() -> list[str]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(number: int) -> str:
                method = "POST" if number % 2 else "GET"
                async with session.request(method, f"{call.base}/{number}", headers=call.headers) as answer:
                    found = await answer.json()
                    return str(found.get("path", found.get("problem")))

            return list(await asyncio.gather(*map(one, range(300))))

    assert run_async(all_of()) == [f"/{number}" for number in range(300)]
    assert state(gateway, run["name"]) == "healthy"


def test_unhealthy_and_healthy_again_is_on_record(gateway: Gateway, run: dict[str, Any], call: Caller) -> None:
    assert _status(call) == 200
    folder = gateway.server.home / "runs" / run["id"] / "node-0"
    (folder / "ill").touch()
    ill = becomes(gateway, run["name"], "unhealthy")
    assert ill["health"] == "unhealthy"
    assert ill["service"]["health"]["error"] == "status"
    assert ill["service"]["health"]["detail"] == "it answers with status 503"
    assert ill["status"] == "running", "a failed check stops nothing"
    (folder / "ill").unlink()
    well = becomes(gateway, run["name"], "healthy")
    details = [event["detail"] for event in well["events"] if event["kind"].startswith("service_")]
    assert details[-2] == "unhealthy: 2 checks failed in a row (it answers with status 503)"
    assert details[-1].startswith("healthy again after")
    eventually(lambda: gateway.server.run(run["name"])["service"]["used_at"])  # requests are its use, noted every 10 s


def test_a_killed_gateway_ends_nothing(gateway: Gateway, run: dict[str, Any], call: Caller) -> None:
    kill(*gateway.server.role_pids("dstackweb.manage\0gateway"))
    eventually(lambda: _status(call) == 200, deadline=90)
    found = becomes(gateway, run["name"], "healthy")
    assert (found["status"], found["attempt"]) == ("running", 1)


def test_a_service_with_retry_comes_back_at_its_url_after_its_runner_was_killed(gateway: Gateway) -> None:
    name = submit(gateway, "exec python3 fake_service.py", port=free_port(), retry=True)
    run = becomes(gateway, name, "healthy")
    call = Caller(gateway, run, TOKEN)
    kill(gateway.server.runner_pid(run))

    def is_back() -> bool:
        gateway.server.hurry(name)  # a busy machine may lose the second attempt too
        found = gateway.server.run(name)
        return found["attempt"] > 1 and found["health"] == "healthy"

    eventually(is_back, deadline=120)
    eventually(lambda: _status(call) == 200, deadline=30)
    assert gateway.server.run(name)["service"]["url"] == run["service"]["url"]
    gateway.server.api("POST", f"runs/{name}/stop")


def _status(call: Caller) -> int:
    try:
        return call("/").status_code
    except httpx.HTTPError:
        return 0


def test_before_it_listens_and_after_it_has_ended_callers_get_an_answer(gateway: Gateway) -> None:
    name = submit(gateway, "sleep 1000", port=free_port())
    waiting = gateway.server.run(name)
    call = Caller(gateway, waiting, TOKEN)
    seen = {call("/").json()["problem"]}
    starting = becomes(gateway, name, "starting")
    eventually(lambda: call("/").json()["problem"] == "not_listening", deadline=30)
    assert seen <= {"not_started", "disconnected", "not_listening"}
    page = call("/", headers={"Accept": "text/html"})
    assert (page.status_code, page.headers["Retry-After"]) == (503, "5")
    eventually(lambda: gateway.server.run(name)["service"]["health"]["error"] == "refused", deadline=30)
    assert starting["service"]["health"]["state"] == "starting"
    gateway.server.api("POST", f"runs/{name}/stop")
    gateway.server.wait(name)
    answer = eventually(lambda: _ended(call), deadline=70)
    assert answer.status_code == 410


def _ended(call: Caller) -> httpx.Response | None:
    answer = call("/")
    return answer if answer.json()["problem"] == "ended" else None


@pytest.mark.skipif(os.getuid() != 0, reason="jobs have another user only if the server is root")
def test_another_users_process_on_its_port_gets_no_request(gateway: Gateway) -> None:
    with listener() as port:
        name = submit(gateway, "sleep 1000", port=port)
        gateway.server.wait(name, "running")
        call = Caller(gateway, gateway.server.run(name), TOKEN)
        eventually(lambda: call("/").json()["problem"] == "other_users_port", deadline=30)
        eventually(lambda: gateway.server.run(name)["service"]["health"]["error"] == "foreign", deadline=30)
        gateway.server.api("POST", f"runs/{name}/stop")


@pytest.mark.nightly
def test_an_unused_service_stops(gateway: Gateway) -> None:
    name = submit(gateway, "exec python3 fake_service.py", port=free_port(), inactivity_duration="4s")
    found = gateway.server.wait(name)
    assert found["termination_reason"] == "inactivity_duration_exceeded"
