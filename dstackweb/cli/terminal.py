"""A job's output on a terminal: its text and its colours, and nothing else that a terminal would do."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable

from dstackweb.lib.text import CONTROLS, ESCAPE, FORMATS, few_accents

MOST_HELD = 4096
"""An escape sequence of more characters is none."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_BEGUN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\x9c]*\x1b?|[ -/]*)$")
_OTHER = re.compile(f"(?!\r)[{CONTROLS}{FORMATS}]")


class ColoursOnly:
    """Takes the bytes of a log piece by piece.

    Sequences that move the cursor, set titles, write to the clipboard or link are left out, also where one is split
    between pieces. Other characters that can't be seen, or turn the text around them, become U+FFFD.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""

    def __call__(self, data: bytes) -> str:
        text = self._held + self._decode(data)
        begun = _BEGUN.search(text, max(0, len(text) - MOST_HELD))
        self._held = begun[0] if begun else ""
        text = text[: len(text) - len(self._held)]
        parts, end = [], 0
        for found in ESCAPE.finditer(text):
            parts.append(_plain(text[end : found.start()]))
            parts.append(found[0] if _COLOUR.fullmatch(found[0]) else "")
            end = found.end()
        return "".join([*parts, _plain(text[end:])])


def _plain(text: str) -> str:
    return few_accents(_OTHER.sub("\ufffd", text))


def to_stdout() -> Callable[[bytes], object]:
    """What writes a log to stdout: its very bytes, except on a terminal."""
    shown = ColoursOnly() if sys.stdout.isatty() else None

    def write(data: bytes) -> None:
        if shown is None:
            sys.stdout.buffer.write(data)
        else:
            sys.stdout.write(shown(data))
        sys.stdout.flush()

    return write
