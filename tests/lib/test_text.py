"""Characters that can't be seen, or that change what stands around them, show as their numbers."""

from __future__ import annotations

import re
import sys
import unicodedata

import pytest

from dstackweb.lib.text import CONTROLS, FORMATS, JOINERS, MARKS, seen, seen_page

FLOOD = "e" + "\u0301" * 50


@pytest.mark.nightly
def test_every_control_and_format_character_is_known() -> None:
    hidden = re.compile(f"[{CONTROLS}{FORMATS}{JOINERS}\n\t]")
    wanted = ("Cc", "Cf", "Zl", "Zp")
    chars = map(chr, range(sys.maxunicode + 1))
    assert [char for char in chars if unicodedata.category(char) in wanted and not hidden.match(char)] == []
    assert all(
        unicodedata.category(char) in ("Mn", "Me", "Cn")
        for char in map(chr, range(0x300, 0xFE30))
        if re.match(f"[{MARKS}]", char)
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u202eb\u2066c", "a[U+202E]b[U+2066]c"),
        ("\x1b[31mred\x07\x9b", "[U+001B][31mred[U+0007][U+009B]"),
        ("ze\u200bro \ufeff\u2028", "ze[U+200B]ro [U+FEFF][U+2028]"),
        ("line\n\tnext", "line\n\tnext"),
        ("é größer 👩\u200d💻 日本語 العربية", "é größer 👩\u200d💻 日本語 العربية"),
        (FLOOD, "e" + "\u0301" * 4 + "…"),
    ],
)
def test_what_is_hidden_shows(text: str, shown: str) -> None:
    assert seen(text) == shown
    assert seen_page(f"<p>{text}</p>\r\n".encode()) == f"<p>{shown}</p>\r\n".encode()


@pytest.mark.nightly
def test_a_page_has_no_place_where_such_a_character_is_overlooked() -> None:
    """The search in bytes finds all that the replacement knows."""
    hidden = re.compile(f"[{CONTROLS}{FORMATS}]")
    for char in filter(hidden.match, map(chr, range(sys.maxunicode + 1))):
        if char != "\r":
            assert char.encode() not in seen_page(b"<p>" + char.encode() + b"</p>")
