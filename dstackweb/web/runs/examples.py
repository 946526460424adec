"""The run files under examples/, offered on the submit page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from django.conf import settings


@dataclass(frozen=True)
class Example:
    """A run file that works as it is. `about` is its first comment line."""

    name: str
    about: str
    text: str


@cache
def shipped() -> tuple[Example, ...]:
    """All of them by name, read once: they come with the program."""
    files = sorted((settings.BASE_DIR / "examples").glob("*.y*ml"), key=lambda file: (file.stem != "hello", file.stem))
    return tuple(_read(file.stem, file.read_text()) for file in files)


def _read(stem: str, text: str) -> Example:
    first = text.partition("\n")[0]
    return Example(stem, first.lstrip("# ").strip() if first.startswith("#") else "", text)
