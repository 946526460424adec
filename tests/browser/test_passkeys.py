"""Passkeys in a real browser, with an authenticator that Chromium simulates; and the pages of two-step sign-in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Complaints
from tests.browser.support import check_now, sign_in_by_form
from tests.factories import join, make_project, make_user

PASSWORD = "correct horse battery"
DEVICE = {
    "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
    "isUserVerified": True, "automaticPresenceSimulation": True,
}  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_a_passkey_is_added_signs_in_alone_and_as_a_second_step_and_is_removed(
    live_server, new_page: Callable[..., Page], complaints: Complaints
) -> None:
    join(make_project("main"), make_user("ann", password=PASSWORD))
    page = new_page(keep=False)
    devtools = page.context.new_cdp_session(page)
    devtools.send("WebAuthn.enable")
    devtools.send("WebAuthn.addVirtualAuthenticator", {"options": DEVICE})
    sign_in_by_form(page, live_server.url, "ann", PASSWORD)

    def look(name: str) -> None:
        """In both themes and widths."""
        for theme, width in (("dark", 390), ("light", 1360)):
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size({"width": width, "height": 844})
            check_now(page, name)

    def open_two_step() -> None:
        page.goto(f"{live_server.url}/account/two-step/")

    def sign_out() -> None:
        page.context.clear_cookies()
        page.goto(f"{live_server.url}/login/")

    open_two_step()
    page.get_by_role("link", name="Add passkey").click()
    look("confirm-password")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Confirm").click()
    page.get_by_label("Name").fill("Laptop of Ann")
    look("passkey-add")
    page.get_by_role("button", name="Add passkey").click()
    page.wait_for_url("**/two-step/codes/")
    look("recovery-codes")
    page.get_by_role("link", name="I have stored them").click()
    expect(page.get_by_role("cell", name="Laptop of Ann", exact=True)).to_be_visible()
    look("two-step-on")
    page.get_by_role("link", name="Set up").click()
    look("two-step-app")

    sign_out()
    look("login-passkey")
    page.get_by_role("button", name="Use a passkey").click()
    page.wait_for_url("**/queue/")

    sign_out()
    page.get_by_label("Username").fill("ann")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/login/code/")
    look("second-step")
    page.get_by_role("button", name="Use a passkey").click()
    page.wait_for_url("**/queue/")

    open_two_step()
    page.get_by_role("button", name="Remove Laptop of Ann").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("link", name="Use a passkey").click()
    look("confirm-passkey")
    page.get_by_role("button", name="Use a passkey").click()
    expect(page.get_by_text("Passkey removed.")).to_be_visible()
    expect(page.get_by_role("cell", name="Laptop of Ann", exact=True)).to_have_count(0)
