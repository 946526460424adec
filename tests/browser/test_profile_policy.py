"""An admin changes a profile's utilization policy, and decides which of the active runs get it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dstackweb.profiles.models import Profile
from dstackweb.runs.models import Run
from tests.browser.conftest import Complaints
from tests.browser.support import accessibility_faults, sign_in
from tests.factories import join, make_project, make_run, make_user

PASSWORD = "correct horse battery"
SIZES = {"desktop": (1360, 900), "phone": (390, 844)}

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_changed_policy_is_applied_to_the_chosen_runs(
    live_server, new_page: Callable[..., Page], complaints: Complaints, tmp_path: Path
) -> None:
    policy = {"min_gpu_utilization": 20, "time_window": "1h"}
    profile = Profile.objects.create(name="nightly", settings={"utilization_policy": policy})
    project = make_project("vision")
    ada = join(project, make_user("ada"))
    gpus = {"resources": {"gpu": 1}, "profile": "nightly"}
    first, second = (make_run(project, ada, name, **gpus) for name in ("train-llama", "train-bert"))
    make_user("root", password=PASSWORD, is_staff=True, is_superuser=True)
    page = new_page()
    sign_in(page, live_server.url, "root")
    page.goto(f"{live_server.url}/admin/profiles/profile/{profile.pk}/change/?as=yaml")
    page.get_by_label("Settings").fill("utilization_policy: {min_gpu_utilization: 50, time_window: 30m}")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("2 active runs have a previous policy of this profile")).to_be_visible()
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, size
        page.screenshot(path=folder / f"profile-policy-{size}.png", full_page=True)
    assert accessibility_faults(page) == []
    complaints.clear()  # axe's own styles
    page.get_by_label("vision/train-bert").uncheck()
    page.get_by_role("button", name="Apply to selected runs").click()
    expect(page.get_by_text("Policy applied to 1 run.")).to_be_visible()
    expect(page.get_by_text("1 active run has a previous policy of this profile")).to_be_visible()
    minimum = {
        run.pk: run.spec["utilization_policy"]["min_gpu_utilization"] for run in Run.objects.filter(project=project)
    }
    assert minimum == {first.pk: 50, second.pk: 20}
    page.get_by_role("link", name="Cancel").click()
    page.get_by_role("link", name="nightly").click()
    page.get_by_role("link", name="Apply policy to active runs").click()
    expect(page.get_by_label("vision/train-bert")).to_be_checked()
