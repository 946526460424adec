"""Names that programs chose, shown so that they can be seen, read and clicked."""

from __future__ import annotations

import unicodedata

from dstackweb.lib.text import JOINERS


def visible(name: str) -> str:
    """A name whose characters all show: spaces at its ends as `␣`, controls and marks of direction by their number."""
    body = name.strip()
    if body.strip(JOINERS) == "":
        body = ""
    if body:
        start = name.index(body)
        before, after = name[:start], name[start + len(body) :]
    else:
        before, after = name, ""
    shown = "".join(char if _shows(char) else _number(char) for char in body)
    return "".join(map(_blank, before)) + shown + "".join(map(_blank, after)) or "␣"


def _shows(char: str) -> bool:
    return (
        char == " " or char in JOINERS or unicodedata.category(char) not in ("Cc", "Cf", "Cn", "Co", "Zl", "Zp", "Zs")
    )


def _blank(char: str) -> str:
    return "␣" if char == " " else _number(char)


def _number(char: str) -> str:
    """`␊` for a line break, `[U+202E]` for characters without a picture."""
    code = ord(char)
    return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"
