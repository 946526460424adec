"""Line breaks in Chinese text, which has no blanks between words: rich takes a whole sentence for one long word."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from dstackweb.cli.language import ENGLISH, language

if TYPE_CHECKING:
    from rich.text import Text

CHINESE = "\u2e80-\u9fff\uf900-\ufaff\uff01-\uff60"
OPENING, CLOSING = "“（《「『", "”，。、：；？！）》」』…"


@cache
def word() -> re.Pattern[str]:
    """What stays on one line: a Chinese character or a word of another script, with the punctuation beside it."""
    return re.compile(rf"\s*[{OPENING}]*(?:[{CHINESE}]|[^\s{CHINESE}]+)[{CLOSING}]*\s*")


def use() -> None:
    """Have rich break lines so, if Chinese is spoken."""
    if language() != ENGLISH:
        from rich import _wrap
        from rich.text import Text

        _wrap.re_word = word()
        Text.rstrip_end = _rstrip_end  # type: ignore[assignment,method-assign]  # rich has no option for it


def _rstrip_end(line: Text, width: int) -> None:
    """Remove blanks at the end of a line that is too wide. rich's own counts characters, not their cells."""
    blanks = len(line.plain) - len(line.plain.rstrip())
    if (excess := min(blanks, line.cell_len - width)) > 0:
        line.right_crop(excess)
