"""The offers page: capacity with its price, availability and freshness. And the clouds' quotas and their use."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.http import HttpResponse, QueryDict
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from dstackweb.accounts.models import User
from dstackweb.backends import registry
from dstackweb.backends.contract import Availability, Offer
from dstackweb.backends.hosts.inventory import host_views
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid
from dstackweb.offers import counts, listing, source_rows, sources
from dstackweb.offers.listing import Filter, Order
from dstackweb.runs import selectors
from dstackweb.scheduler.cloud.backend_offers import idle_offers
from dstackweb.scheduler.placement.offers import matching_idle
from dstackweb.spec.effective import Requirements
from dstackweb.spec.units import parse_gpu
from dstackweb.web.cloud import offer_rows
from dstackweb.web.cloud.offer_rows import SourceLine
from dstackweb.web.common.pages import (
    PageRequest,
    SortHeader,
    done,
    fingerprint,
    polled,
    project_action,
    project_page,
    sentence,
)
from dstackweb.wording import offers as offer_words

PER_PAGE = 25
POLL_S = 3
NEAR = 0.8
"""A quota is marked as nearly used up from this share on."""
USABLE = (Availability.AVAILABLE, Availability.IDLE, Availability.UNKNOWN)
FIELDS = ("gpu", "memory", "count", "max_price", "region", "backend", "spot", "usable")
"""The form's fields, by their names in the address."""
SORTS = (
    ("price", gettext_lazy("cheapest first")),
    ("gpu_price", gettext_lazy("cheapest per GPU")),
    ("-price", gettext_lazy("most expensive first")),
    ("-gpu_count", gettext_lazy("most GPUs")),
    ("-gpu_memory", gettext_lazy("most GPU memory")),
    ("-cpus", gettext_lazy("most CPUs")),
    ("-memory", gettext_lazy("most memory")),
    ("availability", gettext_lazy("available first")),
    ("gpu", gettext_lazy("GPU")),
    ("region", gettext_lazy("region")),
)


@dataclass(frozen=True)
class OfferFilters:
    """Filters and order from the address. `fields` is the text as typed, `error` why it is invalid."""

    fields: dict[str, str]
    wanted: Filter
    usable_only: bool
    order: Order
    cursor: str
    error: str = ""

    @classmethod
    def of(cls, query: QueryDict) -> OfferFilters:
        """Parse the address. Invalid filters are ignored and reported in `error`."""
        fields = {name: query.get(name, "").strip() for name in FIELDS}
        usable, error = fields["usable"] == "yes", ""
        try:
            wanted = _filter(fields)
        except Invalid as invalid:
            wanted, error = Filter(), sentence(invalid.detail)
        try:
            order = listing.read_order(query.get("sort", ""))
        except Invalid as invalid:
            order, error = Order(), sentence(invalid.detail)
        return cls(fields, wanted, usable, order, query.get("after", ""), error)

    @property
    def narrows(self) -> bool:
        return any(self.fields.values())

    @property
    def narrows_more(self) -> bool:
        """Whether a field is set that a phone shows only on request."""
        return any(text for name, text in self.fields.items() if name not in ("gpu", "usable"))

    def query(self, **changed: str) -> str:
        """The query string with these values changed, without empty ones."""
        values = {**self.fields, "sort": str(self.order), **changed}
        return urlencode({name: value for name, value in values.items() if value and value != Order().by})


def _filter(fields: dict[str, str]) -> Filter:
    """Name, memory and count of GPUs have their own fields; the name also takes a run file's notation."""
    parts = [fields["gpu"], _at_least(fields["memory"], "GB"), _at_least(fields["count"])]
    if any(parts) and not fields["count"] and not _says_count(fields["gpu"]):
        parts.append("1..")  # without a count: any number of GPUs
    return listing.read_filter(
        gpu=":".join(part for part in parts if part),
        backends=[fields["backend"]],
        regions=[fields["region"]],
        spot=fields["spot"],
        max_price=fields["max_price"].removeprefix("$"),
    )


