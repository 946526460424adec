"""Links in the documentation lead somewhere, and the tests that it names exist; so do pages that code refers to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("dstackweb/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST = re.compile(r"`(?:tests/)?([\w/]+\.py)(?:::(test_\w+))?`")
REFERENCE = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")


def anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def broken(base: Path, targets: list[str]) -> Iterator[str]:
    for target in targets:
        path, _, anchor = target.partition("#")
        page = base / path
        if not page.exists() or (anchor and anchor not in anchors(page)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_has_a_target(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    here = [link.replace("#", f"{page.name}#") if link.startswith("#") else link for link in links]
    assert list(broken(page.parent, here)) == []


def test_every_page_that_code_refers_to_exists() -> None:
    files = [
        file for room in ("dstackweb", "templates", "tests", "tools", "bench") for file in ROOT.glob(f"{room}/**/*.*")
    ]
    sources = [file for file in files if file.suffix in (".py", ".html", ".js") and file != Path(__file__)]
    references = {found for source in sources for found in REFERENCE.findall(source.read_text())}
    assert references
    assert list(broken(ROOT, sorted(references))) == []


def test_every_test_that_a_page_names_exists() -> None:
    named = {found for page in PAGES for found in TEST.findall(page.read_text()) if "test_" in "".join(found)}
    assert named
    missing = [
        (file, name)
        for file, name in named
        if not (path := ROOT / "tests" / file).exists() or (name and f"def {name}(" not in path.read_text())
    ]
    assert missing == []
