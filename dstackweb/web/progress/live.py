"""Answer the polls of progress pages: each second, with only what has changed.

A page's version consists of its counters and their version, the time step of its rates, and its rows in their order. A
poll sends it back. The same version: 204. The same rows: the rows that changed. Otherwise: everything. So lost and
repeated responses do no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from django.http import HttpResponse
from django.utils.translation import gettext as _

from dstackweb.lib.errors import Invalid
from dstackweb.progress.selectors import NO_STUCK, ProgressBar
from dstackweb.web.common.pages import PageRequest, fingerprint, shown
from dstackweb.web.progress.bars import ProgressRow

POLL_S = 1
RATES_S = 5
"""While tasks finish, rates and times left are sent again at this interval, even without other changes."""
FADES_MS = 4 * 3600 * 1000
"""A row has no rate so long after its last change."""
DIGITS = 20
"""Numbers of a version have fewer digits."""


class PageVersion(NamedTuple):
    """Identifies what a page shows. `rate_tick` is 0 while nothing finishes and rates do not change."""

    counters: int
    version: int
    rate_tick: int
    order: str

    @classmethod
    def of(cls, request: PageRequest) -> PageVersion | None:
        """The version that a polling page shows. None for a page load, or a version of another release."""
        parts = request.headers.get("HX-PTag", "").split("-") if request.htmx else []
        if len(parts) != 4 or not all(part.isdecimal() and len(part) < DIGITS for part in parts[:3]):
            return None
        return cls(int(parts[0]), int(parts[1]), int(parts[2]), parts[3])

    def __str__(self) -> str:
        return f"{self.counters}-{self.version}-{self.rate_tick}-{self.order}"


@dataclass
class PageRows:
    """The rows of a page, keys that identify them in their order, and the rest of the template's context."""

    rows: list[ProgressRow]
    keys: Iterable[object]
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> str:
        return fingerprint(list(self.keys))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def rate_tick(bar: ProgressBar, now: int) -> int:
    """The time step of a bar's rate and time left; 0 without both. While a reporter is silent, since when it is.

    Another one too, once other tasks cannot go on.
    """
    if bar.silent_since_ms:
        return bar.silent_since_ms
    step = now // (RATES_S * 1000) if bar.live and (bar.rate or bar.left) else 0
    return step if bar.stuck == NO_STUCK else crc32(repr((step, bar.stuck)).encode())


def live_response(
    request: PageRequest, page: str, bar: ProgressBar, now: int, read: Callable[[], PageRows]
) -> HttpResponse:
    """A page, its body, or an update of some rows. 204 when the page is current.

    `bar` must be read before `read` is called. The templates are `progress/<page>.html`, `<page>_body.html` and
    `<page>_update.html`: out-of-band parts, whose `rows` are the changed ones.
    """
    rated = rate_tick(bar, now)
    seen = PageVersion.of(request)
    if seen and seen[:3] == (bar.id, bar.version, rated):
        return HttpResponse(status=204)
    try:
        found = read()
    except ValueError:  # the selectors' answer to a bad cursor
        raise Invalid.at("after", msg=_("there is no such page of the list")) from None
    current = PageVersion(bar.id, bar.version, rated, found.order)
    context = {**found.context, "poll_s": POLL_S, "rows": found.rows}
    if seen is None or (seen.counters, seen.order) != (current.counters, current.order):
        template = f"progress/{page}_body.html" if request.htmx else f"progress/{page}.html"
        return shown(request, template, str(current), context)
    context["rows"] = [row for row in found.rows if _changed(row.bar, seen, current, now)]
    response = shown(request, f"progress/{page}_update.html", str(current), context)
    response["HX-Reswap"] = "none"
    return response


def _changed(bar: ProgressBar, seen: PageVersion, current: PageVersion, now: int) -> bool:
    if bar.version > seen.version:
        return True
    has_rate = bar.live > 0 and bar.finished > 0 and now - bar.changed_ms < FADES_MS
    return has_rate and seen.rate_tick != current.rate_tick
