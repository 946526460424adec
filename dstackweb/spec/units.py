"""Ranges, sizes, durations, GPUs and prices: parsing and writing the run file's notation (`2..8`, `8GB..`, `30m`,
`A100:2`), and the text that the web pages and the command line show for a value (`8 GB`, `30 min`).

Sizes are whole MiB with 1GB = 1024MB, as dstack counts; durations are whole seconds. `format_…` writes what `parse_…`
reads back; `…_text` is for people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from dstackweb.lib.language import gettext as _

MAX_COUNT = 100_000
MAX_MEMORY_MIB = 1 << 30
MAX_DURATION_S = 3650 * 86_400
"""Bounds beyond any real request: each parsed number fits a 32-bit column."""
MOST_GPU_NAMES = 50
"""Each of them is compared with every GPU and every offer there is."""

NO_GPU_NAMES = {"all", "any", "false", "no", "none", "null", "off", "on", "true", "yes"}
"""Words that no GPU is called, so that a run with one of them would wait for ever."""
OTHER_VENDORS = {"amd": "AMD", "google": "Google", "tpu": "Google", "intel": "Intel", "tenstorrent": "Tenstorrent"}

_MIB = {"mb": 1, "gb": 1024, "tb": 1024 * 1024}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(mb|gb|tb)?", re.ASCII)
_GPU_NAME = re.compile(r"[A-Za-z][A-Za-z0-9 _.-]{0,99}")
_NEEDS = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})x([A-Za-z][\w .,-]*?)(?::(\d{1,9})(GB|MB))?", re.ASCII)
_SPAN = re.compile(r"(\d{1,12})\s*([smhdw])\s*", re.ASCII)


@dataclass(frozen=True)
class Range:
    """From `min` to `max`, both included; None is open on that side."""

    min: int | None
    max: int | None


def parse_count(text: str) -> int:
    """A whole number of things. Raises ValueError with what was expected."""
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(_("%(text)s is not a whole number") % {"text": repr(text)})
    if len(text) > 9 or int(text) > MAX_COUNT:
        raise ValueError(_("%(text)s is more than %(max_count)s") % {"text": text, "max_count": MAX_COUNT})
    return int(text)


def parse_memory(text: str) -> int:
    """MiB of `512MB`, `8GB`, `1.5TB`; a bare number means GB. Raises ValueError with what was expected."""
    found = _SIZE.fullmatch(text.strip().lower())
    if not found:
        raise ValueError(_("%(text)s is not a size such as 8GB, 512MB or 1TB") % {"text": repr(text.strip())})
    mib = round(Decimal(found[1]) * _MIB[found[2] or "gb"])
    if mib > MAX_MEMORY_MIB:
        raise ValueError(
            _("%(text)s is more than %(max_memory_mib)s")
            % {"text": text.strip(), "max_memory_mib": format_memory(MAX_MEMORY_MIB)}
        )
    return mib


def format_memory(mib: int) -> str:
    """The shortest exact writing: 8192 is `8GB`, 1536 is `1536MB`."""
    for unit in ("tb", "gb"):
        if mib and mib % _MIB[unit] == 0:
            return f"{mib // _MIB[unit]}{unit.upper()}"
    return f"{mib}MB"


def parse_duration(text: str) -> int:
    """Seconds of `90s`, `30m`, `1h30m`, `7d`, `2w`, or of a bare number. Raises ValueError with what was expected."""
    text = text.strip().lower()
    bare = text.isascii() and text.isdigit() and len(text) <= 12
    spans = [(text, "s")] if bare else _SPAN.findall(text)
    if not spans or not (bare or re.fullmatch(f"(?:{_SPAN.pattern})+", text, re.ASCII)):
        raise ValueError(_("%(text)s is not a duration such as 30m, 24h or 3600 (seconds)") % {"text": repr(text)})
    seconds = sum(int(amount) * _SECONDS[unit] for amount, unit in spans)
    if seconds > MAX_DURATION_S:
        raise ValueError(
            _("%(text)s is more than %(max_duration_s)s days")
            % {"text": text, "max_duration_s": MAX_DURATION_S // 86_400}
        )
    return seconds


def format_duration(seconds: int) -> str:
    """The shortest exact writing, in hours at most: 86400 is `24h`, 5400 is `90m`."""
    for unit in ("h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds // _SECONDS[unit]}{unit}"
    return f"{seconds}s"


def parse_range(text: str, parse: Callable[[str], int]) -> Range:
    """`2` is exactly 2, `2..` at least, `..8` at most, `2..8` between. Raises ValueError with what was expected."""
    if ".." not in text:
        only = parse(text)
        return Range(only, only)
    low, high = (side.strip() for side in text.split("..", 1))
    if not low and not high:
        raise ValueError(_("%(text)s needs a number on at least one side") % {"text": repr(text.strip())})
    found = Range(parse(low) if low else None, parse(high) if high else None)
    if found.min is not None and found.max is not None and found.min > found.max:
        raise ValueError(_("%(text)s starts above its end") % {"text": text.strip()})
    return found


def positive(value: Range) -> Range:
    """The range if neither end is zero. Raises ValueError."""
    if value.min == 0 or value.max == 0:
        raise ValueError(_("it must be greater than zero"))
    return value


def format_range(value: Range, show: Callable[[int], str] = str) -> str:
    """The inverse of `parse_range`."""
    if value.min == value.max and value.min is not None:
        return show(value.min)
    low = "" if value.min is None else show(value.min)
    high = "" if value.max is None else show(value.max)
    return f"{low}..{high}"


def parse_gpu(text: str) -> dict[str, Any]:
    """The `name`, `memory` and `count` of dstack's `A100:40GB:2`, `A100,H100:40GB..:1..4`, `24GB` or `2`, in any order.

    A part that starts with a letter is names, one with a unit is memory, any other is a count. The vendor `nvidia` is
    ignored: only NVIDIA GPUs are supported. Raises ValueError with what was expected.
    """
    found: dict[str, Any] = {}
    for part in (part.strip() for part in text.split(":")):
        if part.lower() == "nvidia":
            continue
        if not part:
            raise ValueError(_("%(text)s has an empty part") % {"text": repr(text)})
        key, value = _gpu_part(part)
        if key in found:
            raise ValueError(_("%(text)s has two values for %(key)s") % {"text": repr(text), "key": key})
        found[key] = value
    return found


def _gpu_part(part: str) -> tuple[str, Any]:
    if part[0].isalpha():
        return "name", parse_names(part.split(","))
    if any(char.isalpha() for char in part):
        return "memory", positive(parse_range(part, parse_memory))
    return "count", parse_range(part, parse_count)


def parse_names(names: list[str]) -> list[str]:
    """GPU names without spaces around them. Raises ValueError for an invalid name or an unsupported vendor."""
    stripped = list(dict.fromkeys(name.strip() for name in names))
    if len(stripped) > MOST_GPU_NAMES:
        raise ValueError(_("it has more than %(most_gpu_names)s names") % {"most_gpu_names": MOST_GPU_NAMES})
    for name in stripped:
        if not _GPU_NAME.fullmatch(name) or name.lower() in NO_GPU_NAMES:
            raise ValueError(_("%(name)s is not a GPU name such as A100") % {"name": repr(name[:120])})
        if name.lower() in OTHER_VENDORS:
            raise ValueError(
                _("%(other_vendors)s GPUs are not supported, only NVIDIA GPUs")
                % {"other_vendors": OTHER_VENDORS[name.lower()]}
            )
    return stripped


def format_gpu(names: tuple[str, ...], memory: Range, count: Range) -> str:
    """The inverse of `parse_gpu`."""
    parts = [",".join(names)] if names else []
    if memory != Range(None, None):
        parts.append(format_range(memory, format_memory))
    return ":".join([*parts, format_range(count)])


def duration_text(seconds: float) -> str:
    """`12 s`, `4 min`, `1 h 30 min`, `2 d 3 h`."""
    return " ".join(f"{number} {unit}" for number, unit in duration_parts(seconds))


def duration_parts(seconds: float) -> list[tuple[int, str]]:
    """Numbers and units (s, min, h, d), rounded down; from an hour on in two units, unless the second is 0."""
    whole = max(0, int(seconds))
    for first, first_s, second, second_s in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= first_s:
            rest = whole % first_s // second_s
            return [(whole // first_s, first), *([(rest, second)] if rest else [])]
    return [(whole // 60, "min")] if whole >= 60 else [(whole, "s")]


def memory_text(mib: float) -> str:
    """MiB in the unit that fits: `512 MB`, `80 GB`, `1.5 TB`."""
    return size_text(mib * 1_048_576) if mib else "0 MB"


def size_text(size: float) -> str:
    """Bytes in the unit that fits, 1 KB being 1024 bytes: `17 bytes`, `3.4 MB`, `80 GB`."""
    if size < 1024:
        return f"{size:.0f} byte{'' if round(size) == 1 else 's'}"
    for power, unit in enumerate(("KB", "MB", "GB"), start=1):
        if round(size / 1024**power, 1) < 1024:
            return f"{size / 1024**power:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size / 1024**4:.1f}".removesuffix(".0") + " TB"


def price_text(usd: float | Decimal) -> str:
    """USD to the cent, or to four places where it has more: `$1.50`, `$0.0104`."""
    whole, _, places = f"{usd:,.4f}".partition(".")
    return f"${whole}.{places[:2]}{places[2:].rstrip('0')}"


class Needs(NamedTuple):
    """What a run needs, as short as lists show it. Its `code` means the same in every language.

    Of each of `nodes`: GPUs, of these models and with this memory if any, or else CPUs.
    """

    nodes: int = 1
    gpus: int = 0
    names: tuple[str, ...] = ()
    memory_mib: int = 0
    cpus: int = 0

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Needs:
        """Those of an EffectiveSpec as JSON, of which `requirements` and `nodes` are read."""
        wants = spec["requirements"]
        nodes, gpus = spec.get("nodes", 1), wants["gpu_count_min"]
        if not gpus:
            return cls(nodes, cpus=wants["cpu_min"])
        names = tuple(wants["gpu_names"])
        return cls(nodes, gpus, names, (wants.get("gpu_memory_min_mib") or 0) if names else 0)

    @property
    def code(self) -> str:
        """`2xCPU`, `1xGPU`, `2xA100:40GB`, `4x8xH100,H200` for four nodes."""
        each = f"{self.gpus}x{','.join(self.names) or 'GPU'}" if self.gpus else f"{self.cpus}xCPU"
        if self.memory_mib:
            gib, rest = divmod(self.memory_mib, 1024)
            each += f":{self.memory_mib}MB" if rest else f":{gib}GB"
        return f"{self.nodes}x{each}" if self.nodes > 1 else each

    @classmethod
    def parse(cls, code: str) -> Needs | None:
        """The opposite of `code`; None if it is none."""
        found = _NEEDS.fullmatch(code)
        if found is None:
            return None
        nodes, count, what, memory, unit = found.groups()
        if what == "CPU":
            return cls(int(nodes or 1), cpus=int(count))
        names = () if what == "GPU" else tuple(what.split(","))
        return cls(int(nodes or 1), int(count), names, int(memory or 0) * (1024 if unit == "GB" else 1))
