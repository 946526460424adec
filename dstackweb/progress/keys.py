"""Prefix and group of a task from its key, by Dask's rules."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from dstackweb.progress.models import NAME_MAX

OTHER = "Other"
"""Prefix of keys without a name."""

DATA = "data"
"""Prefix of keys that are a hash, as Dask gives to data sent to workers."""

_HASH = re.compile(r"[a-f0-9]{32}")
_LETTERS_OF_A_HASH = re.compile(r"[a-f]{8}")


class ParsedKey(NamedTuple):
    """Prefix and group, each at most NAME_MAX characters."""

    prefix: str
    group: str


def split(key: object) -> ParsedKey:
    """The prefix (the name without numbers and hashes), and the group (the name of a tuple key, else the prefix).

    Keys are strings, bytes, or tuples whose first item is the name. Anything else is OTHER.
    """
    if type(key) is str:
        return _of_text(key)
    if type(key) is bytes:
        return _of_text(key.decode(errors="replace"))
    if type(key) is tuple and key:
        name = key[0]
        parsed = split(name)
        return ParsedKey(parsed.prefix, name[:NAME_MAX]) if type(name) is str and name else parsed
    return ParsedKey(OTHER, OTHER)


@lru_cache(16_384)
def _of_text(key: str) -> ParsedKey:
    prefix = _prefix(key)[:NAME_MAX]
    if key.startswith("("):
        return ParsedKey(prefix, key.split(",", 1)[0].strip("()\"'")[:NAME_MAX] or prefix)
    return ParsedKey(prefix, prefix)


def _prefix(key: str) -> str:
    first, *words = key.split("-")
    if not first:
        return OTHER
    name = first if first[0].isalpha() else first.split(",")[0].strip("_'()\"")
    for word in words:
        if not word.isalpha() or _LETTERS_OF_A_HASH.fullmatch(word):
            break
        name += f"-{word}"
    if _HASH.fullmatch(name):
        return DATA
    if name.startswith("<"):
        kind = name.strip("<>").split()
        return (kind[0].split(".")[-1] if kind else "") or OTHER
    return name or OTHER
