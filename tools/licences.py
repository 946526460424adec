"""Lists the licences of what a server installs, from the packages' metadata.

python -m tools.licences > docs/licences.md
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Licences of dependencies

What a server installs (`requirements.txt`), by its packages' own metadata. Written by
`python -m tools.licences > docs/licences.md`. What is served from `static/vendor/` has its licences beside it.

| Package | Version | Licence |
| --- | --- | --- |
"""


def pinned() -> dict[str, str]:
    """Version by name of each package in requirements.txt, but for what only some machines need."""
    lines = (ROOT / "requirements.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+) \\$", lines, re.MULTILINE))


def licence(name: str) -> str:
    """By its SPDX expression, else its classifiers, else its licence field. Empty: not installed, or it says none."""
    try:
        found = metadata(name)
    except PackageNotFoundError:
        return ""
    if expression := found.get("License-Expression"):
        return expression
    classifiers = [
        line.rpartition(" :: ")[2] for line in found.get_all("Classifier") or () if line.startswith("License")
    ]
    text = ", ".join(one for one in classifiers if one != "OSI Approved") or (found.get("License") or "")
    return text.splitlines()[0][:60] if text else ""


def page() -> str:
    return HEAD + "".join(f"| {name} | {version} | {licence(name)} |\n" for name, version in sorted(pinned().items()))


if __name__ == "__main__":
    print(page(), end="")
