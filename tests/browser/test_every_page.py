"""What holds for every page: readable by everybody, in both themes, on a phone, under the strict policy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dstackweb.backends.hosts import joining
from tests.browser import demo
from tests.browser.conftest import Complaints
from tests.browser.support import accessibility_faults, check_all_looks, check_pages, sign_in

PAGES = (
    "/p/main/queue/",
    "/p/main/queues/night/",
    "/p/main/queues/default/settings/",
    "/p/main/runs/",
    "/p/main/runs/train-llama-sft/",
    "/p/main/progress/",
    "/p/main/runs/train-llama-sft/progress/",
    "/p/main/runs/ab-reranker-7/",
    "/p/main/runs/ab-reranker-7/why/",
    "/p/main/runs/too-large/why/",
    "/p/main/runs/evaluate-checkpoint-of-the-long-named-experiment/why/",
    "/p/main/runs/train-llama-sft/why/",
    "/p/main/runs/export-onnx/",
    "/p/main/runs/hold-swift-otter/",
    "/p/main/runs/report-nightly/",
    "/p/main/queues/default/history/",
    "/p/main/history/?days=30",
    "/p/main/queues/default/history/?as=table",
    "/p/main/submit/",
    "/p/main/hold/",
    "/p/main/hosts/",
    "/p/main/utilization/",
    "/p/main/profiles/",
    "/p/main/health/",
    "/p/main/members/",
    "/p/main/secrets/",
    "/account/tokens/",
    "/p/research/queue/",
)
ONE_OF_EACH = (
    "/p/main/queue/",
    "/p/main/queues/default/settings/",
    "/p/main/runs/",
    "/p/main/runs/train-llama-sft/",
    "/p/main/runs/ab-reranker-7/why/",
    "/p/main/history/?days=30",
    "/p/main/submit/",
    "/p/main/hold/",
    "/p/main/hosts/",
    "/p/main/profiles/",
    "/p/main/health/",
    "/p/main/members/",
    "/p/main/secrets/",
    "/account/tokens/",
)
"""Of pages that are alike, one: the quick suite's."""


@pytest.mark.django_db(transaction=True)
def test_every_page_is_accessible_and_fits_a_phone(
    live_server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    demo.build()
    page = new_page()
    page.goto(f"{live_server.url}/login/")
    assert accessibility_faults(page) == []
    sign_in(page, live_server.url, "mia")
    check_pages(page, [live_server.url + path for path in ONE_OF_EACH])
    assert complaints == []


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_every_page_is_accessible_in_both_themes_and_widths(
    live_server, new_page: Callable[..., Page], complaints: Complaints, tmp_path: Path
) -> None:
    demo.build()
    page = new_page()
    sign_in(page, live_server.url, "mia")
    check_all_looks(page, {f"page-{n}": live_server.url + path for n, path in enumerate(PAGES)}, tmp_path)
    assert complaints == []


@pytest.mark.django_db(transaction=True)
def test_looking_after_hosts_is_accessible_and_fits_a_phone(
    live_server, new_page: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the command by which a machine joins, shown once."""
    monkeypatch.setattr(joining, "needs_postgres", lambda: None)  # the panel of a server that can have other hosts
    demo.build()
    page = new_page()
    sign_in(page, live_server.url, "root")
    for theme, width in (("light", 1360), ("dark", 390)):
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": 844})
        page.goto(f"{live_server.url}/p/main/hosts/")
        page.get_by_role("button", name="Create join command").click()
        expect(page.get_by_label("Run this on the new host, as root")).to_have_value(re.compile("host join"))
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert accessibility_faults(page) == []
        page.get_by_role("button", name="Remove").first.click()
        expect(page.get_by_role("dialog")).to_contain_text("Remove host cpu-box-2?")
        assert accessibility_faults(page) == []
        page.keyboard.press("Escape")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("theme", "width"),
    [
        pytest.param("light", 390, marks=pytest.mark.slow),
        pytest.param("dark", 1360, marks=pytest.mark.slow),
        ("dark", 390),
    ],
)
def test_all_that_is_done_to_rows_is_accessible_and_fits_a_phone(
    live_server, new_page: Callable[..., Page], theme: str, width: int
) -> None:
    demo.build()
    page = new_page(color_scheme=theme, viewport={"width": width, "height": 844}, reduced_motion="reduce")
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/queue/")

    def check(what: str) -> None:
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, what
        assert (what, accessibility_faults(page)) == (what, [])

    handle = page.get_by_role("button", name="Move sweep-lr-0030")
    handle.press("ArrowUp")
    expect(page.locator(".would")).to_contain_text("position 3 → 2")
    check("carried")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    check("moved")
    handle.press("Enter")
    check("menu")
    page.get_by_role("menuitem", name="Before…").click()
    page.get_by_label("Reference run").fill("nobody")
    expect(page.locator("#place [data-effect]")).to_contain_text("No waiting run named nobody")
    check("place")
    page.keyboard.press("Escape")
    page.get_by_role("checkbox", name="Select sweep-lr-0032").check()
    page.get_by_role("checkbox", name="Select too-large").check()
    check("chosen")


@pytest.mark.django_db(transaction=True)
def test_the_plan_and_its_errors_are_accessible_and_the_offending_line_is_marked(
    live_server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    demo.build()
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/submit/")
    page.get_by_label("Run file", exact=True).fill("type: task\ncommands: [echo]\nresurces: {gpu: 1}\n")
    page.get_by_role("button", name="Line 3").wait_for()
    assert page.locator("[data-gutter] .bad").all_text_contents() == ["3"]
    assert accessibility_faults(page) == []
    assert page.locator(".dw-toast").count() == 0  # said beside the field, and not once more
    page.get_by_role("button", name="Line 3").click()
    assert page.evaluate("getSelection().toString()") == "resurces: {gpu: 1}"
    complaints.remove_failed_loads()  # the 422 that was asked for

    page.get_by_label("Run file", exact=True).fill("type: task\ncommands: [echo]\nresources: {gpu: 99}\n")
    page.get_by_label("Submit anyway").wait_for()
    assert page.locator("[data-gutter] .bad").count() == 0
    assert accessibility_faults(page) == []


@pytest.mark.django_db(transaction=True)
def test_the_chosen_theme_is_there_before_the_page_is_drawn_and_stays(
    live_server, new_page: Callable[..., Page]
) -> None:
    demo.build()
    page = new_page(color_scheme="light", keep=False)
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/queue/")
    page.get_by_role("radio", name="Dark").click()
    page.add_init_script(
        "new MutationObserver(() => window.first ??= document.body && document.documentElement.dataset.bsTheme)"
        ".observe(document, {childList: true, subtree: true})"
    )
    page.reload()
    assert page.evaluate("window.first") == "dark"
    assert page.get_by_role("radio", name="Dark").get_attribute("aria-checked") == "true"
    page.keyboard.press("Tab")
    page.get_by_role("radio", name="Dark").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.documentElement.dataset.bsTheme") == "light"


@pytest.mark.django_db(transaction=True)
def test_on_a_phone_the_menu_opens_and_leads_on(live_server, new_page: Callable[..., Page]) -> None:
    demo.build()
    page = new_page(viewport={"width": 390, "height": 844})
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/queue/")
    menu = page.get_by_role("button", name="Menu")
    assert not page.get_by_role("link", name="Hosts").is_visible()
    menu.click()
    assert menu.get_attribute("aria-expanded") == "true"
    page.get_by_role("link", name="Hosts").click()
    page.wait_for_url("**/hosts/")
