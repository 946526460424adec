"""A browser has little to do for a live update: what did not change is not styled again."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tests.browser import page_changes

pytestmark = pytest.mark.django_db(transaction=True)

UPDATES = 3
STYLE = "UpdateLayoutTree"  # what Chromium calls it in a trace, with the number of elements


@pytest.mark.parametrize(
    "build",
    [page_changes.queue, *(pytest.param(one, marks=pytest.mark.nightly) for one in page_changes.PAGES[1:])],
)
def test_an_update_styles_only_what_changed(
    live_server, new_page: Callable[..., Page], build: Callable[[], page_changes.Changing]
) -> None:
    changing = build()
    page = new_page(keep=False)
    page_changes.shown(page, live_server.url, changing)
    browser = page.context.browser
    assert browser
    there = page.evaluate("document.querySelectorAll('*').length")
    browser.start_tracing(page=page, categories=["devtools.timeline"])
    answers = []
    for number in range(UPDATES):
        changing.change(number)
        answers.append(page_changes.update(page, changing.part))
    events = json.loads(browser.stop_tracing())["traceEvents"]
    assert answers == [200] * UPDATES
    styled = sum(event["args"].get("elementCount", 0) for event in events if event["name"] == STYLE) / UPDATES
    assert 0 < styled < there / 5
