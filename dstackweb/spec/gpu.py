"""dstack's one-line grammar for GPUs: `A100:40GB:2`, `A100,H100:40GB..:1..4`, `24GB`, `2`."""

from __future__ import annotations

import re
from typing import Any

from dstackweb.spec.units import Range, format_memory, format_range, parse_count, parse_memory, parse_range, positive

OTHER_VENDORS = {"amd": "AMD", "google": "Google", "tpu": "Google", "intel": "Intel", "tenstorrent": "Tenstorrent"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9 _.-]*")


def parse_gpu(text: str) -> dict[str, Any]:
    """The `name`, `memory` and `count` of a request, in any order, each at most once.

    A part that starts with a letter is names, one with a unit is memory, any other is a count. The vendor `nvidia` is
    ignored: only NVIDIA GPUs are supported. Raises ValueError with what was expected.
    """
    found: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(":")):
        if part.lower() == "nvidia":
            continue
        if not part:
            raise ValueError(f"{text!r} has an empty part")
        key, value = _read(part)
        if key in found:
            raise ValueError(f"{text!r} has two values for {key}")
        found[key] = value
    return found


def _read(part: str) -> tuple[str, Any]:
    """The kind of a part, and its value."""
    if part[0].isalpha():
        return "name", parse_names(part.split(","))
    if any(char.isalpha() for char in part):
        return "memory", parse_gpu_memory(part)
    return "count", parse_gpu_count(part)


def parse_names(names: list[str]) -> list[str]:
    """GPU names without spaces around them. Raises ValueError for an invalid name or an unsupported vendor."""
    stripped = [name.strip() for name in names]
    for name in stripped:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a GPU name such as A100")
        if name.lower() in OTHER_VENDORS:
            raise ValueError(f"{OTHER_VENDORS[name.lower()]} GPUs are not supported, only NVIDIA GPUs")
    return list(dict.fromkeys(stripped))


def parse_gpu_memory(text: str) -> Range:
    """Memory of one GPU, in MiB."""
    return positive(parse_range(text, parse_memory))


def parse_gpu_count(text: str) -> Range:
    """GPUs per node."""
    return parse_range(text, parse_count)


def format_gpu(names: tuple[str, ...], memory: Range, count: Range) -> str:
    """The inverse of `parse_gpu`."""
    parts = [",".join(names)] if names else []
    if memory != Range(None, None):
        parts.append(format_range(memory, format_memory))
    return ":".join([*parts, format_range(count)])
