"""The newcomer's path, with real workers and a real runner."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Complaints
from tests.browser.support import sign_in_by_form
from tests.server import PASSWORD, Server


@pytest.fixture
def server(open_home: Path) -> object:
    with Server(open_home, migrated=False) as server:
        yield server


def test_a_newcomer_submits_watches_stops_and_reorders(server: Server, new_page: Callable[..., Page]) -> None:
    page = new_page()
    sign_in_by_form(page, server.url, "admin", PASSWORD)
    expect(page.get_by_text("No waiting runs")).to_be_visible()

    page.get_by_role("link", name="Submit a run").first.click()
    page.get_by_role("button", name="hello").click()
    expect(page.get_by_role("heading", name="Will start immediately")).to_be_visible()
    expect(page.get_by_text("profile default").first).to_be_visible()
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url("**/runs/hello/")
    expect(page.locator("#run-sub .st")).to_have_text("running", timeout=10_000)
    expect(page.locator("[data-log-text]")).to_contain_text("working: 2 of 5", timeout=10_000)
    expect(page.locator("#run-events")).to_contain_text("Its commands have started")
    expect(page.locator("#run-sub .st")).to_have_text("done", timeout=15_000)
    expect(page.locator("[data-log-text]")).to_contain_text("Done.")
    expect(page.locator("[data-log-note]")).to_have_text("log complete")

    server.submit("sleep 600", name="sleeper")
    page.goto(f"{server.url}/p/main/runs/sleeper/")
    expect(page.locator("#run-sub .st")).to_have_text("running", timeout=10_000)
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Stop run").click()
    expect(page.locator("#run-sub .st")).to_have_text("terminated", timeout=15_000)
    expect(page.get_by_text("Stopped by a member.").first).to_be_visible()

    page.goto(f"{server.url}/p/main/queue/")
    page.get_by_role("button", name="Pause queue").click()
    expect(page.get_by_text("is paused. No runs start")).to_be_visible()
    for name in ("first", "second"):
        server.submit("true", name=name)
    check_first_load(server, new_page)
    rows = page.locator(".dw-queue .q-run a")
    expect(rows).to_have_text(["first", "second"])
    page.get_by_role("button", name="Raise the priority of second").click()
    expect(rows).to_have_text(["second", "first"])
    page.get_by_role("button", name="Resume queue").click()
    expect(page.get_by_text("No waiting runs")).to_be_visible(timeout=10_000)


@pytest.mark.nightly
def test_open_pages_go_on_by_themselves_after_a_restart_of_the_server(
    server: Server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    server.submit("for n in $(seq 600); do echo line $n; sleep 1; done", name="talker")
    server.wait("talker", "running")
    pages = {path: new_page(keep=False) for path in ("queue/", "runs/talker/")}
    for path, page in pages.items():
        sign_in_by_form(page, server.url, "admin", PASSWORD)
        page.goto(f"{server.url}/p/main/{path}")
        expect(page.locator("[data-live]")).to_contain_text("updated")
    server.stop()
    for page in pages.values():
        expect(page.locator("[data-live]")).to_have_text("connection lost, retrying…", timeout=30_000)
    server.start()
    for page in pages.values():
        expect(page.locator("[data-live]")).to_contain_text("updated", timeout=30_000)
    before = max(int(number) for number in re.findall(r"line (\d+)", server.log("talker").decode()))
    expect(pages["runs/talker/"].locator("[data-log-text]")).to_contain_text(f"line {before + 2}", timeout=30_000)
    server.submit("true", name="later", resources={"cpu": "4096.."})
    expect(pages["queue/"].get_by_role("link", name="later")).to_be_visible(timeout=30_000)
    complaints.remove_failed_loads()


def check_first_load(server: Server, new_page: Callable[..., Page]) -> None:
    """The queue page needs few and small answers from a new browser: compressed, without headers."""
    page = new_page(keep=False)
    sign_in_by_form(page, server.url, "admin", PASSWORD)
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    sizes: dict[str, float] = {}
    urls: dict[str, str] = {}
    heads: dict[str, float] = {}
    session.on("Network.requestWillBeSent", lambda sent: urls.__setitem__(sent["requestId"], sent["request"]["url"]))
    session.on(
        "Network.responseReceived",
        lambda got: heads.__setitem__(got["requestId"], got["response"]["encodedDataLength"]),
    )
    session.on("Network.loadingFinished", lambda end: sizes.__setitem__(end["requestId"], end["encodedDataLength"]))
    page.goto(f"{server.url}/p/main/queue/", wait_until="load")
    page.wait_for_load_state("networkidle")
    asked = {key: url for key, url in urls.items() if not url.startswith("data:")}  # those are in the stylesheet
    loaded = {asked[key]: size - heads[key] for key, size in sizes.items() if key in asked}
    assert len(loaded) < 10, loaded
    assert 50_000 < sum(loaded.values()) < 78_000, loaded
    assert not any("sortable" in url for url in urls.values()), urls  # the first drag loads it
