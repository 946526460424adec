"""Lists the licences of what a server installs, from the packages' metadata.

python -m tools.licences > docs/licences.md
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NOT_EVERYWHERE = {
    "async-timeout==5.0.1": "Apache Software License",
    "colorama==0.4.6": "BSD License",
    "tzdata==2026.6": "Apache-2.0",
}
"""Licences of packages that only some machines install, read from their wheels; with the version, to be read again."""
HEAD = """# Licences of dependencies

All packages that a server may install (`requirements.txt`), with the licence that their own metadata names. Some are
needed only on some machines. The wheels of `cryptography` and `psycopg-binary` also contain libraries under their own
licences: OpenSSL in both, and in the second PostgreSQL's client, Kerberos, OpenLDAP and Cyrus SASL.

Files in `static/vendor/` have their licences beside them, and `static/vendor/VERSIONS.md` lists them. This page is
written by `python -m tools.licences > docs/licences.md`.

| Package | Version | Licence | Only where |
| --- | --- | --- | --- |
"""


class Package(NamedTuple):
    name: str
    version: str
    marker: str
    """The condition under which it is installed; empty: always."""


def pinned() -> list[Package]:
    """All packages of requirements.txt, by name."""
    text = (ROOT / "requirements.txt").read_text()
    lines = re.findall(r"^([\w.-]+)==([^\s;]+)(?: ; (.+?))? \\$", text, re.MULTILINE)
    return sorted(Package(*line) for line in lines)


def licence(package: Package) -> str:
    """By its SPDX expression, else its classifiers, else its licence field. Empty if it says none."""
    try:
        info = metadata(package.name)
    except PackageNotFoundError:
        return NOT_EVERYWHERE.get(f"{package.name}=={package.version}", "")
    if expression := info.get("License-Expression"):
        return expression
    classifiers = [
        line.rpartition(" :: ")[2] for line in info.get_all("Classifier") or () if line.startswith("License")
    ]
    text = ", ".join(name for name in classifiers if name != "OSI Approved") or (info.get("License") or "")
    return text.splitlines()[0][:60] if text else ""


def page() -> str:
    rows = ""
    for package in pinned():
        marker = f" `{package.marker}`" if package.marker else ""
        rows += f"| {package.name} | {package.version} | {licence(package)} |{marker} |\n"
    return HEAD + rows


if __name__ == "__main__":
    print(page(), end="")
