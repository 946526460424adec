"""Pictures of every page, for people to look at: desktop and phone, light and dark.

They are written to the folder in SCREENSHOTS, or else to pytest's own temporary one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dstackweb.backends.hosts import joining
from tests.browser import demo
from tests.browser.conftest import Complaints
from tests.browser.support import sign_in

PAGES = {
    "queue": "/p/main/queue/",
    "queue-paused": "/p/main/queues/night/",
    "queue-settings": "/p/main/queues/night/settings/",
    "queue-empty": "/p/research/queue/",
    "history": "/p/main/queues/default/history/",
    "history-all": "/p/main/history/?days=30",
    "history-table": "/p/main/queues/default/history/?as=table",
    "history-empty": "/p/research/history/",
    "runs": "/p/main/runs/",
    "run": "/p/main/runs/train-llama-sft/",
    "progress": "/p/main/progress/",
    "progress-run": "/p/main/runs/train-llama-sft/progress/",
    "progress-prefix": "/p/main/runs/train-llama-sft/progress/prefix/?prefix=sweep-lr&show=running",
    "progress-failures": "/p/main/runs/train-llama-sft/progress/prefix/?prefix=sweep-lr&show=failures",
    "progress-empty": "/p/main/runs/export-onnx/progress/",
    "progress-wall": "/p/main/runs/train-llama-sft/progress/wall/",
    "run-failed": "/p/main/runs/export-onnx/",
    "run-waiting": "/p/main/runs/ab-reranker-7/",
    "run-held": "/p/main/runs/hold-swift-otter/",
    "run-scheduled": "/p/main/runs/report-nightly/",
    "why": "/p/main/runs/ab-reranker-7/why/",
    "why-never": "/p/main/runs/too-large/why/",
    "hold": "/p/main/hold/",
    "submit": "/p/main/submit/",
    "hosts": "/p/main/hosts/",
    "utilization": "/p/main/utilization/?min_gpu_utilization=10&time_window=30m&scope=any&warmup=0s",
    "profiles": "/p/main/profiles/",
    "members": "/p/main/members/",
    "secrets": "/p/main/secrets/",
    "tokens": "/account/tokens/",
    "health": "/p/main/health/",
    "not-found": "/p/main/runs/nope/",
}
SIZES = {"desktop": (1360, 900), "phone": (390, 844)}
WRONG = "type: task\nname: big\ncommands: [python train.py]\nresources: {gpu: A100:80GB:2}\nresurces: {}\n"


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pictures_of_every_page(
    live_server,
    new_page: Callable[..., Page],
    complaints: Complaints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    theme: str,
    size: str,
) -> None:
    monkeypatch.setattr(joining, "needs_postgres", lambda: None)  # the panel of a server that can have other hosts
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    demo.build()
    width, height = SIZES[size]
    page = new_page(viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce")

    def take(name: str) -> None:
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"{name} is too wide"
        page.screenshot(path=folder / f"{name}-{size}-{theme}.png", full_page=True)

    page.goto(f"{live_server.url}/login/")
    take("login")
    sign_in(page, live_server.url, "mia")
    for name, path in PAGES.items():
        page.goto(live_server.url + path)
        if name == "run":
            expect(page.locator("[data-log-text]")).to_contain_text("saved checkpoint")
        take(name)

    page.goto(f"{live_server.url}/p/main/submit/")
    page.get_by_label("Run file").fill(WRONG.replace("resurces: {}\n", ""))
    page.get_by_role("heading", name="Offers").wait_for()
    take("submit-plan")
    page.get_by_label("Run file").fill(WRONG)
    page.get_by_role("button", name="Line 5").wait_for()
    take("submit-error")
    page.goto(f"{live_server.url}/p/main/queue/")
    page.get_by_role("button", name="Stop hotfix-serving").click()
    take("queue-confirm")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Raise the priority of ab-reranker-7").click()
    page.get_by_text("Priority of ab-reranker-7 set to 71").wait_for()
    take("queue-moved")
    page.get_by_role("button", name="Move sweep-lr-0031").press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".would")).to_contain_text("position 5 → 3")
    take("queue-carried")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Move sweep-lr-0031").click()
    take("queue-menu")
    page.get_by_role("menuitem", name="After…").click()
    page.get_by_label("Reference run").fill("ab-reranker-7")
    expect(page.locator("#place [data-effect]")).to_contain_text("position 5 → 3")
    take("queue-place")
    page.keyboard.press("Escape")
    page.get_by_role("checkbox", name="Select sweep-lr-0031").check()
    page.get_by_role("checkbox", name="Select too-large").check()
    take("queue-chosen")
    page.goto(f"{live_server.url}/p/main/hold/")
    page.get_by_label("GPUs", exact=True).fill("99")
    page.get_by_role("button", name="Hold", exact=True).click()
    page.get_by_text("This hold cannot start").wait_for()
    take("hold-never")
    if size == "phone":
        page.get_by_role("button", name="Menu").click()
        take("menu")
    page.context.clear_cookies()
    sign_in(page, live_server.url, "root")
    page.goto(f"{live_server.url}/p/main/hosts/")
    page.get_by_role("button", name="Create join command").click()
    page.get_by_label("Run this on the new host, as root").wait_for()
    take("hosts-join")
    complaints.remove_failed_loads()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_pictures_of_the_readme(live_server, new_page: Callable[..., Page], tmp_path: Path) -> None:
    """`make pictures` writes them to docs/images."""
    folder = Path(os.environ.get("README_PICTURES") or tmp_path)
    demo.build()
    page = new_page(viewport={"width": 1200, "height": 640}, color_scheme="light", reduced_motion="reduce")
    sign_in(page, live_server.url, "mia")
    for name, path in {"queue": PAGES["queue"], "progress": PAGES["progress-run"]}.items():
        page.goto(live_server.url + path)
        page.wait_for_load_state("networkidle")
        page.screenshot(path=folder / f"{name}.png")
        assert (folder / f"{name}.png").stat().st_size < 200_000
