"""Two runs chosen in the list and compared, in a real browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from dstackweb.runs import logs
from tests.browser import demo
from tests.browser.support import sign_in
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_the_last_line_of_each_log_is_in_view(live_server, new_page: Callable[..., Page]) -> None:
    project = make_project("main")
    mia = join(project, make_user("mia", password=demo.PASSWORD), "manager")
    make_host(cpus=8)
    runs = [make_run(project, mia, name) for name in ("first", "second")]
    place_all()
    for run in runs:
        logs.append_log(placed_job(run).pk, 0, b"".join(b"line %d\n" % n for n in range(99)) + b"x" * 500 + b"\nend")
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/compare/?run=first&run=second")
    for log in page.locator(".dw-log-end").all():
        assert log.evaluate("log => log.scrollHeight > log.clientHeight && log.scrollWidth > log.clientWidth")
        bottom = log.evaluate("""log => {
            const range = document.createRange();
            range.setStart(log.firstChild, log.textContent.length - 3);
            range.setEnd(log.firstChild, log.textContent.length);
            return range.getBoundingClientRect().bottom - log.getBoundingClientRect().bottom;
        }""")
        assert bottom <= 0
