"""How pages of progress are kept up to date: each second, and then only what has changed.

What a page shows is told by four things: its counters and their version, the moment its rates are of, and which rows
it has in which order. A poll sends them back. Nothing new: 204. The same rows: those that changed. Other rows, or
whoever shows nothing yet: everything. So a lost or repeated answer is made up for by the next one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.http import HttpResponse

from dstackweb.progress.selectors import ProgressBar
from dstackweb.web.common.pages import PageRequest, shown
from dstackweb.web.progress.bars import Line

POLL_S = 1
RATES_S = 5
"""While something is finishing, rates and times left are told anew so often, even if nothing changes meanwhile."""
FADES_MS = 4 * 3600 * 1000
"""So long after its last change a row may still have a rate."""
DIGITS = 20
"""Of a number in a stamp, less than these."""


class Stamp(NamedTuple):
    """What a page shows. `moment` is 0 where nothing finishes: then no rate changes by itself."""

    counters: int
    version: int
    moment: int
    order: str

    @classmethod
    def of(cls, request: PageRequest) -> Stamp | None:
        """What the page that polls has; None for a page that is opened, or a stamp of another release."""
        parts = request.headers.get("HX-PTag", "").split("-") if request.htmx else []
        if len(parts) != 4 or not all(part.isdecimal() and len(part) < DIGITS for part in parts[:3]):
            return None
        return cls(int(parts[0]), int(parts[1]), int(parts[2]), parts[3])

    def __str__(self) -> str:
        return f"{self.counters}-{self.version}-{self.moment}-{self.order}"


@dataclass
class Listing:
    """The rows of a page, what tells them and their order apart from others, and what else its templates need."""

    lines: list[Line]
    keys: Iterable[object]
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> str:
        """Short, and another one whenever other rows are there."""
        return hashlib.sha256(repr(list(self.keys)).encode()).hexdigest()[:12]


def now_ms() -> int:
    """The clock of all counters."""
    return time.time_ns() // 1_000_000


def moment(bar: ProgressBar, now: int) -> int:
    """Of what moment its rate and time left are; 0 where there is none, and nothing changes by itself."""
    return now // (RATES_S * 1000) if bar.rate and bar.live else 0


def answer(
    request: PageRequest, page: str, body: str, update: str, bar: ProgressBar, now: int, listing: Callable[[], Listing]
) -> HttpResponse:
    """A page, its body, or an update of some rows; nothing (204) to whoever shows all of it.

    `bar` has the version that was read before `listing` reads the rows; `update` is a template of out-of-band parts
    that gets the changed rows as `lines`.
    """
    rated = moment(bar, now)
    seen = Stamp.of(request)
    if seen and seen[:3] == (bar.id, bar.version, rated):
        return HttpResponse(status=204)
    found = listing()
    stamp = Stamp(bar.id, bar.version, rated, found.order)
    context = {**found.context, "poll_s": POLL_S, "lines": found.lines}
    if seen is None or (seen.counters, seen.order) != (stamp.counters, stamp.order):
        return shown(request, body if request.htmx else page, str(stamp), context)
    context["lines"] = [line for line in found.lines if _changed(line.bar, seen, stamp, now)]
    response = shown(request, update, str(stamp), context)
    response["HX-Reswap"] = "none"
    return response


def _changed(bar: ProgressBar, seen: Stamp, stamp: Stamp, now: int) -> bool:
    if bar.version > seen.version:
        return True
    has_rate = bar.live > 0 and bar.finished > 0 and now - bar.changed_ms < FADES_MS
    return has_rate and seen.moment != stamp.moment
