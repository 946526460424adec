"""What browser tests share: signing in, axe-core."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urljoin

from django.conf import settings
from django.test import Client
from playwright.sync_api import Page, expect

from dstackweb.accounts.models import User
from dstackweb.lib import bundles
from dstackweb.lib.static_files import STYLES, page_sources
from tests.support import is_nightly

TABLER = "vendor/tabler/tabler.min.css"
CLASS = re.compile(r"\.(-?[_a-zA-Z][\w-]*)")
SETTLED = """
async () => {
  for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
  const colours = document.getAnimations().filter((one) => one instanceof CSSTransition);
  await Promise.allSettled(colours.map((one) => one.finished));
}
"""
UNMARKED = """
() => [...document.querySelectorAll("main a[href], header a[href]")].filter((link) => {
  const inLine = (one) => getComputedStyle(one).display.startsWith("inline");
  const own = getComputedStyle(link);
  if (!link.checkVisibility() || own.display !== "inline" || own.textDecorationLine.includes("underline")) return false;
  let block = link.parentElement;
  while (inLine(block)) block = block.parentElement;
  if (getComputedStyle(block).fontWeight !== own.fontWeight || getComputedStyle(block).display === "flex") return false;
  const texts = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (!text.textContent.trim() || text.parentElement.closest("a, button, select, svg, script")) continue;
    let outer = text.parentElement;
    while (outer !== block && inLine(outer)) outer = outer.parentElement;
    if (outer === block) return true;
  }
  return false;
}).map((link) => link.outerHTML.slice(0, 160))
"""
SCROLLS = """
() => innerWidth < 576
  && [...document.querySelectorAll("#changelist .results, .inline-group fieldset, .dw-hist-table, .dw-audit")]
    .some((list) => list.scrollWidth > list.clientWidth)
"""
AXE = (Path(__file__).parent.parent / "vendor/axe-core/axe.min.js").read_text()


def sign_in_by_form(page: Page, base: str, username: str, password: str) -> None:
    """As a person does."""
    page.goto(f"{base}/login/")
    fill_sign_in(page, username, password)


def fill_sign_in(page: Page, username: str, password: str) -> None:
    """As a person does on the sign-in page."""
    page.get_by_label("Username").fill(username)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: "/login" not in url)


def sign_in(page: Page, base: str, username: str) -> None:
    """With a session that this process makes: the form is for the tests that are about it."""
    client = Client()
    client.force_login(User.objects.get(username=username))
    zone = page.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone")
    cookies = {settings.SESSION_COOKIE_NAME: client.cookies[settings.SESSION_COOKIE_NAME].value, "zone": zone}
    page.context.add_cookies([{"name": name, "value": value, "url": base} for name, value in cookies.items()])


def settle(page: Page) -> None:
    """Wait until what changed is drawn, and colours have passed into others: those in between are nobody's choice."""
    page.evaluate(SETTLED)


def accessibility_faults(page: Page) -> list[dict[str, Any]]:
    """What axe-core finds on the page as it is now (WCAG 2 A and AA, best practices): rule, help and places."""
    settle(page)
    page.evaluate(AXE)  # evaluated by the debugger, which no Content-Security-Policy stops
    # Preloading would copy imported stylesheets into the page, which the policy stops; no rule in use needs it.
    found = page.evaluate("axe.run(document, {preload: false, resultTypes: ['violations']})")
    return [
        {"rule": fault["id"], "help": fault["help"], "at": [node["html"][:160] for node in fault["nodes"][:4]]}
        for fault in found["violations"]
    ]


class Look(NamedTuple):
    """A theme, the width of the window in CSS pixels, and a language."""

    theme: Literal["light", "dark"]
    width: int
    language: str


LOOKS = (
    Look("light", 1360, "en"),
    Look("dark", 390, "zh-hans"),
    Look("light", 390, "zh-hans"),
    Look("dark", 1360, "en"),
)
"""Both themes in both languages. By day a page has one of the first two."""


def _open(page: Page, look: Look, address: str) -> None:
    page.emulate_media(color_scheme=look.theme)
    page.set_viewport_size({"width": look.width, "height": 844})
    page.goto(address)
    if "wall" not in address:  # which is always dark
        expect(page.locator("html")).to_have_attribute("data-bs-theme", look.theme)


def check_fits(page: Page, name: str) -> None:
    """What the page shows now is not wider than the window. With SCREENSHOTS=folder a picture of it is kept there."""
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"{name} is too wide"
    assert not page.evaluate(SCROLLS), f"the list of {name} is too wide for a phone"
    if folder := os.environ.get("SCREENSHOTS"):
        theme, width = page.evaluate("[document.documentElement.dataset.bsTheme, innerWidth]")
        page.screenshot(path=f"{folder}/{name}-{width}-{theme}.png", full_page="wall" not in name)


def check_now(page: Page, name: str) -> None:
    """What the page shows now fits the window, and axe-core finds nothing."""
    check_fits(page, name)
    assert (name, accessibility_faults(page)) == (name, [])


def check_pages(page: Page, addresses: Mapping[str, str], looks: Sequence[Look] = LOOKS) -> None:
    """Each page fits a desktop and a phone, and axe-core finds nothing: every night in all looks, else in one."""
    faults = {}
    missing, unmarked = {}, {}
    for number, (name, address) in enumerate(addresses.items()):
        for look in looks if is_nightly() else (looks[number % 2],):
            cookie = {"name": settings.LANGUAGE_COOKIE_NAME, "value": look.language, "url": urljoin(address, "/")}
            page.context.add_cookies([cookie])
            _open(page, look, address)
            check_fits(page, name)
            faults[f"{address} {look}"] = accessibility_faults(page)
            missing[address] = classes_without_style(page)
            unmarked[address] = unmarked_links(page)
            page.set_viewport_size({"width": 1360 + 390 - look.width, "height": 844})
            check_fits(page, name)
    page.context.clear_cookies(name=settings.LANGUAGE_COOKIE_NAME)
    assert {address: found for address, found in faults.items() if found} == {}
    assert {address: found for address, found in missing.items() if found} == {}
    assert not (left := {address: found for address, found in unmarked.items() if found}), left


@functools.cache
def left_out() -> frozenset[str]:
    """The classes of Tabler that the stylesheet for pages does not have."""
    static = Path(settings.ASSETS_DIR) / "static"
    used = bundles.words(path.read_text() for path in page_sources())
    made = bundles.stylesheet(STYLES, lambda path: (static / path).read_text(), used)
    before, after = ({*CLASS.findall(text)} for text in ((static / TABLER).read_text(), made))
    return frozenset(before - after)


def unmarked_links(page: Page) -> set[str]:
    """Links in a line of text that only their colour marks, which axe-core finds only where the text is the longer."""
    return {*page.evaluate(UNMARKED)}


def classes_without_style(page: Page) -> set[str]:
    """Classes that elements of the page have, and that were left out of the stylesheet."""
    found = page.evaluate(
        "[...new Set([...document.querySelectorAll('[class]')].flatMap((one) => [...one.classList]))]"
    )
    return left_out() & {*found}
