"""Single sign-on in a real browser: under the strict policy, to a provider of another origin and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.accounts.test_single_sign_on import configured, person, provider  # noqa: F401  # fixtures
from tests.browser.conftest import Complaints
from tests.browser.support import check_now
from tests.factories import make_project


@pytest.mark.django_db(transaction=True)
def test_a_browser_goes_to_the_provider_and_comes_back_signed_in(
    live_server,
    new_page: Callable[..., Page],
    complaints: Complaints,
    provider: str,  # noqa: F811 - the fixture
    settings: Any,
) -> None:
    make_project("main")
    person(provider, "zoe", ["ml-team"], name="Zoe Smith", email="zoe@example.org")
    policy = copy.deepcopy(settings.CONTENT_SECURITY_POLICY)
    policy["DIRECTIVES"]["form-action"].append(provider)
    settings.CONTENT_SECURITY_POLICY = policy
    page = new_page(keep=False)
    page.route(lambda url: "://localhost:" not in url, lambda route: route.abort())
    page.goto(f"{live_server.url}/login/")
    check_now(page, "login-single-sign-on")
    page.get_by_role("button", name="Continue with Example login").click()
    page.wait_for_url(f"{provider}/**")
    page.locator('input[name="sub"]').first.fill("zoe")
    page.locator('input[name="sub"]').first.press("Enter")
    page.wait_for_url("**/p/main/queue/")
    complaints.remove_failed_loads()  # the stylesheet that the provider's page has from elsewhere
    page.goto(f"{live_server.url}/account/")
    expect(page.get_by_label("First name")).to_have_value("Zoe")
    check_now(page, "account-single-sign-on")