def _says_count(text: str) -> bool:
    try:
        return "count" in parse_gpu(text)
    except ValueError:
        return False


def _at_least(text: str, unit: str = "") -> str:
    """A plain number is a minimum: `2` as `2..`, and `40` as `40GB..`."""
    return f"{text}{unit}.." if text.isascii() and text.isdigit() else text


@project_page()
def offers_page(request: PageRequest) -> HttpResponse:
    """The offers, filtered, sorted and paged; polls read offers only when a source or host has changed."""
    chosen = OfferFilters.of(request.GET)
    now = timezone.now()
    ages = source_rows.of_backends(sources.sourced_backends(), now)
    backends = list(Backend.objects.filter(enabled=True))
    shown = [(one.pk, one.name, one.version, one.refresh_generation) for one in backends]
    hosts = [host_views(one) for one in backends if registry.is_hosts(one)]
    idle = idle_offers(now)(request.project.pk)
    kept = [offer.detail["instance"] for offer in idle]
    version = fingerprint(shown, ages, hosts, kept, selectors.counts(request.project))

    page, body = "cloud/offers.html", "cloud/offers_body.html"
    return polled(request, page, body, version, lambda: _context(chosen, backends, idle))


def _context(chosen: OfferFilters, backends: Sequence[Backend], idle: Sequence[Offer]) -> dict[str, Any]:
    """`idle`: instances that are kept for the project's next run."""
    now = timezone.now()
    found = listing.find_offers(chosen.wanted, now)
    everything = found if chosen.wanted == Filter() else listing.find_offers(Filter(), now)
    kept = filter(chosen.wanted.takes, matching_idle(idle, chosen.wanted.requirements))
    offers = [offer for offer in (*found.offers, *kept) if not chosen.usable_only or offer.availability in USABLE]
    try:
        page, following = listing.page(offers, chosen.order, PER_PAGE, chosen.cursor)
    except Invalid:  # a page of another order
        page, following = listing.page(offers, chosen.order, PER_PAGE)
    lines = [SourceLine.of_source(age) for age in everything.sources]
    free = {backend.name for backend in backends if not registry.costs_money(backend)}
    has_clouds = any(not registry.is_hosts(backend) for backend in backends)
    unreachable = next((offer for offer in everything.offers if "quota" in offer.detail), None)
    known = [line for line in lines if line.of.fetched_at is not None]
    return {
        "tab": "offers",
        "filters": chosen,
        "lines": offer_rows.lines(page, chosen.wanted.requirements, everything.sources, free),
        "count": len(offers),
        "count_all": len(everything.offers) + len(idle),
        "more": chosen.query(after=following) if following else "",
        "first_page": chosen.query(after="") if chosen.cursor else None,
        "sorted_by": {
            name: SortHeader.of(name, str(chosen.order), chosen.query)
            for name in ("price", "gpu_price", "region", "gpu", "availability")
        },
        "cheapest": _cheapest(offers, free),
        "regions": offer_rows.by_region(lines),
        "troubles": offer_rows.troubles(lines),
        "unreachable": _without_quota(unreachable) if unreachable else "",
        "asking": sum(line.state == "asking" for line in lines),
        "oldest": min(known, key=lambda line: line.of.fetched_at or now, default=None),
        "next_stale": min((line.until for line in lines if line.until), default=None),
        "has_clouds": has_clouds,
        "today": sum(counts.last_day(now).values(), counts.Figures()),
        "regions_known": sorted({offer.region for offer in everything.offers if offer.region}),
        "backends_known": sorted({offer.backend for offer in everything.offers}),
        "gpus_known": sorted({offer.gpu_name for offer in everything.offers if offer.gpu_count}),
        "sorts": SORTS,
        "sort": str(chosen.order),
        "has_sources": bool(lines),
        "admins": [] if has_clouds else _admins(),
        "poll_s": POLL_S,
    }


