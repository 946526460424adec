"""Rows of the offers page, and the state of the sources behind them."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from dstackweb.backends.contract import Offer, SourceState
from dstackweb.offers import source_rows
from dstackweb.offers.source_rows import Freshness
from dstackweb.spec.effective import Requirements
from dstackweb.wording import offers as offer_words, units
from dstackweb.wording.sentence import Label, listing


def source_name(code: str) -> str:
    return {
        "instance_types": _("Instance types"),
        "prices": _("Prices"),
        "spot_prices": _("Spot prices"),
        "quotas": _("Quotas"),
        "quota_use": _("Use of quotas"),
        "subnets": _("Subnets"),
        "offers": _("Offers"),
    }.get(code, code.replace("_", " ").capitalize())


@dataclass(frozen=True)
class SourceLine:
    """One source in one region. `state` is `_state`'s; `again_at` is when a throttled one is read again.

    `until`, where it is fresh, is when it becomes stale unless it is read before.
    """

    of: Freshness
    state: str
    badge: str
    why: str
    again_at: dt.datetime | None
    until: dt.datetime | None

    @classmethod
    def of_source(cls, age: Freshness) -> SourceLine:
        state = _state(age)
        until = age.expires_at if state == "fresh" else None
        again_at = None
        if state == "throttled" and age.error is not None:
            again_at = age.due_at or parse_datetime(str(age.error.get("until", "")))
        why = offer_words.failure(age.kind, age.error) if age.error else ""
        return cls(age, state, _badge(state), why, again_at, until)

    @property
    def name(self) -> str:
        return source_name(self.of.source)


def _badge(state: str) -> str:
    return {
        "fresh": _("fresh"),
        "asking": _("refreshing…"),
        "throttled": _("throttled"),
        "stale": _("stale"),
        "failed": _("failed"),
    }[state]


def _state(age: Freshness) -> str:
    """`asking`: the value is missing, or a person asked for a newer one, and no failure prevents reading it."""
    is_wanted = age.requested or (age.fetched_at is None and age.due_at is None)
    if is_wanted and (age.error is None or age.failed_at is None):
        return "asking"
    if age.state is SourceState.FRESH:
        return "fresh"
    if age.error is not None and age.error.get("code") == "throttled" and age.failed_at is not None:
        return "throttled"
    return "failed" if age.state is SourceState.FAILED else "stale"


def by_region(lines: Iterable[SourceLine]) -> list[tuple[str, str, list[SourceLine]]]:
    """Backend and region with their sources, in the order in which they are read."""
    found: defaultdict[tuple[str, str], list[SourceLine]] = defaultdict(list)
    for line in lines:
        found[line.of.backend, line.of.region].append(line)
    return [(*place, found[place]) for place in sorted(found)]


@dataclass(frozen=True)
class Trouble:
    """A problem that affects sources of a region, with instructions."""

    place: str
    label: str
    texts: list[str]
    tone: str
    sources: list[SourceLine]
    again_at: dt.datetime | None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(line.name.lower() for line in self.sources))

    @property
    def has_last(self) -> bool:
        """Whether an earlier value is in use."""
        return any(line.of.fetched_at for line in self.sources)


def troubles(lines: Iterable[SourceLine]) -> list[Trouble]:
    """Problems to fix, by region and failure code, worst first; what several regions have with the same text is one."""
    found: defaultdict[tuple[str, ...], list[SourceLine]] = defaultdict(list)
    for line in lines:
        if line.why and line.state != "asking" and line.of.error is not None:
            code = line.of.error["code"]
            if code == "throttled":
                what: tuple[str, ...] = ("", code)
            else:
                what = (line.of.region, code) if line.of.region in line.why else ("", code, line.why)
            found[(line.of.backend, *what)].append(line)
    problems = [
        Trouble(
            f"{backend} {region}".strip(),
            _failure_label(code),
            [_throttled(of)] if code == "throttled" else list(dict.fromkeys(line.why for line in of)),
            "danger" if any(line.state == "failed" for line in of) else "warning",
            of,
            min((line.again_at for line in of if line.again_at), default=None),
        )
        for (backend, region, code, *_why), of in found.items()
    ]
    return sorted(problems, key=lambda trouble: (trouble.tone != "danger", -len(trouble.sources)))


def _throttled(lines: Iterable[SourceLine]) -> str:
    apis: defaultdict[str, set[str]] = defaultdict(set)
    for line in lines:
        error = line.of.error or {}
        apis[str(error.get("api", ""))].add(str(error.get("region", "") or line.of.region))
    found = listing(f"{api} ({listing(sorted(regions))})".strip() for api, regions in sorted(apis.items()))
    return _("Throttled: %s. Retried automatically.") % found


def _failure_label(code: str) -> str:
    return {
        "access_denied": _("access denied"),
        "bad_credentials": _("credentials refused"),
        "no_credentials": _("no credentials"),
        "throttled": _("throttled"),
        "unreachable": _("unreachable"),
        "nonsense": _("unreadable answer"),
        "emptied": _("empty answer"),
        "region_disabled": _("region not enabled"),
        "no_answer": _("no answer"),
    }.get(code, _("failed"))


@dataclass(frozen=True)
class OfferLine:
    """One offer in words. `share` is its price's part of the dearest on the page, in per cent. `sources` tell its price
    and its availability."""

    offer: Offer
    gpu: str
    badge: Label
    why: str
    share: float
    price: str
    gpu_price: str
    sources: list[SourceLine]


def lines(offers: Sequence[Offer], needs: Requirements, ages: Sequence[Freshness], free: set[str]) -> list[OfferLine]:
    """The rows of a page; `free` are the backends that cost nothing."""
    most = max((offer.price for offer in offers), default=Decimal(0))

    def line(offer: Offer) -> OfferLine:
        share = float(100 * offer.price / most) if most else 0.0
        each = units.dollars(offer.price / offer.gpu_count) if offer.gpu_count > 1 and offer.price else ""
        sources = [SourceLine.of_source(age) for age in source_rows.of_offer(offer, ages)]
        price = units.dollars(offer.price) if offer.price or offer.backend not in free else ""
        badge = offer_words.availability(offer.availability)
        gpus = gpu(offer.gpu_name, offer.gpu_count, offer.gpu_memory_mib)
        # What concerns all offers is above them.
        why = offer_words.detail_text(offer.kind, offer.detail.get("quota", offer.detail), needs)
        return OfferLine(offer, gpus, badge, why, share, price, each, sources)

    return [line(offer) for offer in offers]


def gpu(model: str, count: int, memory_mib: int) -> str:
    """`8 × H100 80 GB`; empty for none."""
    if not count:
        return ""
    name = model.removeprefix("NVIDIA ")
    memory = units.mebibytes(memory_mib)
    return f"{count} × {name}" + ("" if memory.replace(" ", "") in name else f" {memory}")
