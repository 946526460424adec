"""Which prefix and which group a task belongs to, from its key alone: Dask's rules without their trap. Pure.

Dask drops any word of eight letters that begins with a-f (`train-baseline-3` becomes `train`); here only a word
that could be a hash goes: eight letters, all of them a-f.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from dstackweb.progress.models import NAME_MAX

OTHER = "Other"
"""Of keys that say nothing."""

DATA = "data"
"""Of keys that are a hash, as Dask gives to data that was sent to workers."""

_HASH = re.compile(r"[a-f0-9]{32}")
_LETTERS_OF_A_HASH = re.compile(r"[a-f]{8}")


class Place(NamedTuple):
    """Where a task is counted; both at most NAME_MAX characters."""

    prefix: str
    group: str


def split(key: object) -> Place:
    """The prefix (the name without numbers and hashes), and the group (a tuple's name as it stands, else the prefix).

    Keys are text, bytes, or tuples whose first item is the name; anything else is OTHER.
    """
    if type(key) is str:
        return _of_text(key)
    if type(key) is bytes:
        return _of_text(key.decode(errors="replace"))
    if type(key) is tuple and key:
        name = key[0]
        place = split(name)
        return Place(place.prefix, name[:NAME_MAX]) if type(name) is str and name else place
    return Place(OTHER, OTHER)


@lru_cache(16_384)
def _of_text(key: str) -> Place:
    prefix = _prefix(key)[:NAME_MAX]
    if key.startswith("("):
        return Place(prefix, key.split(",", 1)[0].strip("()\"'")[:NAME_MAX] or prefix)
    return Place(prefix, prefix)


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
