"""A real Chromium against a live server. Whatever the browser complains about fails the test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a browser."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason="no chromium is installed (CHROMIUM names another one)"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    # Playwright's own event loop runs in this thread, which Django would take for an async context.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Complaints(list[str]):
    """What the browser's console and the pages' scripts complained about."""

    def remove_failed_loads(self) -> None:
        """Forget what a test provoked: answers of 4xx and 5xx, and a network that is away."""
        self[:] = [text for text in self if not text.startswith(("Failed to load resource", "htmx: htmx:error"))]

    def watch(self, page: Page) -> Page:
        """Collect what this page complains about."""
        page.on("console", lambda message: message.type in ("error", "warning") and self.append(message.text))
        page.on("pageerror", lambda error: self.append(str(error)))
        return page


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    """Empty when a test ends: no blocked script or style, no failed request, no exception."""
    found = Complaints()
    yield found
    assert not found


@pytest.fixture
def new_page(chromium: Browser, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """Opens a page in a context of its own; keywords are those of a browser context."""
    contexts: list[BrowserContext] = []

    def make(**options: object) -> Page:
        context = chromium.new_context(**{"viewport": {"width": 1360, "height": 900}, "locale": "en-GB", **options})
        contexts.append(context)
        context.set_default_timeout(8000)
        return complaints.watch(context.new_page())

    yield make
    for context in contexts:
        context.close()
