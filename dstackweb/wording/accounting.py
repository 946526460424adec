"""What a backend's accounting says about a job, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _

from dstackweb.wording.sentence import listing
from dstackweb.wording.units import mebibytes


def used(usage: Mapping[str, Any] | None) -> str:
    """`used 3 CPU-h of 8 CPU-h reserved, at most 11 GB`, from `Instance.usage`; empty where nothing is known.

    Hours of billing are left out where they are those of the CPUs, as they are unless someone sets weights.
    """
    known = usage or {}
    reserved, billed_h = known.get("cpu_reserved_s"), known.get("billed_h")
    parts = [_cpus(known.get("cpu_used_s"), reserved)]
    if "memory_peak_mib" in known:
        parts.append(_("at most %s") % mebibytes(known["memory_peak_mib"]))
    if "energy_j" in known:
        parts.append(_energy(known["energy_j"]))
    if billed_h and (reserved is None or abs(billed_h - reserved / 3600) > 0.001):
        parts.append(_("billed as %s h") % _amount(billed_h))
    return listing(filter(None, parts))


def _cpus(used_s: float | None, reserved_s: int | None) -> str:
    if used_s is None:
        return _("reserved %s") % _cpu_time(reserved_s) if reserved_s else ""
    if not reserved_s:
        return _("used %s") % _cpu_time(used_s)
    return _("used %(used)s of %(reserved)s reserved") % {"used": _cpu_time(used_s), "reserved": _cpu_time(reserved_s)}


def _cpu_time(seconds: float) -> str:
    if seconds < 60:
        return _("%s CPU-s") % _amount(seconds)
    return _("%s CPU-min") % _amount(seconds / 60) if seconds < 3600 else _("%s CPU-h") % _amount(seconds / 3600)


def _energy(joules: int) -> str:
    return _("%s Wh") % _amount(joules / 3600) if joules < 3_600_000 else _("%s kWh") % _amount(joules / 3_600_000)


def _amount(number: float) -> str:
    """With one place below 10."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.1f}".removesuffix(".0")
