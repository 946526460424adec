"""Two runs chosen in the list and compared, in a real browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser import demo
from tests.browser.support import sign_in
from tests.factories import join, make_project, make_run, make_user

pytestmark = [pytest.mark.nightly, pytest.mark.django_db(transaction=True)]


def test_two_runs_chosen_in_the_list_are_compared_and_a_choice_outlives_its_renewal(
    live_server, new_page: Callable[..., Page]
) -> None:
    project = make_project("main")
    mia = join(project, make_user("mia", password=demo.PASSWORD), "manager")
    make_run(project, mia, "first", priority=60), make_run(project, mia, "second")
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/runs/")
    page.get_by_role("checkbox", name="Compare first").check()
    make_run(project, mia, "third")
    expect(page.get_by_role("link", name="third")).to_be_visible()
    expect(page.get_by_role("checkbox", name="Compare first")).to_be_checked()
    page.get_by_role("checkbox", name="Compare second").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", name="Settings that differ")).to_be_visible()
    expect(page.get_by_role("row", name="priority 60 50")).to_be_visible()
