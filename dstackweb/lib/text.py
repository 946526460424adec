"""Characters that are no text: they can't be seen, move a cursor, or change the order of what stands around them.

Where people read text that programs or other people chose, each shows as its number, such as `[U+202E]`.
"""

from __future__ import annotations

import json
import re

JOINERS = "\u200c\u200d"
"""Invisible, but parts of words and emoji."""

FORMATS = (
    "\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e007f"
)
"""Marks of order and format, and unseen separators, as a part of a regular expression."""
CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
"""Without line feed and tab."""
MARKS = "\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
"""Accents, of which each character of a language has a few."""
MOST_MARKS = 4

ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)|[ -/]*[0-~])")
"""What moves a terminal's cursor, sets its colours or its title, and so on."""
_UNSEEN = re.compile(f"[{CONTROLS}{FORMATS}]")
_FLOOD = re.compile(f"([{MARKS}]{{{MOST_MARKS}}})[{MARKS}]+")
# Where one of these may be in UTF-8. Most pages have none, and are only searched: by bytes that are in no other text of
# ours, and by patterns that each begin with one byte, which is much faster than one pattern for all.
_RARE = (
    bytes(code for code in (*range(0x20), 0x7F) if chr(code) not in "\t\n\r") + b"\xcc\xcd\xd2\xd8\xdb\xdc\xe0\xe1\xf3"
)
_SUSPECT = [
    re.compile(pattern)
    for pattern in (
        rb"\xc2[\x80-\x9f\xad]",
        rb"\xe2(?:\x80[\x8b\x8e\x8f\xa8-\xae]|\x81[\xa0-\xaf]|\x83[\x90-\xbf])",
        rb"\xef(?:\xb8[\xa0-\xaf]|\xbb\xbf|\xbf[\xb9-\xbb])",
        rb"\xf0[\x91\x93\x9b\x9d]",
    )
]


def seen(text: str) -> str:
    """`text` with a number for each such character, but line ends and tabs; and at most a few accents on a letter."""
    return few_accents(_UNSEEN.sub(_number, text))


def without_escapes(text: str) -> str:
    """What a terminal shows of a job's output: without escape sequences, and of a line that was restarted the end."""
    lines = ESCAPE.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def few_accents(text: str) -> str:
    """Without floods of accents, which cover the lines above and below."""
    return _FLOOD.sub(r"\1…", text)


def in_json(text: str) -> str:
    """JSON with an escape for each such character. Its value is the same."""
    text = _FLOOD.sub(lambda found: found[1] + _escaped(found[0][MOST_MARKS:]), text)
    return _UNSEEN.sub(lambda found: _escaped(found[0]), text)


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]


def seen_page(page: bytes) -> bytes:
    """The same for a page in UTF-8, line ends of any kind left alone."""
    if len(page.translate(None, _RARE)) == len(page) and not any(pattern.search(page) for pattern in _SUSPECT):
        return page
    return "\r\n".join(seen(line) for line in page.decode("utf-8", "replace").split("\r\n")).encode()


def _number(found: re.Match[str]) -> str:
    return f"[U+{ord(found[0]):04X}]"
