"""The pages of GPUs and hosts in a browser: readable by everybody, live, and with charts that the keyboard reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser import gpu_demo
from tests.browser.support import check_pages, sign_in

pytestmark = pytest.mark.django_db(transaction=True)
PAGES = {
    "gpus": "gpus/",
    "gpus-hot": "gpus/?colour=temperature&sort=temperature",
    "gpus-none": "gpus/?q=nothing",
    "gpus-table": "gpus/?as=table&sort=utilization",
    "gpu": "gpus/GPU-box-1-2/",
    "gpu-table": "gpus/GPU-box-1-2/?as=table",
    "host": "hosts/box-1/",
    "host-trouble": "hosts/box-2/",
    "host-cpu": "hosts/cpu-box-3/",
}


@pytest.mark.nightly
def test_they_are_accessible_in_both_themes_and_widths(live_server, new_page: Callable[..., Page]) -> None:
    gpu_demo.build()
    page = new_page(reduced_motion="reduce")
    sign_in(page, live_server.url, "mia")
    check_pages(page, {name: f"{live_server.url}/p/main/{path}" for name, path in PAGES.items()})


def test_the_map_updates_with_new_samples(live_server, new_page: Callable[..., Page]) -> None:
    gpu_demo.build()
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/gpus/")
    cell = page.locator("#heat-GPU-box-1-3")
    expect(cell).to_contain_text("41 %")
    gpu_demo.seen("box-1", g3=99)
    expect(cell).to_contain_text("99 %", timeout=15_000)
    page.get_by_label("Sort by").select_option("utilization")
    expect(page.locator(".heat").first).to_contain_text("99 %")
    assert "sort=utilization" in page.url
    page.locator(".heat").first.click()
    page.wait_for_url("**/gpus/GPU-box-1-3/")


def test_a_gpus_chart_is_readable_by_keyboard(live_server, new_page: Callable[..., Page]) -> None:
    gpu_demo.build()
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/gpus/GPU-box-1-0/")
    chart = page.get_by_role("slider", name="Utilization")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert "GPU 0: 9" in (chart.get_attribute("aria-valuetext") or "")
    expect(page.locator('[data-read="utilization"]')).to_contain_text("GPU 0")
