"""Translation for code that knows no Django, such as the errors of a run file. The server sets what translates."""

from __future__ import annotations

from collections.abc import Callable

_translate: Callable[[str], str] = str


def use(translate: Callable[[str], str]) -> None:
    """Translate by this function from now on."""
    global _translate
    _translate = translate


def gettext(text: str) -> str:
    return _translate(text)


def gettext_noop(text: str) -> str:
    """Marks a text that is translated later."""
    return text
