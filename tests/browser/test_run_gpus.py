"""A run's GPUs in a real browser: drawn and read in both themes, counted down, kept by a click."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from dstackweb.gpus import intake
from dstackweb.gpus.models import JobPolicy, PolicyExemption
from dstackweb.runs import attempts, services
from dstackweb.runs.models import Run
from dstackweb.web.gpus import alerts
from tests.browser import demo
from tests.browser.support import accessibility_faults, check_pages, settle, sign_in
from tests.browser.test_history import COLOURS, colour
from tests.factories import join, make_host, make_project, make_run, make_user, place_all, placed_job, start
from tests.gpus.snapshots import sample
from tests.web.watched import POLICY, watched

pytestmark = pytest.mark.django_db(transaction=True)


def idles(place: int, ago_s: int) -> int:
    """The second GPU has done nothing for 48 minutes; the others work in waves."""
    if place == 1 and ago_s <= 48 * 60:
        return (ago_s // 10) % 4
    return 80 + (ago_s // 10 * (place + 3)) % 17


@pytest.fixture
def run(db: None) -> Run:
    alerts._stamps.clear()
    project = make_project("main")
    ann = join(project, make_user("ann", password=demo.PASSWORD), "member")
    make_host("gpu-box-1", cpus=64, memory_gib=512, gpus=8)
    made = watched(project, ann, "train-llama-sft", 75, idles, gpus=4)
    low = max(filter(None, placed_job(made).gpu_series.values_list("low_since_ms", flat=True)))
    JobPolicy.objects.update(noticed_ms=low)
    return made


@pytest.fixture
def page(live_server, new_page: Callable[..., Page], run: Run) -> Page:
    page = new_page(timezone_id="Europe/Berlin")
    sign_in(page, live_server.url, "ann")
    page.goto(f"{live_server.url}/p/main/runs/train-llama-sft/")
    for kind in ("utilization", "memory"):
        expect(page.locator(f'[data-read="{kind}"] li')).to_have_count(4)
    return page


def readout(page: Page, kind: str) -> list[str]:
    return page.locator(f'[data-read="{kind}"] li').all_inner_texts()


def test_lines_minimum_and_the_low_stretch_are_drawn_in_both_themes(page: Page) -> None:
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        settle(page)
        lines = [colour(page, f"--dw-gpu-{place}") for place in range(4)]
        drawn = {kind: page.evaluate(COLOURS, kind) for kind in ("utilization", "memory")}
        assert [line for line in lines if line not in drawn["memory"]] == [], theme
        assert colour(page, "--dw-gpu-low") in drawn["utilization"], theme
        assert len(set(lines)) == 4
    assert accessibility_faults(page) == []


def test_pointer_and_keyboard_read_the_numbers_of_one_moment(page: Page) -> None:
    chart = page.locator('[data-chart="utilization"]')
    assert readout(page, "utilization")[1].startswith("GPU 1")
    assert re.search(r"GPU 1\s*[0-3] %", readout(page, "utilization")[1])
    assert "28.3 of 80 GB" in readout(page, "memory")[1]
    now = page.locator('[data-at="memory"]').inner_text()
    chart.hover(position={"x": 90, "y": 60})
    expect(page.locator('[data-at="memory"]')).not_to_have_text(now)
    assert re.search(r"GPU 1\s*(8|9)\d %", readout(page, "utilization")[1])
    chart.focus()
    page.keyboard.press("End")
    last = int(chart.get_attribute("aria-valuemax") or 0)
    page.keyboard.press("ArrowLeft")
    expect(chart).to_have_attribute("aria-valuenow", str(last - 1))
    expect(chart).to_have_attribute("aria-valuetext", re.compile(r"^\d\d:\d\d:\d\d\. GPU 0: \d+ %; GPU 1: \d %"))


def test_a_hidden_gpu_is_in_neither_chart(page: Page) -> None:
    page.get_by_role("button", name="GPU 1").click()
    assert [line.split()[1] for line in readout(page, "memory")] == ["0", "2", "3"]
    settle(page)
    assert colour(page, "--dw-gpu-1") not in page.evaluate(COLOURS, "memory")


def test_a_poll_adds_new_samples_and_keeps_the_users_selection(page: Page, run: Run) -> None:
    page.get_by_role("button", name="GPU 3").click()
    reason = page.get_by_label("Reason to keep it running for 30 min")
    reason.fill("half a sen")
    job = placed_job(run)
    newest = max(job.gpu_series.values_list("last_ms", flat=True))
    intake.add_samples(
        job, [(newest + 2_000, [sample(uuid, 41, memory_used_mib=51_200, index=int(uuid[-1])) for uuid in job.gpus])]
    )
    page.evaluate("document.getElementById('run-gpus').dispatchEvent(new CustomEvent('poll'))")
    expect(page.locator("#run-gpus-now tbody tr").first).to_contain_text("41 %")
    assert len(readout(page, "memory")) == 3
    expect(reason).to_have_value("half a sen")


def test_the_countdown_counts_and_keeping_ends_it(page: Page) -> None:
    verdict = page.locator("#run-policy-verdict")
    expect(verdict).to_have_text(re.compile(r"GPU 1 below 50 % for 4\d min, stops in 1\d:\d\d"))
    left = verdict.locator("time").last.inner_text()
    expect(verdict.locator("time").last).not_to_have_text(left)
    page.get_by_label("Reason to keep it running for 30 min").fill("it waits for its data")
    page.get_by_role("button", name="Keep for 30 min").click()
    expect(page.get_by_text("train-llama-sft will not be stopped for 30 min")).to_be_visible()
    expect(page.locator("#run-policy")).to_contain_text("by ann: “it waits for its data”")
    expect(page.get_by_role("button", name="Keep for 30 min")).to_have_count(0)
    assert PolicyExemption.objects.get().reason == "it waits for its data"


def test_lists_and_other_pages_show_the_policy_alert(page: Page, live_server) -> None:
    for path in ("runs/", "queue/"):
        page.goto(f"{live_server.url}/p/main/{path}")
        expect(page.locator(".dw-gpu-mark")).to_have_text(
            re.compile(r"GPU 1 below 50 % for 4\d min, stops in 1\d:\d\d")
        )
        expect(page.get_by_text("You can keep it running from its page")).to_be_visible()
        assert accessibility_faults(page) == []


def test_the_gpus_of_a_run_appear_on_its_open_page(page: Page, live_server, run: Run) -> None:
    waits = make_run(run.project, run.user, "later", resources={"gpu": 5}, utilization_policy=POLICY)
    page.goto(f"{live_server.url}/p/main/runs/later/")
    expect(page.locator("#run-gpus")).to_have_count(0)
    services.stop(run, run.user, "member", abort=True)
    attempts.end_job(placed_job(run).pk, "aborted_by_user")
    place_all()
    page.evaluate("document.getElementById('run').dispatchEvent(new CustomEvent('poll'))")
    expect(page.locator("#run-gpus")).to_contain_text("Sampling starts with the run's commands")
    job = start(placed_job(waits))
    at_ms = round(job.started_at.timestamp() * 1000) + 500
    intake.add_samples(job, [(at_ms, [sample(uuid, 77) for uuid in job.gpus])])
    page.evaluate("document.getElementById('run-gpus').dispatchEvent(new CustomEvent('poll'))")
    expect(page.locator('[data-read="utilization"] li').first).to_contain_text("77 %")


@pytest.mark.nightly
def test_they_are_accessible_and_fit_in_both_themes(page: Page, live_server) -> None:
    run_path = "runs/train-llama-sft/"
    pages = {"run": run_path, "table": f"{run_path}?as=table", "runs": "runs/", "queue": "queue/"}
    check_pages(page, {f"gpus-{name}": f"{live_server.url}/p/main/{path}" for name, path in pages.items()})
