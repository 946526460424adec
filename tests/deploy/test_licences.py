"""The licences of what a server installs are known, listed, and let it be used and passed on."""

from __future__ import annotations

import re

from tests.support import REPO
from tools import licences

FREE = re.compile(r"MIT|BSD|Apache|ISC|MPL|Mozilla|PSF|LGPL|EPL|Zope|Python Software", re.IGNORECASE)
"""The EPL and the MPL bind changes of their own files alone."""


def test_the_page_lists_every_package_with_its_version_and_licence() -> None:
    assert (REPO / "docs" / "licences.md").read_text() == licences.page()
    assert len(licences.pinned()) > 40


def test_no_package_has_an_unknown_licence_or_one_that_binds_the_whole() -> None:
    found = {name: licences.licence(name) for name in licences.pinned()}
    choices = {name: re.split(r"\s+OR\s+", text) for name, text in found.items()}
    assert {name for name, texts in choices.items() if not any(map(lets_be_used, texts))} == set()


def lets_be_used(text: str) -> bool:
    return bool(FREE.search(text)) and not re.search(r"(?<!L)GPL", text)
