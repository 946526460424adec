"""Fair share per member in words: a run's penalty, and what a member's share comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _, ngettext

from dstackweb.wording.sentence import listing
from dstackweb.wording.units import duration


def penalty(seconds: int, basis: Mapping[str, Any]) -> str:
    """`recently used 310 GPU-h, holds 4 GPUs; the median is 40 GPU-h: 52 min behind`; empty without a penalty."""
    if not seconds:
        return ""
    if not basis:
        return _("%s behind, since it was moved") % duration(seconds)
    parts = {
        "load": load(basis.get("used_gpu_hours", 0), basis.get("held_gpus", 0), basis.get("queued_gpus", 0)),
        "median": hours(basis.get("median_gpu_hours", 0)),
        "time": duration(seconds),
    }
    return _("%(load)s; the median is %(median)s GPU-h: %(time)s behind") % parts


def load(used_gpu_hours: float, held_gpus: int, queued_gpus: int) -> str:
    """`recently used 310 GPU-h, holds 4 GPUs, 8 GPUs queued`: what was used counts less with time."""
    parts = [_("recently used %s GPU-h") % hours(used_gpu_hours)]
    if held_gpus:
        parts.append(ngettext("holds %d GPU", "holds %d GPUs", held_gpus) % held_gpus)
    if queued_gpus:
        parts.append(ngettext("%d GPU queued", "%d GPUs queued", queued_gpus) % queued_gpus)
    return listing(parts)


def settings(most_s: int, half_life_days: int, median: float) -> str:
    """`median 8 GPU-h, half-life 7 d, penalty up to 1 h`."""
    parts = {"median": hours(median), "half_life": duration(half_life_days * 86_400), "most": duration(most_s)}
    return _("median %(median)s GPU-h, half-life %(half_life)s, penalty up to %(most)s") % parts


def hours(count: float) -> str:
    """`40`, `0.5`; from 10 on whole."""
    return f"{count:.0f}" if count >= 10 else f"{count:.1f}".removesuffix(".0")
