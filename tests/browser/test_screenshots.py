"""The pictures of the documentation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser import pictures
from tests.browser.support import sign_in

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"images/([\w-]+\.\w+)")


def test_each_picture_is_shown_in_the_documentation_and_small() -> None:
    files = {file.name: file.stat().st_size for file in pictures.FOLDER.iterdir()}
    assert files.keys() == {*pictures.file_names()}
    assert max(files.values()) <= pictures.LIMIT
    assert sum(files.values()) <= pictures.LIMIT_ALL
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    shown = {name for page in pages for name in SHOWN.findall(page.read_text())}
    themes = {name.replace("-light.", "-dark.") for name in shown}  # the site shows the one of its theme
    assert shown | themes == files.keys()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", pictures.SETS)
def test_pictures_of_the_documentation_are_taken(
    live_server,
    new_page: Callable[..., Page],
    chromium: Browser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """`make screenshots` writes them to docs/images; the nightly suite takes the light ones."""
    folder = Path(os.environ.get("SCREENSHOTS_OF_DOCS") or tmp_path)
    themes = pictures.THEMES if folder != tmp_path else pictures.THEMES[:1]
    pictures.set_clock(monkeypatch)
    pictures.fill(name, monkeypatch)
    blank = chromium.new_page()
    pages = {}
    for language, locale in pictures.LANGUAGES.items():
        page = new_page(keep=False, locale=locale, timezone_id="UTC", device_scale_factor=1.5)
        page.context.set_default_timeout(30_000)
        pages[language] = page
    for of, picture in pictures.SETS[name].items():
        address = f"{live_server.url}{'' if picture.path[0] == '/' else '/p/main/'}{picture.path}"
        for language in picture.languages:
            page = pages[language]
            sign_in(page, live_server.url, picture.user)
            for theme in picture.themes[: len(themes)]:
                data = pictures.take(page, address, picture, theme)
                assert len(data) < pictures.LIMIT, of
                pictures.keep(blank, folder / pictures.file_name(of, language, theme), data)
    blank.close()
