"""Numbers, sizes, durations and moments as text: one formatter each."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Iterator
from decimal import Decimal

from django.utils import timezone
from django.utils.translation import ngettext


def duration(seconds: float | None) -> str:
    """Seconds as `12 s`, `4 min`, `2 h 05`, `1 d 2 h`. app.js says the same."""
    if seconds is None:
        return "–"
    s = max(0, math.floor(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02d}"
    hours = s % 86400 // 3600
    return f"{s // 86400} d {hours} h" if hours else f"{s // 86400} d"


def mebibytes(mib: int | None) -> str:
    """Memory with the unit that fits: `512 MB`, `80 GB`, `1.5 TB`."""
    if mib is None:
        return "–"
    if mib < 1024:
        return f"{mib} MB"
    amount, unit = (mib / 1024, "GB") if mib < 1024 * 1024 else (mib / 1024 / 1024, "TB")
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def gpus(count: int) -> str:
    """`1 GPU`, `4 GPUs`."""
    return ngettext("%d GPU", "%d GPUs", count) % count


def cpus(count: int) -> str:
    """`1 CPU`, `8 CPUs`."""
    return ngettext("%d CPU", "%d CPUs", count) % count


def dollars(amount: object) -> str:
    """`$12.50`."""
    return f"${Decimal(str(amount)):.2f}"


def hourly(price: Decimal) -> str:
    """USD per hour: to the cent from 10 on, else to four digits."""
    return f"${price:,.2f}" if price >= 10 else f"${price:.4f}"


def moment(iso: str) -> str:
    """A stored time as `18:40 UTC`, with the day where it isn't today."""
    at, today = dt.datetime.fromisoformat(iso).astimezone(dt.UTC), timezone.now().astimezone(dt.UTC).date()
    return f"{at:%H:%M} UTC" if at.date() == today else f"{at:%Y-%m-%d %H:%M} UTC"


_MOMENT = re.compile(r"(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d) UTC")


def moments(text: str) -> Iterator[tuple[str, dt.datetime | None]]:
    """A sentence cut at its moments: each piece, and the time that it stands for where it is one of `moment`."""
    at = 0
    for found in _MOMENT.finditer(text):
        yield text[at : found.start()], None
        day = found[1] or f"{timezone.now().astimezone(dt.UTC):%Y-%m-%d}"
        try:
            yield found[0], dt.datetime.fromisoformat(f"{day} {found[2]}+00:00")
        except ValueError:  # somebody's own words that look like one
            yield found[0], None
        at = found.end()
    yield text[at:], None
