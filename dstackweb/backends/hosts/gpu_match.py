"""Whether a GPU is one of those asked for, by its name and memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

MEMORY_TOLERANCE = 0.92
"""A card sold with 24 GB shows as little as 22,731 MiB, since its error correction and driver keep some; the nearest
smaller card (11 GB for 12 GB) stays below this part of the nominal size."""

OTHER_MODEL = frozenset({"ti", "super", "ada", "d"})
"""Words after a model's name that make it another model: an RTX 3080 Ti is no RTX 3080."""

PART = "mig"
"""The word in the name of a MIG device, as in "NVIDIA A100-SXM4-40GB MIG 1g.5gb"."""

_WORD = re.compile(r"[a-z0-9]+")


@functools.lru_cache(4096)
def name_matches(asked: str, name: str) -> bool:
    """Whether a card named `name` by NVML is an `asked`, whatever the case, spaces and dashes.

    Whole words only: "A100" and "A100-SXM4" are in "NVIDIA A100-SXM4-80GB", "RTX4090" is in "NVIDIA GeForce RTX 4090",
    "H100" is not in "NVIDIA GH100", "L40" not in "NVIDIA L40S". Part of a card is not the card: a MIG device is found
    by its profile, "MIG 1g.5gb".
    """
    wanted = "".join(_WORD.findall(asked.lower()))
    words = _WORD.findall(name.lower())
    if is_part(name) and PART not in wanted:
        return False
    for start in range(len(words)):
        joined = ""
        for end in range(start, len(words)):
            joined += words[end]
            following = words[end + 1] if end + 1 < len(words) else ""
            if joined == wanted and following not in OTHER_MODEL:
                return True
    return False


def is_part(name: str) -> bool:
    """Whether this is a MIG device's name."""
    return PART in _WORD.findall(name.lower())


def gpu_matches(
    name: str, memory_mib: int, *, names: Iterable[str], memory_min_mib: int | None, memory_max_mib: int | None
) -> bool:
    """Whether a GPU is one of `names` (any, when empty) and its memory within the limits, which are nominal sizes."""
    if memory_min_mib is not None and memory_mib < memory_min_mib * MEMORY_TOLERANCE:
        return False
    if memory_max_mib is not None and memory_mib > memory_max_mib:
        return False
    asked = tuple(names)
    return not asked or any(name_matches(one, name) for one in asked)
