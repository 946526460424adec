"""The README's pictures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser import demo
from tests.browser.support import sign_in

PAGES = {"queue": "/p/main/queue/", "progress": "/p/main/runs/train-llama-sft/progress/"}

pytestmark = pytest.mark.slow


@pytest.mark.django_db(transaction=True)
def test_pictures_of_the_readme(live_server, new_page: Callable[..., Page], tmp_path: Path) -> None:
    """`make pictures` writes them to docs/images."""
    folder = Path(os.environ.get("README_PICTURES") or tmp_path)
    demo.build()
    page = new_page(viewport={"width": 1200, "height": 640}, color_scheme="light", reduced_motion="reduce")
    sign_in(page, live_server.url, "mia")
    for name, path in PAGES.items():
        page.goto(live_server.url + path)
        page.wait_for_load_state("networkidle")
        page.screenshot(path=folder / f"{name}.png")
        assert (folder / f"{name}.png").stat().st_size < 200_000
