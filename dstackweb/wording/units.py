"""Durations, sizes, amounts and counts as text. `spec.units` has the rule, which the command line follows as well."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from django.utils.translation import gettext as _, gettext_noop, ngettext

from dstackweb.spec.units import Needs, duration_parts, memory_text, price_text, size_text
from dstackweb.wording.sentence import listing

UNITS = {"s": gettext_noop("%d s"), "min": gettext_noop("%d min"), "h": gettext_noop("%d h"), "d": gettext_noop("%d d")}
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=[^\d\s])")


def duration(seconds: float | None) -> str:
    """`12 s`, `4 min`, `2 h 5 min`, `1 d 2 h`; static/js/times.js writes the same."""
    return "–" if seconds is None else _joined(*duration_parts(seconds))


def elapsed(seconds: float) -> str:
    """`duration` of what goes on: with its seconds for an hour, `4 min 12 s`. static/js/times.js writes the same."""
    whole = max(0, int(seconds))
    return _joined((whole // 60, "min"), (whole % 60, "s")) if 60 <= whole < 3600 else duration(whole)


def chart_range(span: dt.timedelta) -> str:
    """`6 h`, `24 h`, `30 d`: what a chart shows, in hours for a day."""
    hours = int(span.total_seconds() // 3600)
    return _joined((hours, "h") if hours <= 24 else (hours // 24, "d"))


def exact_duration(seconds: int) -> str:
    """A setting such as a window: with its seconds or minutes where `duration` leaves them out."""
    if seconds % 60 or not seconds:
        return _joined((seconds, "s"))
    return _joined((seconds // 60, "min")) if seconds >= 86_400 and seconds % 3600 else duration(seconds)


def _joined(*parts: tuple[int, str]) -> str:
    return " ".join(_(UNITS[unit]) % number for number, unit in parts)


def for_scripts() -> dict[str, str]:
    """The units with `%s` in the place of the number, for static/js/times.js."""
    return {unit: _(text).replace("%d", "%s") for unit, text in UNITS.items()}


def mebibytes(mib: float | None) -> str:
    """`512 MB`, `80 GB`, `1.5 TB`."""
    return "–" if mib is None else memory_text(mib)


def size(count: int) -> str:
    """Bytes: `312 bytes`, `1.5 MB`."""
    return ngettext("%d byte", "%d bytes", count) % count if count < 1024 else size_text(count)


def unbroken(text: str) -> str:
    """The text for a narrow column: no line ends between a number and its unit."""
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)


def gpus(count: int) -> str:
    """`1 GPU`, `4 GPUs`."""
    return ngettext("%d GPU", "%d GPUs", count) % count


def cpus(count: int) -> str:
    """`1 CPU`, `8 CPUs`."""
    return ngettext("%d CPU", "%d CPUs", count) % count


def needs(spec: dict[str, Any]) -> str:
    """A run's requirements, short: `2 × A100 40 GB`, `4 nodes, each 1 GPU`, `2 CPUs`."""
    return _needs(Needs.of(spec))


def needs_of(code: str) -> str:
    """The same of a code (`Needs`); what is none stays as it is."""
    found = Needs.parse(code)
    return code if found is None else _needs(found)


def _needs(of: Needs) -> str:
    if of.names:
        each = f"{of.gpus} × {'/'.join(of.names)}{f' {mebibytes(of.memory_mib)}' if of.memory_mib else ''}"
    else:
        each = gpus(of.gpus) if of.gpus else cpus(of.cpus)
    return _("%(nodes)d nodes, each %(needs)s") % {"nodes": of.nodes, "needs": each} if of.nodes > 1 else each


def dollars(amount: object) -> str:
    """`$12.50`, `$0.0104`."""
    return price_text(Decimal(str(amount)))


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
        parts.append(_("billed as %s h") % figure(billed_h))
    return listing(filter(None, parts))


def _cpus(used_s: float | None, reserved_s: int | None) -> str:
    if used_s is None:
        return _("reserved %s") % _cpu_time(reserved_s) if reserved_s else ""
    if not reserved_s:
        return _("used %s") % _cpu_time(used_s)
    return _("used %(used)s of %(reserved)s reserved") % {"used": _cpu_time(used_s), "reserved": _cpu_time(reserved_s)}


def _cpu_time(seconds: float) -> str:
    if seconds < 60:
        return _("%s CPU-s") % figure(seconds)
    return _("%s CPU-min") % figure(seconds / 60) if seconds < 3600 else _("%s CPU-h") % figure(seconds / 3600)


def _energy(joules: int) -> str:
    return _("%s Wh") % figure(joules / 3600) if joules < 3_600_000 else _("%s kWh") % figure(joules / 3_600_000)


def figure(number: float) -> str:
    """`1,234`, `12`, `3.5`: with one place below 10."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.1f}".removesuffix(".0")
