"""The history's charts in a real browser: drawn, read by pointer and by keyboard, in both themes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from dstackweb.runs.models import Queue, QueueHour
from dstackweb.runs.shared_rows import touch
from dstackweb.runs.wait_stats import BUCKETS
from tests.browser import demo
from tests.browser.conftest import Complaints
from tests.browser.support import accessibility_faults, sign_in
from tests.support import eventually

pytestmark = pytest.mark.django_db(transaction=True)
PATH = "/p/main/queues/default/history/"

COLOURS = """
(kind) => {
  const canvas = document.querySelector(`[data-chart="${kind}"] canvas`);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Map();
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] > 250) {
      const key = `${data[at]},${data[at + 1]},${data[at + 2]}`;
      seen.set(key, (seen.get(key) ?? 0) + 1);
    }
  return Object.fromEntries([...seen].filter(([, times]) => times > 60));
}
"""


@pytest.fixture
def page(live_server, new_page: Callable[..., Page]) -> Page:
    """The history of a month of demo data, in Berlin."""
    demo.build()
    page = new_page(timezone_id="Europe/Berlin")
    sign_in(page, live_server.url, "mia")
    page.goto(live_server.url + PATH + "?days=30")
    return page


def colour(page: Page, name: str) -> str:
    """A custom property of the page's theme as `r,g,b`."""
    found = page.evaluate("name => getComputedStyle(document.documentElement).getPropertyValue(name)", name)
    return ",".join(str(int(found.strip()[at : at + 2], 16)) for at in (1, 3, 5))


def readout(page: Page, kind: str) -> list[str]:
    return page.locator(f'[data-read="{kind}"] li').all_inner_texts()


def test_both_charts_are_drawn_in_the_colours_of_each_band_in_both_themes(page: Page) -> None:
    # Level lines: how much of a steep one has its band's pure colour depends on the hour of the test.
    for band, bucket in enumerate(BUCKETS[1:5]):
        none = dict.fromkeys(BUCKETS, 0)
        length = 2 + 3 * band
        QueueHour.objects.filter(band=band).update(placed=1, length=length, length_max=length, **none | {bucket: 1})
    page.reload()
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        eventually(lambda: _drawn(page, "wait") == {0, 1, 2, 3} and 2 in _drawn(page, "length"), 8)


def _drawn(page: Page, kind: str) -> set[int]:
    """The bands whose own colour a chart has."""
    bands = [colour(page, f"--dw-band-{band}") for band in range(4)]
    assert len(set(bands)) == 4
    seen = page.evaluate(COLOURS, kind)
    return {band for band in range(4) if bands[band] in seen}


def test_hovering_over_one_chart_shows_that_times_values_in_both(page: Page) -> None:
    chart = page.locator('[data-chart="wait"]')
    today = page.locator('[data-at="wait"]').inner_text()
    chart.hover(position={"x": 400, "y": 100})
    expect(page.locator('[data-at="wait"]')).not_to_have_text(today)
    expect(page.locator('[data-at="length"]')).to_have_text(page.locator('[data-at="wait"]').inner_text())
    found = readout(page, "wait")
    assert [line.split()[0] for line in found] == ["75–100", "50–74", "25–49", "0–24"]
    assert re.search(r"median \d+ min, P90 .+, \d+ started", found[1])
    assert re.search(r"\d+ waiting, max \d+", readout(page, "length")[1])


def test_arrow_keys_step_through_time_and_announce_the_values(page: Page) -> None:
    chart = page.locator('[data-chart="wait"]')
    chart.focus()
    last = int(chart.get_attribute("aria-valuemax") or 0)
    assert last == 29
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(chart).to_have_attribute("aria-valuenow", str(last - 2))
    expect(chart).to_have_attribute(
        "aria-valuetext", re.compile(r"^\w+, Nov \d+\. 75–100: .+; 50–74: median \d+ min, .*0–24: ")
    )
    page.keyboard.press("Home")
    expect(chart).to_have_attribute("aria-valuenow", "0")
    page.keyboard.press("Escape")
    expect(chart).to_have_attribute("aria-valuenow", str(last))


def test_a_hidden_band_is_not_drawn_or_announced(page: Page) -> None:
    button = page.get_by_role("button", name="Priority 50–74")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    assert [line.split()[0] for line in readout(page, "wait")] == ["75–100", "25–49", "0–24"]
    page.wait_for_timeout(100)
    for kind in ("wait", "length"):
        assert colour(page, "--dw-band-2") not in page.evaluate(COLOURS, kind)
    assert accessibility_faults(page) == []
    button.click()
    assert len(readout(page, "length")) == 4


def test_a_poll_updates_the_values_and_keeps_the_users_selection(page: Page) -> None:
    page.get_by_role("button", name="Priority 0–24").click()
    chart = page.locator('[data-chart="wait"]')
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    QueueHour.objects.update(placed=1, waited_1m=1, wait_max_s=7, **dict.fromkeys(BUCKETS[1:], 0))
    touch(Queue.objects.get(project__name="main", name="default").pk)
    page.evaluate("document.getElementById('history').dispatchEvent(new CustomEvent('poll'))")
    expect(page.locator('[data-read="wait"] li').first).to_contain_text("median 3 s, P90 6 s, 24 started")
    expect(chart).to_have_attribute("aria-valuenow", "27")
    expect(chart).to_be_focused()
    assert len(readout(page, "wait")) == 3


def test_the_first_visit_is_rendered_in_utc_and_reloaded_in_the_browsers_zone(
    live_server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    demo.build()
    page = new_page(timezone_id="Asia/Tokyo")
    sign_in(page, live_server.url, "mia")
    page.context.clear_cookies(name="zone")
    page.goto(live_server.url + PATH + "?days=30")
    expect(page.locator("#history-charts")).to_have_attribute("data-zone", "Asia/Tokyo")
    page.goto(live_server.url + PATH + "?days=30&as=table")
    expect(page.get_by_text("By day (Asia/Tokyo)")).to_be_visible()
    assert complaints == []


def test_a_phone_held_upright_or_not_shows_charts_that_fit(page: Page) -> None:
    for width, height in ((390, 844), (844, 390), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        inside = page.evaluate(
            """() => [...document.querySelectorAll("[data-chart]")].every((e) =>
                 Math.abs(e.querySelector(".uplot").clientWidth - e.clientWidth) <= 2)"""
        )
        assert inside
