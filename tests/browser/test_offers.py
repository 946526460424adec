"""Offers, quotas, the cache and machines in a real browser: for everybody, on a phone, counting on by themselves."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from dstackweb.accounts.models import Project
from dstackweb.backends.models import Backend
from dstackweb.offers.models import SourceRow
from tests.browser import cloud_demo, demo
from tests.browser.conftest import Complaints
from tests.browser.support import accessibility_faults, check_pages, sign_in

pytestmark = pytest.mark.django_db(transaction=True)
PAGES = {
    "offers": "/p/main/offers/",
    "offers-filtered": "/p/main/offers/?gpu=H100&spot=true",
    "offers-none": "/p/main/offers/?gpu=B200",
    "offers-wrong": "/p/main/offers/?max_price=much",
    "quotas": "/p/main/offers/quotas/",
    "health": "/p/main/health/",
    "machines": "/p/main/machines/",
    "machines-none": "/p/research/machines/",
    "run-paid": "/p/main/runs/train-llama-sft/",
}
NO_POLLS = "document.querySelector('[data-poll]').removeAttribute('data-poll')"
SIZES = {"desktop": (1360, 900), "phone": (390, 844)}


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Backend]:
    """Builds the cloud within the test, which begins with empty caches."""
    project, _mia = demo.build()
    return lambda: cloud_demo.build(project, monkeypatch)


@pytest.fixture
def page(live_server, new_page: Callable[..., Page], cloud: Callable[[], Backend]) -> Page:
    page = new_page(reduced_motion="reduce", keep=False)  # some install a clock
    sign_in(page, live_server.url, "mia")
    return page


@pytest.mark.nightly
def test_every_page_about_clouds_is_accessible_in_both_themes_and_widths(
    live_server, page: Page, cloud: Callable[[], Backend], complaints: Complaints
) -> None:
    cloud()
    check_pages(page, {name: live_server.url + path for name, path in PAGES.items()})
    assert complaints == []


def test_freshness_counts_down_and_turns_stale_without_asking_the_server(
    live_server, page: Page, cloud: Callable[[], Backend]
) -> None:
    cloud()
    SourceRow.objects.filter(source="spot_prices", region="us-east-1").update(
        asked_at=None,
        fetched_at=timezone.now() - dt.timedelta(seconds=238),  # read again at 240 s, stale at 300 s
    )
    page.clock.install()
    page.goto(f"{live_server.url}/p/main/offers/")
    source = page.locator(".dw-region", has_text="us-east-1").locator("li", has_text="Spot prices")
    expect(source.locator(".dw-fresh")).to_have_text("fresh")
    expect(source).to_contain_text(re.compile(r"refresh in 0:0\d|due now"))
    page.evaluate(NO_POLLS)
    page.clock.run_for(70_000)
    expect(source.locator(".dw-fresh")).to_have_text("stale")
    expect(source.locator(".dw-fresh")).to_have_attribute("data-state", "stale")
    expect(source).to_contain_text("due now")


def test_costs_count_on_by_themselves(live_server, page: Page, cloud: Callable[[], Backend]) -> None:
    cloud()
    page.clock.install()
    page.goto(f"{live_server.url}/p/main/machines/")
    cost = page.locator("tr", has_text="g5.12xlarge").locator(".dw-cost")
    before = float(cost.inner_text().removeprefix("$"))
    page.evaluate(NO_POLLS)
    page.clock.run_for(3600_000)
    assert 5.5 < float(cost.inner_text().removeprefix("$")) - before < 5.9


def test_filters_work_by_keyboard_alone_and_without_scripts(
    live_server, new_page: Callable[..., Page], cloud: Callable[[], Backend]
) -> None:
    cloud()
    for scripts in (True, False):
        page = new_page(java_script_enabled=scripts)
        sign_in(page, live_server.url, "mia")
        page.goto(f"{live_server.url}/p/main/offers/")
        page.get_by_label("GPU", exact=True).fill("H100")
        page.get_by_label("Pricing").select_option("spot")
        page.get_by_label("GPU", exact=True).press("Enter")
        expect(page.locator(".dw-offers tbody tr")).to_have_count(2)
        expect(page.get_by_role("columnheader", name="$/h")).to_have_attribute("aria-sort", "ascending")
        page.get_by_role("link", name="$/h").click()
        expect(page.get_by_role("columnheader", name="$/h")).to_have_attribute("aria-sort", "descending")
        assert "gpu=H100" in page.url
        page.get_by_role("link", name="Clear").click()
        expect(page.locator(".dw-offers tbody tr")).to_have_count(25)
        page.get_by_role("link", name="More").click()
        expect(page.locator(".dw-offers tbody tr")).to_have_count(14)


def test_on_a_phone_more_filters_open_and_stay_open_while_they_filter(
    live_server, page: Page, cloud: Callable[[], Backend]
) -> None:
    cloud()
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{live_server.url}/p/main/offers/")
    most = page.get_by_label("Max $/h")
    expect(most).to_be_hidden()
    page.get_by_role("button", name="More filters").click()
    most.fill("0.5")
    most.press("Enter")
    expect(most).to_have_value("0.5")
    expect(most).to_be_visible()
    assert accessibility_faults(page) == []


def test_a_manual_refresh_shows_its_progress_and_its_end(live_server, page: Page, cloud: Callable[[], Backend]) -> None:
    backend = cloud()
    SourceRow.objects.exclude(stamp="").update(generation=0)
    page.goto(f"{live_server.url}/p/main/offers/")
    Project.objects.filter(name="main").update(monthly_budget=None)
    for key in cloud_demo.AwsBackend(backend).wanted():
        cloud_demo.sources.refresh(backend, key)
    button = page.get_by_role("button", name="Refresh now")
    expect(button).to_be_enabled()
    button.click()
    expect(page.get_by_text("sources started")).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("Refreshing 1[0-9] sources…"))).to_be_disabled()
    backend.refresh_from_db()
    for key in cloud_demo.AwsBackend(backend).wanted():
        cloud_demo.sources.refresh(backend, key)
    expect(page.get_by_role("button", name="Refresh now")).to_be_enabled()


def test_an_idle_instance_is_terminated_after_confirmation(
    live_server, page: Page, cloud: Callable[[], Backend]
) -> None:
    cloud()
    page.goto(f"{live_server.url}/p/main/machines/")
    page.get_by_role("button", name=re.compile("Terminate g6.xlarge")).click()
    expect(page.get_by_role("dialog")).to_contain_text("Terminate g6.xlarge now?")
    page.get_by_role("button", name="Terminate", exact=True).click()
    expect(page.get_by_text("Terminating g6.xlarge")).to_be_visible()
    expect(page.locator("tr", has_text="g6.xlarge").first).to_contain_text("terminating")
