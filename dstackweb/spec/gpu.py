"""dstack's one-line grammar for GPUs: `A100:40GB:2`, `A100,H100:40GB..:1..4`, `24GB`, `2`."""

from __future__ import annotations

import re
from typing import Any

from dstackweb.spec.units import Range, format_memory, format_range, parse_count, parse_memory, parse_range, positive

OTHER_VENDORS = {"amd": "AMD", "google": "Google", "tpu": "Google", "intel": "Intel", "tenstorrent": "Tenstorrent"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9 _.-]*")


def parse_gpu(text: str) -> dict[str, Any]:
    """The `name`, `memory` and `count` that a request names, in any order, each at most once.

    What starts with a letter is names, what has a unit is memory, the rest is a count. The vendor `nvidia` says
    nothing more, as only NVIDIA's GPUs are managed. Raises ValueError with what was expected.
    """
    found: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(":")):
        if part.lower() == "nvidia":
            continue
        if not part:
            raise ValueError(f"{text!r} has an empty part")
        key, value = _read(part)
        if key in found:
            raise ValueError(f"{text!r} gives the {key} twice")
        found[key] = value
    return found


def _read(part: str) -> tuple[str, Any]:
    """Which of the three a part is, and its value."""
    if part[0].isalpha():
        return "name", parse_names(part.split(","))
    if any(char.isalpha() for char in part):
        return "memory", parse_gpu_memory(part)
    return "count", parse_gpu_count(part)


def parse_names(names: list[str]) -> list[str]:
    """GPU names without what surrounds them. Raises ValueError for an empty one, or a vendor that isn't managed."""
    stripped = [name.strip() for name in names]
    for name in stripped:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no GPU name such as A100")
        if name.lower() in OTHER_VENDORS:
            raise ValueError(f"{OTHER_VENDORS[name.lower()]} GPUs can't be used here, only NVIDIA's")
    return list(dict.fromkeys(stripped))


def parse_gpu_memory(text: str) -> Range:
    """Memory of one GPU, in MiB."""
    return positive(parse_range(text, parse_memory))


def parse_gpu_count(text: str) -> Range:
    """GPUs per node."""
    return parse_range(text, parse_count)


def format_gpu(names: tuple[str, ...], memory: Range, count: Range) -> str:
    """What `parse_gpu` reads back as the same."""
    parts = [",".join(names)] if names else []
    if memory != Range(None, None):
        parts.append(format_range(memory, format_memory))
    return ":".join([*parts, format_range(count)])
