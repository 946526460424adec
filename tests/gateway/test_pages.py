"""The pages of a run in a browser: who gets them, and what of the dashboard they never see."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest

from tests.forms import body_of
from tests.gateway.conftest import Gateway
from tests.server import PASSWORD
from tests.support import eventually, run_async

pytestmark = pytest.mark.nightly
FAKE = Path(__file__).with_name("fake_jupyter.py")


class Browser:
    """A browser, for which all names below `localhost` are this machine."""

    def __init__(self, gateway: Gateway, uid: str) -> None:
        self.gateway, self.host = gateway, f"{uid}.localhost:{gateway.http_port}"
        self.base = f"http://127.0.0.1:{gateway.http_port}"
        self.client = httpx.Client(timeout=30)

    def get(self, path: str, method: str = "GET", **kwargs: Any) -> httpx.Response:
        headers = {"Host": self.host, **kwargs.pop("headers", {})}
        return self.client.request(method, f"{self.base}{path}", headers=headers, **kwargs)

    def cookie(self) -> str:
        return self.client.cookies["dstackweb-gateway"]


def dashboard(gateway: Gateway) -> httpx.Client:
    """A browser that is signed in to the dashboard."""
    client = httpx.Client(base_url=gateway.server.url, timeout=30)
    page = client.get("/login/", follow_redirects=True)
    body = body_of(page.text, {"username": "admin", "password": PASSWORD})
    done = client.post(str(page.url), data=body, headers={"Referer": str(page.url)})
    assert done.status_code == 302, done.text
    return client


@pytest.fixture(scope="module")
def run(gateway: Gateway) -> Iterator[dict[str, Any]]:
    fake = base64.b64encode(FAKE.read_bytes()).decode()
    name = gateway.submit(
        ide="jupyter",
        init=[
            "mkdir -p bin",
            f"(echo '#!/usr/bin/env python3'; echo {fake} | base64 -d) > bin/jupyter-lab; chmod +x bin/jupyter-lab",
            'export PATH="$PWD/bin:$PATH"',
        ],
    )
    found = gateway.ready(name)
    yield found
    gateway.server.api("POST", f"runs/{name}/stop")


@pytest.fixture
def browser(gateway: Gateway, run: dict[str, Any]) -> Browser:
    """One that has opened the run's pages from the dashboard."""
    found = Browser(gateway, run["id"])
    opened = dashboard(gateway).get(urlsplit(run["connect"]["url"]).path)
    assert opened.status_code == 302, opened.text
    address = urlsplit(opened.headers["Location"])
    assert address.netloc == found.host
    entered = found.get(f"{address.path}?{address.query}")
    assert (entered.status_code, entered.headers["Location"]) == (303, "/")
    assert "HttpOnly" in entered.headers["Set-Cookie"]
    assert "Domain" not in entered.headers["Set-Cookie"]
    again = Browser(gateway, run["id"]).get(f"{address.path}?{address.query}")
    assert again.status_code == 401, "a ticket counts once"
    return found


def test_pages_reach_the_job_and_keep_the_gateways_secrets(browser: Browser, gateway: Gateway) -> None:
    answer = eventually(lambda: served(browser), deadline=30)
    sent = {name.lower(): value for name, value in answer.json()["headers"]}
    assert sent["host"] == sent["x-forwarded-host"] == browser.host
    assert "cookie" not in sent
    assert sent["authorization"].startswith("token "), "else nothing is served"
    browser.client.cookies.set("theirs", "yes")
    sent = dict(browser.get("/lab?a=%2Fb").json()["headers"])
    assert "gateway" not in sent.get("Cookie", "")
    assert "theirs=yes" in sent["Cookie"]
    cookies = answer.headers.get_list("set-cookie")
    assert cookies == ["own=1; Path=/"], "no cookie of another host, and not the gateway's"
    posted = browser.get("/upload", "POST", content=b"x" * 500_000, headers={"Origin": f"http://{browser.host}"})
    assert posted.json()["size"] == 500_000


def served(browser: Browser) -> httpx.Response | None:
    answer = browser.get("/")
    return answer if answer.status_code == 200 else None


def test_nobody_gets_them_without_the_cookie_of_this_run(browser: Browser, gateway: Gateway) -> None:
    assert Browser(gateway, browser.host.partition(".")[0]).get("/").status_code == 401
    other = Browser(gateway, "00000000-0000-4000-8000-000000000000")
    other.client.cookies.set("dstackweb-gateway", browser.cookie())
    assert other.get("/").status_code == 401
    assert httpx.get(f"{browser.base}/").status_code == 404
    assert browser.get("/.dstackweb/enter?ticket=x").status_code == 401


def test_pages_of_elsewhere_can_do_nothing_in_a_visitors_name(browser: Browser) -> None:
    foreign = {"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    assert browser.get("/", headers=foreign).status_code == 403
    assert browser.get("/", "POST", headers={"Origin": "http://other.localhost"}).status_code == 403
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert browser.get("/", headers=link).status_code == 200


def test_messages_go_both_ways(browser: Browser) -> None:
    async def talk(origin: str) -> tuple[str, bytes]:
        headers = {"Host": browser.host, "Origin": origin, "Cookie": f"dstackweb-gateway={browser.cookie()}"}
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{browser.base}/api/kernels", headers=headers) as socket,
        ):
            await socket.send_str("hello")
            text = await socket.receive_str(timeout=10)
            await socket.send_bytes(b"x" * 300_000)
            return text, await socket.receive_bytes(timeout=10)

    assert run_async(talk(f"http://{browser.host}")) == ("hello", b"x" * 300_000)
    with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
        run_async(talk("http://evil.localhost"))
