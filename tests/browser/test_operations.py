"""The daily path of someone from operations: what is wrong, where it is, and what may be done about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser import gpu_demo, task_demo
from tests.browser.support import check_fits, sign_in

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("width", [pytest.param(1360, marks=pytest.mark.nightly), 390])
def test_from_a_lost_gpu_to_the_run_that_fails(live_server, new_page: Callable[..., Page], width: int) -> None:
    project = gpu_demo.build()
    task_demo.fill(project.runs.get(name="train-llama-sft"))
    page = new_page(viewport={"width": width, "height": 844})
    sign_in(page, live_server.url, "mia")

    def go_to(name: str) -> None:
        check_fits(page, page.url)
        if width < 992:
            page.get_by_role("button", name="Menu").click()
        page.locator("aside").get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_contain_text(name)

    page.goto(f"{live_server.url}/p/main/")
    go_to("Health")
    fault = page.locator(".dw-fault").filter(has_text="GPUs of box-2")
    expect(fault).to_contain_text("GPU 9 missing")
    expect(fault).to_contain_text("GPU is lost")
    fault.get_by_role("link", name="GPUs of box-2").click()
    expect(page.locator("tr").filter(has_text="GPU 9").filter(has_text="missing")).to_be_visible()
    page.get_by_role("button", name="Drain").click()
    expect(page.get_by_text("draining: no new jobs")).to_be_visible()

    go_to("GPUs")
    page.get_by_label("Sort by").select_option("temperature")
    hottest = page.locator(".heat").first
    expect(hottest).to_contain_text("slowed down by heat")
    hottest.click()
    page.get_by_role("link", name="train-llama-sft").first.click()
    expect(page.locator("#run-sub .st")).to_have_text("running")

    go_to("Progress")
    page.get_by_role("link", name="train-llama-sft").first.click()
    page.get_by_role("link", name="Failed first").click()
    page.wait_for_url("**order=failed**")
    expect(page.locator("#progress-list tbody tr").first).to_contain_text("failed")
    page.locator("#progress-list").get_by_role("link", name="sweep-lr", exact=True).click()
    page.get_by_role("link", name="Errors").click()
    expect(page.get_by_text("CUDA out of memory").first).to_be_visible()

    go_to("Usage")
    page.get_by_role("link", name="7 d").click()
    with page.expect_download() as saved:
        page.get_by_role("link", name="CSV").click()
    assert ",main,ann," in saved.value.path().read_text()
    go_to("Health")
    expect(page.locator(".dw-fault").filter(has_text="GPUs of box-2")).to_be_visible()
