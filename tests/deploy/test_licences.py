"""The licences of what a server installs and serves are known, listed, and let it be used and passed on."""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import PackageNotFoundError, version

from packaging.markers import Marker

from tests.support import REPO
from tools import licences

FREE = re.compile(r"MIT|BSD|Apache|ISC|MPL|Mozilla|PSF|LGPL|EPL|Zope|Python Software", re.IGNORECASE)
"""The EPL and the MPL bind changes of their own files alone."""
VENDOR = REPO / "static" / "vendor"


def test_the_page_lists_every_pinned_package_with_its_version_and_licence() -> None:
    text = (REPO / "docs" / "licences.md").read_text()
    assert text == licences.page()
    names = re.findall(r"^([A-Za-z0-9][\w.-]*)==", (REPO / "requirements.txt").read_text(), re.MULTILINE)
    assert re.findall(r"^\| (\S+) \| \d", text, re.MULTILINE) == sorted(names)
    assert {"cffi", "colorama", "psycopg-binary"} < set(names)


def test_no_package_has_an_unknown_licence_or_one_that_binds_the_whole() -> None:
    choices = {package.name: re.split(r"\s+OR\s+", licences.licence(package)) for package in licences.pinned()}
    assert {name for name, texts in choices.items() if not any(map(lets_be_used, texts))} == set()


def lets_be_used(text: str) -> bool:
    return bool(FREE.search(text)) and not re.search(r"(?<!L)GPL", text)


def test_each_pinned_package_is_installed_in_its_version_or_not_for_this_machine() -> None:
    for package in licences.pinned():
        try:
            assert version(package.name) == package.version
        except PackageNotFoundError:
            assert package.marker, package.name
            assert not Marker(package.marker).evaluate(), package.name


def test_licences_that_were_read_by_hand_are_of_pinned_versions() -> None:
    optional = {f"{package.name}=={package.version}" for package in licences.pinned() if package.marker}
    assert set(licences.NOT_EVERYWHERE) <= optional


def test_vendored_files_are_as_listed_and_have_their_licence_beside_them() -> None:
    row = re.compile(r"^\| `([^`]+)`[^|]*\| (\S+) \| \S+ \| (\S+) \| (?:`(\w+)`)? *\|", re.MULTILINE)
    rows = row.findall((VENDOR / "VERSIONS.md").read_text())
    files = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()}
    served = {name for name in files if not name.endswith(("/LICENSE", "VERSIONS.md"))}
    assert {name for name, *_rest in rows} == served | {"../icons.svg"}
    for name, package, licence, digest in rows:
        folder = "tabler-icons" if package == "@tabler/icons" else name.partition("/")[0]
        text = (VENDOR / folder / "LICENSE").read_text()
        assert {"MIT": "Permission is hereby granted, free of charge", "0BSD": "Zero-Clause BSD"}[licence] in text
        assert not digest or hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
