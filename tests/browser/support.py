"""What browser tests share: signing in, axe-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Page

SETTLED = """
async () => {
  for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
  const colours = document.getAnimations().filter((one) => one instanceof CSSTransition);
  await Promise.allSettled(colours.map((one) => one.finished));
}
"""
AXE = (Path(__file__).parent.parent / "vendor/axe-core/axe.min.js").read_text()


def sign_in(page: Page, base: str, username: str, password: str) -> None:
    """Through the form, as a person does."""
    page.goto(f"{base}/login/")
    page.get_by_label("Username").fill(username)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: "/login" not in url)


def settle(page: Page) -> None:
    """Wait until what changed is drawn, and colours have passed into others: those in between are nobody's choice."""
    page.evaluate(SETTLED)


def accessibility_faults(page: Page) -> list[dict[str, Any]]:
    """What axe-core finds on the page as it is now (WCAG 2 A and AA, best practices): rule, help and places."""
    settle(page)
    page.evaluate(AXE)  # evaluated by the debugger, which no Content-Security-Policy stops
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        {"rule": fault["id"], "help": fault["help"], "at": [node["html"][:160] for node in fault["nodes"][:4]]}
        for fault in found["violations"]
    ]
