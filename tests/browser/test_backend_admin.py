"""Setting up an AWS backend in a browser, as somebody does who has never seen the form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from dstackweb.backends.models import Backend
from standins.aws import ACCESS_KEY, SECRET_KEY, Cloud
from tests.browser.conftest import Complaints
from tests.browser.support import accessibility_faults, check_fits, sign_in
from tests.factories import make_user
from tests.standins.fixtures import cloud

__all__ = ["cloud"]

PASSWORD = "correct horse battery"

pytestmark = pytest.mark.django_db(transaction=True)


def fill(page: Page, cloud: Cloud, secret: str) -> None:
    page.get_by_label("Name", exact=False).first.fill("aws")
    for region in ("us-east-1 US East (N. Virginia)", "eu-west-1 Europe (Ireland)"):
        page.get_by_label(region).check()
    page.get_by_label("An access key, stored here").check()
    page.get_by_label("Access key ID:").fill(ACCESS_KEY)
    page.get_by_label("Secret access key:").fill(secret)
    page.locator("summary", has_text="Special cases").click()
    page.get_by_label("Endpoint URL:").fill(cloud.url)


def test_a_newcomer_sets_aws_up(
    live_server, new_page: Callable[..., Page], cloud: Cloud, complaints: Complaints, settings
) -> None:
    settings.DSTACKWEB_PUBLIC_URL = live_server.url
    make_user("root", password=PASSWORD, is_staff=True, is_superuser=True)
    page = new_page()
    sign_in(page, live_server.url, "root")
    page.goto(f"{live_server.url}/admin/backends/backend/add/")
    expect(page.get_by_label("Secret access key:")).to_be_hidden()
    page.get_by_role("button", name="Test connection").click()
    page.locator("#dwb-test-result").get_by_role("link", name="Regions").wait_for()
    complaints.remove_failed_loads()

    fill(page, cloud, "wrong")
    page.get_by_role("button", name="Test connection").click()
    expect(page.get_by_text("AWS rejected the credentials")).to_be_visible(timeout=30_000)
    assert not Backend.objects.exists()

    cloud.deny("ec2", "RunInstances")
    page.get_by_label("Secret access key:").fill(SECRET_KEY)
    page.get_by_label("Instances can reach a private").check()
    page.get_by_role("button", name="Test connection").click()
    expect(page.get_by_text(f"{live_server.url} answers.")).to_be_visible(timeout=30_000)
    expect(page.get_by_text("Signed in to account 123456789012")).to_be_visible(timeout=30_000)
    expect(page.get_by_text("Missing permissions")).to_be_visible()
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_url("**/admin/backends/backend/")
    assert Backend.objects.get().config["regions"] == ["us-east-1", "eu-west-1"]


@pytest.mark.nightly
@pytest.mark.parametrize(("theme", "width"), [("light", 1360), ("dark", 390)])
def test_pictures_of_the_form(
    live_server,
    new_page: Callable[..., Page],
    cloud: Cloud,
    complaints: Complaints,
    theme: str,
    width: int,
) -> None:
    make_user("root", password=PASSWORD, is_staff=True, is_superuser=True)
    page = new_page(viewport={"width": width, "height": 844}, color_scheme=theme, reduced_motion="reduce")

    sign_in(page, live_server.url, "root")
    page.goto(f"{live_server.url}/admin/backends/backend/add/")
    check_fits(page, "backend-new")
    for summary in page.locator("fieldset summary").all():
        summary.click()
    check_fits(page, "backend-all")
    page.reload()
    fill(page, cloud, SECRET_KEY)
    cloud.deny("ec2", "RunInstances", "eu-west-1")
    cloud.throttle("servicequotas", region="eu-west-1")
    page.get_by_label("me-south-1 Middle East (Bahrain)").check()
    cloud.region("me-south-1", enabled=False)
    page.get_by_role("button", name="Test connection").click()
    expect(page.get_by_text("Signed in to account 123456789012")).to_be_visible(timeout=30_000)
    check_fits(page, "backend-tested")
    assert accessibility_faults(page) == []
    complaints.clear()  # axe's own styles
    page.get_by_role("button", name="Save and continue editing").click()
    page.get_by_text("none yet").wait_for()
    check_fits(page, "backend-saved")
