"""The page of utilization policies in a real browser: a policy tried, the switch, both themes, on a phone."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from decimal import Decimal

import pytest
from django.utils import timezone
from playwright.sync_api import Page, expect

from dstackweb.accounts.models import Project
from dstackweb.gpus.models import PolicyStop
from dstackweb.gpus.policy.exemptions import policies_of
from tests.browser import demo
from tests.browser.support import check_pages, sign_in
from tests.factories import join, make_project, make_run, make_user
from tests.gpus.past import past_run

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def project(db: None) -> Project:
    now = timezone.now()
    project = make_project("main")
    mia = join(project, make_user("mia", password=demo.PASSWORD), "manager")
    ann = join(project, make_user("ann"))
    past_run(project, ann, "notebook-left-open", [[0] * 720, [3] * 720])
    past_run(project, mia, "train-llama-sft", [[95] * 720] * 2)
    past_run(project, ann, "evaluate-checkpoint-of-the-long-named-experiment", [[80] * 100 + [0] * 400])
    following = make_run(project, ann, "pretrain-ablation")
    stop = {"project": project, "user": ann, "min_gpu_utilization": 10, "time_window_s": 1800, "scope": "any"}
    for name, hours, more in (
        ("debug-shell", 30, {"until": now - dt.timedelta(hours=8), "price": Decimal("12.24"), "gpu_index": 1}),
        ("sweep-lr-003", 5, {"until": now + dt.timedelta(hours=2), "next_run": following, "next_at": now}),
        ("no-limit", 3, {"gpu_index": 0}),
        ("looked-at", 60, {"observed": True, "scope": "all"}),
    ):
        at = now - dt.timedelta(hours=hours)
        low = {"at": at, "low_since": at - dt.timedelta(minutes=30), "gpus": ["GPU-a", "GPU-b"]}
        PolicyStop.objects.create(run_name=name, **{**stop, **low, **more})
    return project


@pytest.fixture
def page(live_server, new_page: Callable[..., Page], project: Project) -> Page:
    page = new_page()
    sign_in(page, live_server.url, "mia")
    page.goto(f"{live_server.url}/p/main/utilization/")
    return page


def test_a_policy_is_tried_by_filling_the_form(page: Page) -> None:
    page.get_by_label("Minimum utilization, %").fill("10")
    page.get_by_label("Time window").fill("30m")
    page.get_by_role("button", name="Simulate").click()
    result = page.locator("#what-if-result")
    expect(result).to_contain_text("Would have stopped 2 of 3 runs")
    page.get_by_role("link", name="notebook-left-open").click()
    expect(page).to_have_url(re.compile("/p/main/runs/"))


def test_a_manager_has_policies_only_observe_and_confirms_that_they_count_again(page: Page, project: Project) -> None:
    page.get_by_role("button", name="Observe only").click()
    expect(page.get_by_text("Policies are now observe only")).to_be_visible()
    assert policies_of(project).observe_only is True
    page.get_by_role("button", name="Enforce", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Enforce").click()
    expect(page.get_by_text("Policies are now enforced: idle runs will be stopped")).to_be_visible()
    assert policies_of(project).observe_only is False


TRIED = "?min_gpu_utilization=10&time_window=30m&scope=any&warmup=0s"


def test_it_is_accessible_in_both_themes_and_widths(page: Page) -> None:
    check_pages(page, {"utilization": page.url + TRIED})
