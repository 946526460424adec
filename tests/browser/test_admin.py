"""The daily path of an admin: change a profile with its preview, find somebody, test a backend's connection."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from dstackweb.accounts.models import User
from dstackweb.profiles.models import Profile
from dstackweb.runs import services
from dstackweb.runs.models import Queue, Run
from tests.browser import demo
from tests.browser.conftest import Complaints
from tests.browser.support import check_now, sign_in
from tests.factories import make_run

pytestmark = pytest.mark.django_db(transaction=True)
AT_NIGHT = pytest.mark.nightly
ON_A_SCREEN = pytest.mark.parametrize(("theme", "width"), [("light", 1360), pytest.param("dark", 390, marks=AT_NIGHT)])
ON_A_PHONE = pytest.mark.parametrize(("theme", "width"), [pytest.param("light", 1360, marks=AT_NIGHT), ("dark", 390)])


@ON_A_SCREEN
def test_a_profile_is_changed_with_a_preview_of_its_impact(
    live_server, new_page: Callable[..., Page], complaints: Complaints, theme: str, width: int
) -> None:
    project, mia = demo.build()
    settings = {"max_duration": "8h", "backends": ["hosts"]}
    profile = Profile.objects.create(name="nightly", settings=settings)
    for number in range(3):
        make_run(project, mia, f"night-{number}", profile="nightly", resources={"gpu": 64})
    make_run(project, mia, "small", profile="nightly", resources={"cpu": 1})
    page = new_page(viewport={"width": width, "height": 844}, color_scheme=theme)
    sign_in(page, live_server.url, "root")
    page.goto(f"{live_server.url}/admin/")
    page.get_by_role("link", name="Profiles", exact=True).last.click()
    page.get_by_role("link", name="nightly").click()
    limit = page.get_by_label("Maximum duration")
    expect(limit).to_have_value("8h")

    limit.fill("soon")
    expect(page.locator(".form-row", has=limit)).to_contain_text("should be a duration")
    expect(limit).to_have_attribute("aria-invalid", "true")
    complaints.remove_failed_loads()  # the 422 of the check
    limit.fill("12h")
    result = page.locator("#preview-result")
    expect(result).to_contain_text("max_duration: 8h → 12h")
    expect(limit).not_to_have_attribute("aria-invalid", "true")
    page.get_by_label("Labels of hosts").fill("disk=nvme")
    page.get_by_role("button", name="Preview the impact").click()
    expect(result).to_contain_text("4 runs wait with this profile")
    expect(result).to_contain_text("small could never start.")
    check_now(page, "admin-profile-preview")
    assert Profile.objects.get(pk=profile.pk).settings == settings

    page.get_by_label("Labels of hosts").fill("")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".dw-notice")).to_contain_text("changed successfully")
    assert Profile.objects.get(pk=profile.pk).settings == {**settings, "max_duration": "12h"}
    page.get_by_role("alert").get_by_role("link", name="nightly").click()
    page.get_by_role("link", name="History").click()
    expect(page.get_by_role("main")).to_contain_text("settings.max_duration: 8h → 12h")
    check_now(page, "admin-profile-history")


def test_the_sidebar_shows_the_entry_of_a_page_of_its_last_area(live_server, new_page: Callable[..., Page]) -> None:
    demo.build()
    page = new_page()
    sign_in(page, live_server.url, "root")
    page.goto(f"{live_server.url}/admin/django_q/failure/")
    expect(page.get_by_role("link", name="Failed tasks")).to_be_in_viewport()


@ON_A_PHONE
def test_somebody_is_found_by_search_and_a_filter_narrows_a_list(
    live_server, new_page: Callable[..., Page], theme: str, width: int
) -> None:
    demo.build()
    page = new_page(viewport={"width": width, "height": 844}, color_scheme=theme)
    sign_in(page, live_server.url, "root")
    page.goto(f"{live_server.url}/admin/accounts/user/")
    page.get_by_role("searchbox", name="Search").fill("mia")
    page.keyboard.press("Enter")
    expect(page.get_by_role("main").get_by_role("link", name="mia", exact=True)).to_be_visible()
    expect(page.get_by_role("main").get_by_role("link", name="ann", exact=True)).to_have_count(0)
    page.get_by_text(re.compile("Deployment admin:")).click()
    page.get_by_role("link", name="Yes", exact=True).click()
    expect(page.get_by_text("nothing matches")).to_be_visible()
    check_now(page, "admin-empty")
    page.get_by_role("link", name="Clear search and filters").click()
    names = page.locator("#result_list tbody th")
    first = names.first.text_content() or ""
    page.locator("#result_list thead").get_by_role("link", name="Username").click()
    expect(names.last).to_have_text(first)
    page.get_by_role("main").get_by_role("link", name="mia", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("mia")
    if width > 1000:
        page.get_by_role("link", name="Back to main").click()
        page.wait_for_url("**/p/main/queue/")
    assert User.objects.filter(username="mia").exists()


def test_priority_and_queue_of_a_waiting_run_and_the_settings_of_a_queue_are_changed(
    live_server, new_page: Callable[..., Page]
) -> None:
    project, mia = demo.build()
    run, night = make_run(project, mia, "train", resources={"gpu": 64}), services.ensure_queue(project, "night")
    page = new_page()
    sign_in(page, live_server.url, "root")
    page.goto(f"{live_server.url}/admin/runs/run/")
    page.get_by_role("link", name="train", exact=True).click()
    page.get_by_label("Priority:").fill("66")
    page.get_by_label("Queue:").select_option(str(night.pk))
    check_now(page, "admin-run")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".dw-notice")).to_contain_text("changed successfully")
    assert Run.objects.values_list("priority", "queue__name").get(pk=run.pk) == (66, "night")

    page.goto(f"{live_server.url}/admin/runs/queue/{night.pk}/change/")
    page.get_by_label("Paused").uncheck()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".dw-notice")).to_contain_text("changed successfully")
    assert not Queue.objects.get(pk=night.pk).paused
