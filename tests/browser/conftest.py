"""A real Chromium against a live server. Whatever the browser complains about fails the test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
HERE = Path(__file__).parent
ColorScheme = Literal["light", "dark"]
ReducedMotion = Literal["reduce", "no-preference"]


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


class Contexts:
    """Browser contexts by their options. One that a test is done with is cleaned for the next: its cache stays."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._free: dict[str, list[BrowserContext]] = {}

    def take(self, **options: Any) -> BrowserContext:
        free = self._free.get(repr(sorted(options.items())))
        context = free.pop() if free else self._browser.new_context(**options)
        context.set_default_timeout(8000)
        return context

    def give_back(self, context: BrowserContext, **options: Any) -> None:
        for page in context.pages:
            page.close()
        context.clear_cookies()
        context.set_offline(False)
        self._free.setdefault(repr(sorted(options.items())), []).append(context)


@pytest.fixture(scope="session")
def contexts(chromium: Browser) -> Contexts:
    return Contexts(chromium)


@pytest.fixture
def new_page(contexts: Contexts, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """Opens a page in a context that no other page is in; keywords are those of a browser context.

    `keep` False: nobody else gets this context, since the test leaves more in it than cookies.
    """
    taken: list[tuple[BrowserContext, dict[str, Any], bool]] = []

    def make(
        viewport: ViewportSize | None = None, color_scheme: ColorScheme = "light",
        reduced_motion: ReducedMotion = "no-preference", keep: bool = True, **options: Any,
    ) -> Page:  # fmt: skip
        options = {"locale": "en-GB", **options}
        context = contexts.take(**options)
        taken.append((context, options, keep))
        page = complaints.watch(context.new_page())
        page.set_viewport_size(viewport or {"width": 1360, "height": 900})
        page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        return page

    yield make
    for context, options, keep in taken:
        if keep:
            contexts.give_back(context, **options)
        else:
            context.close()