def _admins() -> list[str]:
    """The first three deployment admins, who can add a cloud."""
    found = User.objects.filter(is_staff=True, is_active=True).order_by("username")
    return list(found.values_list("username", flat=True)[:3])


def _cheapest(offers: Sequence[Offer], free: set[str]) -> Offer | None:
    paid = [offer for offer in offers if offer.backend not in free and offer.availability in USABLE]
    return min(paid, key=lambda offer: (offer.price, offer.instance_type), default=None)


def _without_quota(offer: Offer) -> str:
    """What prevents all of its backend's offers."""
    detail = {name: value for name, value in offer.detail.items() if name != "quota"}
    return offer_words.detail_text(offer.kind, detail, Requirements())


@project_action("member")
def refresh(request: PageRequest) -> HttpResponse:
    """Refresh all sources of all backends in the background."""
    pairs = sources.sourced_backends()
    now = timezone.now()
    for backend, _driver in pairs:
        sources.refresh_now(backend)
    started = sum(len(driver.wanted()) for _backend, driver in pairs)
    text = ngettext("Refresh of %d source started", "Refresh of %d sources started", started) % started
    throttled = [
        age
        for age in source_rows.of_backends(pairs, now)
        if age.error is not None and age.error.get("code") == "throttled"
    ]
    if throttled:
        text += _("; %d throttled, retried later") % len(throttled)
    query = request.POST.get("query", "")
    return done(request, text, reverse("web:offers", args=[request.project.name]) + (f"?{query}" if query else ""))


class QuotaUsage(NamedTuple):
    """One quota, in vCPUs. Where its use is unknown (None), so is what is free."""

    limit: int
    used: int | None

    @property
    def tone(self) -> str:
        """`full`, `near` or nothing."""
        if self.used is not None and self.used >= self.limit:
            return "full"
        return "near" if self.used is not None and self.used >= NEAR * self.limit else ""

    @property
    def left(self) -> int | None:
        return None if self.used is None else max(0, self.limit - self.used)


class RegionCard(NamedTuple):
    """One region of a backend: families of instance types with their on-demand and spot quotas, where it has them.

    `none` names the families without any quota, which most accounts begin with. `sources`: of the limits and of their
    use.
    """

    backend: str
    region: str
    sources: tuple[SourceLine, SourceLine]
    families: list[tuple[str, QuotaUsage | None, QuotaUsage | None]]
    none: list[str]


def _card(backend: str, found: listing.RegionQuotas, now: dt.datetime) -> RegionCard:
    def quota(code: str) -> QuotaUsage | None:
        return QuotaUsage(*found.quotas[code]) if code in found.quotas else None

    lines = [(name, quota(a), quota(b)) for name, a, b in registry.KINDS[found.age.kind].quota_families()]
    some = [line for line in lines if any(one and any(one) for one in line[1:])]
    none = [line[0] for line in lines if line not in some and any(line[1:])]
    sources = SourceLine.of_source(found.age), SourceLine.of_source(found.use_age)
    return RegionCard(backend, found.region, sources, some, none)


@project_page()
def quotas_page(request: PageRequest) -> HttpResponse:
    """Of all clouds; also what polls of the page get."""
    now = timezone.now()
    backends = sources.sourced_backends()
    ages = source_rows.of_backends(backends, now)
    shown = ([(one.pk, one.version, one.refresh_generation) for one, _driver in backends], ages)
    version = fingerprint(shown, selectors.counts(request.project))

    def context() -> dict[str, Any]:
        cards = [
            _card(backend.name, found, now) for backend, _driver in backends for found in listing.quotas(backend, now)
        ]
        lines = [SourceLine.of_source(age) for age in ages]
        return {
            "tab": "quotas",
            "cards": cards,
            "asking": sum(line.state == "asking" for line in lines),
            "has_sources": bool(backends),
            "poll_s": POLL_S,
        }

    return polled(request, "cloud/quotas.html", "cloud/quotas_body.html", version, context)
