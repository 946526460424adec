"""Secrets on their way out: each occurrence becomes as many asterisks, in whatever form programs print values.

A value is looked for as it is, line by line, in base64 (also inside something longer, and wrapped), URL-quoted, and as
JSON and Python print it. Line ends are never masked, so that what follows one never waits for what comes before.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, quote_plus

HEAD = 8
"""Bytes of a pattern that are searched for; where they are found the rest is compared."""
PART_MIN = 6
"""Shorter lines and encoded forms occur in any log by chance."""
BARE = 4
"""A longer beginning of a secret is never shown, however long nothing follows."""
WRAPPED = (76, 64)
STARS = bytes(byte if byte in b"\r\n" else ord("*") for byte in range(256))
URL_SAFE = ("", "/", "!~*'()", ";/?:@&=+$,#!~*'()")
"""What Python, JavaScript and others leave as it is in addition to letters, digits and `_.-~`."""


def patterns(value: str) -> set[bytes]:
    """The bytes by which a secret is known."""
    lines = {value, value.strip(), *(line.strip() for line in value.splitlines())}
    texts = {form for line in lines for form in (line, *_quoted(line))}
    encoded = _in_base64(value.encode("utf-8", "surrogateescape"))
    long = {text.encode("utf-8", "surrogateescape") for text in texts} | encoded
    return {value.encode("utf-8", "surrogateescape")} | {pattern for pattern in long if len(pattern) >= PART_MIN}


def _quoted(text: str) -> set[str]:
    data = text.encode("utf-8", "surrogateescape")
    in_json = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    in_json |= {form.replace("/", "\\/") for form in in_json}
    in_json |= {_escaped(form) for form in in_json}
    in_url = {quote_plus(data), *(quote(data, safe=safe) for safe in URL_SAFE)}
    in_url |= {re.sub("%..", lambda found: found[0].lower(), form) for form in in_url}
    return in_json | in_url | {repr(text)[1:-1], repr(data)[2:-1]}


def _escaped(text: str) -> str:
    """As JSON that may be put into HTML."""
    return re.sub("[<>&'+]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _in_base64(data: bytes) -> set[bytes]:
    """The characters of base64 that the value alone decides, at each of the three places where it may begin."""
    found = set()
    for before in range(3):
        whole = base64.b64encode(bytes(before) + data)
        core = whole[(8 * before + 5) // 6 : 8 * (before + len(data)) // 6]
        found.add(core)
        if before == 0:
            found |= {core[at : at + width] for width in WRAPPED for at in range(0, len(core), width)}
    return found | {core.replace(b"+", b"-").replace(b"/", b"_") for core in found}


class Masker:
    """Masks patterns, overlapping ones too. The work per byte hardly depends on their number."""

    def __init__(self, found: Iterable[bytes]) -> None:
        self._by_head: dict[bytes, list[bytes]] = {}
        for pattern in sorted(set(found) - {b""}, key=len, reverse=True):
            self._by_head.setdefault(pattern[:HEAD], []).append(pattern)
        heads = self._by_head
        self.longest = max((len(many[0]) for many in heads.values()), default=1)
        self._beginnings = {head[:size] for head in heads for size in range(1, len(head))}
        self._heads = re.compile(_any_of(heads), re.DOTALL) if heads else None

    @classmethod
    def of(cls, values: Iterable[str]) -> Masker:
        """For secrets in all their forms."""
        return cls({pattern for value in values for pattern in patterns(value)})

    def mask(self, data: bytes) -> bytes:
        """`data` with each occurrence as asterisks of the same length; line ends stay."""
        if self._heads is None:
            return data
        out, masked, at = bytearray(data), 0, 0
        while found := self._heads.search(data, at):
            at = found.start() + 1
            end = found.start() + self._length(data, found.start(), found.group())
            start = max(masked, found.start())
            if end > start:
                out[start:end] = data[start:end].translate(STARS)
                masked = end
        return bytes(out)

    def _length(self, data: bytes, start: int, longest_head: bytes) -> int:
        """Of the longest pattern that begins here; 0 if none does."""
        for size in range(len(longest_head), 0, -1):
            for pattern in self._by_head.get(longest_head[:size], ()):
                if data.startswith(pattern, start):
                    return len(pattern)
        return 0

    def settled(self, data: bytes, least: int = 1) -> int:
        """The length of `data` without a possible beginning of a pattern, of `least` bytes or more, at its end."""
        end = len(data)
        for size in range(least, min(HEAD, len(data) + 1)):
            if data[-size:] in self._beginnings:
                end = len(data) - size
        for head, many in self._by_head.items():
            at = data.find(head, max(0, len(data) - len(many[0]) + 1))
            while 0 <= at < end:
                rest = data[at:]
                if any(len(pattern) > len(rest) and pattern.startswith(rest) for pattern in many):
                    end = at
                at = data.find(head, at + 1)
        return end


def _any_of(words: Iterable[bytes]) -> bytes:
    """A regular expression for the longest of these words, in which each branch begins with another byte."""
    root: dict[int, Any] = {}
    for word in words:
        node = root
        for byte in word:
            node = node.setdefault(byte, {})
        node[-1] = {}
    return _branches(root)


def _branches(node: dict[int, Any]) -> bytes:
    ways = [re.escape(bytes([byte])) + _branches(below) for byte, below in node.items() if byte >= 0]
    if not ways:
        return b""
    return b"(?:" + b"|".join(ways) + b")" + (b"?" if -1 in node else b"")
