"""The page of utilization policies in a real browser: a policy tried, the switch, both themes, on a phone."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from dstackweb.accounts.models import Project
from dstackweb.gpus.exemptions import policies_of
from tests.browser import policy_demo
from tests.browser.support import check_pages, sign_in

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def project(db: None) -> Project:
    return policy_demo.build()


@pytest.fixture
def page(live_server, new_page: Callable[..., Page], project: Project) -> Page:
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/utilization/")
    return page


def test_a_policy_is_tried_by_filling_the_form(page: Page) -> None:
    page.get_by_label("Minimum utilization, %").fill("10")
    page.get_by_label("Time window").fill("30m")
    page.get_by_role("button", name="Simulate").click()
    result = page.locator("#what-if-result")
    expect(result).to_contain_text("Would have stopped 2 of 3 runs")
    page.get_by_role("link", name="notebook-left-open").click()
    expect(page).to_have_url(re.compile("/p/main/runs/"))


def test_a_manager_has_policies_only_observe_and_confirms_that_they_count_again(page: Page, project: Project) -> None:
    page.get_by_role("button", name="Observe only").click()
    expect(page.get_by_text("Policies are now observe only")).to_be_visible()
    assert policies_of(project).observe_only is True
    page.get_by_role("button", name="Enforce", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Enforce").click()
    expect(page.get_by_text("Policies are now enforced: idle runs will be stopped")).to_be_visible()
    assert policies_of(project).observe_only is False


TRIED = "?min_gpu_utilization=10&time_window=30m&scope=any&warmup=0s"


@pytest.mark.nightly
def test_it_is_accessible_in_both_themes_and_widths(page: Page) -> None:
    check_pages(page, {"utilization": page.url + TRIED})
