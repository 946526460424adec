"""A real Chromium against a live server. Whatever the browser complains about fails the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from django.conf import settings
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.management import call_command
from django.test import override_settings
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from standins import programs
from tests.databases import alone

HERE = Path(__file__).parent
ColorScheme = Literal["light", "dark"]
ReducedMotion = Literal["reduce", "no-preference"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a browser, and are slow."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")
            item.add_marker("slow")
            item.add_marker(pytest.mark.needs("chromium"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    # Playwright's own event loop runs in this thread, which Django would take for an async context.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=programs.chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="package", autouse=True)
def served_files() -> Iterator[None]:
    """Pages load what they load on a server: one stylesheet and one script, collected once for all workers."""
    hashed = {**settings.STORAGES, "staticfiles": {"BACKEND": "dstackweb.lib.static_files.HashedStorage"}}
    with pytest.MonkeyPatch.context() as patch, override_settings(STORAGES=hashed):
        with alone(Path(f"{settings.STATIC_ROOT}.lock")):
            if not Path(settings.STATIC_ROOT).exists():
                call_command("collectstatic", interactive=False, verbosity=0)
        patch.setattr(StaticFilesHandler, "_should_handle", lambda *_: False)  # it serves the sources
        yield


class Complaints(list[str]):
    """What the browser's console and the pages' scripts complained about."""

    def remove_failed_loads(self) -> None:
        """Forget what a test provoked: answers of 4xx and 5xx, and a network that is away."""
        self[:] = [text for text in self if not text.startswith(("Failed to load resource", "htmx: htmx:error"))]


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    """Empty when a test ends: no blocked script or style, no failed request, no exception."""
    found = Complaints()
    yield found
    assert not found


class Tab:
    """A page in a context of its own; `complaints` are of the test that has it."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        self.key = _key(**options)
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(8000)
        self.page = self.context.new_page()
        self.complaints = Complaints()
        self.page.on("console", lambda message: message.type in ("error", "warning") and self._note(message.text))
        self.page.on("pageerror", lambda error: self._note(str(error)))

    def _note(self, text: str) -> None:
        self.complaints.append(text)

    def clean(self) -> None:
        """As new, but for what the browser keeps of scripts and styles."""
        self.complaints = Complaints()
        self.page.unroute_all()
        self.context.clear_cookies()
        self.context.set_offline(False)
        self.page.goto("about:blank")


class Tabs:
    """Tabs by their options: one that a test is done with is cleaned for the next, since opening one takes long."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._free: dict[str, list[Tab]] = {}

    def take(self, **options: Any) -> Tab:
        free = self._free.get(_key(**options))
        return free.pop() if free else Tab(self._browser, **options)

    def give_back(self, tab: Tab) -> None:
        tab.clean()
        self._free.setdefault(tab.key, []).append(tab)


def _key(**options: Any) -> str:
    return repr(sorted(options.items()))


@pytest.fixture(scope="session")
def tabs(chromium: Browser) -> Tabs:
    return Tabs(chromium)


@pytest.fixture
def new_page(tabs: Tabs, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """Opens a page in a context that no other page is in; keywords are those of a browser context.

    `keep` False: no other test gets this page, since this one leaves more in it than cookies and routes.
    """
    taken: list[tuple[Tab, bool]] = []

    def make(
        viewport: ViewportSize | None = None, color_scheme: ColorScheme = "light",
        reduced_motion: ReducedMotion = "reduce", keep: bool = True, **options: Any,
    ) -> Page:  # fmt: skip
        tab = tabs.take(**{"locale": "en-GB", **options})
        taken.append((tab, keep))
        tab.complaints = complaints
        tab.page.set_viewport_size(viewport or {"width": 1360, "height": 900})
        tab.page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        return tab.page

    yield make
    for tab, keep in taken:
        if keep:
            tabs.give_back(tab)
        else:
            tab.context.close()
