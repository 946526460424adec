"""Which offers of other backends a run may use, and which it gets: pure (docs/design.md#scheduling).

The cheapest first; all nodes of a run go to one backend and region. An idle instance is preferred, since it starts at
once, unless a new one costs less than half.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from dstackweb.backends.contract import Availability, Hidden, Offer, PlaceCode
from dstackweb.backends.hosts.fit import HOSTS
from dstackweb.backends.matching import meets
from dstackweb.runs.codes import Impossible, Unavailable, WaitReason
from dstackweb.scheduler.placement.hosts import Wait
from dstackweb.scheduler.placement.room import Room
from dstackweb.spec.effective import EffectiveSpec, Requirements

OfferKey = tuple[str, str, str, bool, str]
"""Identifies an offer: backend, region, instance type, spot, and the id of an idle instance."""

IDLE_PRICE_FACTOR = Decimal("0.5")
"""The price of an idle instance is multiplied by this in comparisons."""

NOT_NOW = {
    Availability.NO_QUOTA: PlaceCode.NO_QUOTA,
    Availability.NOT_AVAILABLE: PlaceCode.NOT_AVAILABLE,
    Availability.BUSY: PlaceCode.BUSY,
}


@dataclass(frozen=True)
class BackendOffers:
    """The answers of the backends that a run may use; `failed`: those without a whole answer, and why."""

    offers: tuple[Offer, ...] = ()
    failed: Mapping[str, Unavailable] = field(default_factory=dict)
    rooms: Mapping[str, Room] = field(default_factory=dict)
    """Free capacity by backend name, where room is counted: it limits placements, as `Offer.availability` does."""


@dataclass(frozen=True)
class OfferPlacement:
    """An offer for every node, in node order."""

    offers: tuple[Offer, ...]

    def __len__(self) -> int:
        return len(self.offers)

    @property
    def price(self) -> Decimal:
        """USD per hour of all nodes."""
        return sum((offer.price for offer in self.offers), Decimal(0))

    @property
    def weight(self) -> Decimal:
        """The price used in comparisons."""
        return sum(map(effective_price, self.offers), Decimal(0))


def offer_key(offer: Offer) -> OfferKey:
    return offer.backend, offer.region, offer.instance_type, offer.spot, str(offer.detail.get("instance", ""))


def refusal(spec: EffectiveSpec, offer: Offer) -> PlaceCode | None:
    """Why the run may not use this offer, available or not; None when it may."""
    named = spec.backends is not None and offer.backend in spec.backends
    if offer.price > 0 and not named:
        return PlaceCode.NOT_NAMED
    if spec.labels:
        return PlaceCode.HAS_NO_LABELS
    if spec.volumes:
        return PlaceCode.VOLUME_NOT_LISTED
    if spec.regions is not None and offer.region not in spec.regions:
        return PlaceCode.OTHER_REGION
    if spec.instance_types is not None and offer.instance_type not in spec.instance_types:
        return PlaceCode.OTHER_INSTANCE_TYPE
    if spec.spot_policy == "on-demand" and offer.spot:
        return PlaceCode.IS_SPOT
    if spec.spot_policy == "spot" and not offer.spot:
        return PlaceCode.IS_ON_DEMAND
    if spec.max_price is not None and offer.price > Decimal(str(spec.max_price)):
        return PlaceCode.TOO_EXPENSIVE
    return None


def may_miss(spec: EffectiveSpec, region: str, hides: Hidden) -> bool:
    """Whether the run could use an offer that is not known. `region` is empty where that may be anywhere."""
    if spec.regions is not None and region and region not in spec.regions:
        return False
    return hides is Hidden.ALL or (hides is not Hidden.NONE and spec.spot_policy in ("auto", hides))


def matching_idle(idle: Iterable[Offer], needs: Requirements, *, image: str | None = None) -> tuple[Offer, ...]:
    """The idle instances that have what each node of a run needs."""
    able = (offer for offer in idle if image is None or offer.detail.get("runs_images"))
    return tuple(offer for offer in able if meets(offer, needs))


def nodes_available(offer: Offer, used: Mapping[OfferKey, int], most: int) -> int:
    """How many nodes the offer has now, up to `most`. Unknown availability counts as available.

    One that was refused before is tried by one run at a time.
    """
    if offer.availability in NOT_NOW or (offer.detail.get("on_trial") and used.get(offer_key(offer))):
        return 0
    fits = offer.detail.get("fits")
    return most if fits is None else max(0, min(most, int(fits) - used.get(offer_key(offer), 0)))


def named_place(spec: EffectiveSpec, backend: str) -> int:
    """The backend's place among those that the run names, from 0; without any, own hosts come before all others."""
    named = spec.backends or (HOSTS,)
    return named.index(backend) if backend in named else len(named)


def precedes_hosts(spec: EffectiveSpec, placed: OfferPlacement) -> bool:
    """Whether a place comes before own hosts: it costs nothing either, and the run names its backend first."""
    return not placed.weight and named_place(spec, placed.offers[0].backend) < named_place(spec, HOSTS)


def acceptable_offers(spec: EffectiveSpec, asked: BackendOffers) -> list[Offer]:
    """The offers that the run may use, cheapest first, available or not."""
    return sorted((offer for offer in asked.offers if refusal(spec, offer) is None), key=_price_order)


def choose_offers(spec: EffectiveSpec, asked: BackendOffers, used: Mapping[OfferKey, int]) -> OfferPlacement | Wait:
    """The cheapest offers for all nodes of a run at once, or why there are none.

    `used`: nodes placed before, where no room is counted.
    """
    found = acceptable_offers(spec, asked)
    places: defaultdict[tuple[str, str], list[Offer]] = defaultdict(list)
    rooms: dict[tuple[str, str], Room] = {}
    for offer in found:
        place = offer.backend, offer.region
        nodes = places[place]
        if offer.backend in asked.rooms:
            # Two types of GPU may be on one machine, whose CPUs each offer counts as its own.
            room, most = rooms.get(place, asked.rooms[offer.backend]), nodes_available(offer, {}, spec.nodes)
            count, rooms[place] = room.fill(offer, min(most, spec.nodes - len(nodes)))
        else:
            count = nodes_available(offer, used, spec.nodes - len(nodes))
        nodes += [offer] * count
    whole = [OfferPlacement(tuple(nodes)) for nodes in places.values() if len(nodes) == spec.nodes]
    if whole:
        return min(
            whole,
            key=lambda bought: (
                bought.weight, named_place(spec, bought.offers[0].backend), list(map(_price_order, bought.offers)),
            ),
        )  # fmt: skip
    return _reason_to_wait(spec, asked, found, max((len(nodes) for nodes in places.values()), default=0))


def effective_price(offer: Offer) -> Decimal:
    """An offer's price as used in comparisons."""
    return offer.price * IDLE_PRICE_FACTOR if _is_idle(offer) else offer.price


def _is_idle(offer: Offer) -> bool:
    return "instance" in offer.detail


def _price_order(offer: Offer) -> tuple[Decimal, bool, str, str, str, bool]:
    """At equal prices an idle instance goes first."""
    return effective_price(offer), not _is_idle(offer), offer.backend, offer.region, offer.instance_type, offer.spot


def _reason_to_wait(spec: EffectiveSpec, asked: BackendOffers, found: Sequence[Offer], placed: int) -> Wait:
    """The least permanent reason: any backend that answers, or any offer that becomes free, would do."""
    data: dict[str, Any] = {"nodes": spec.nodes, "nodes_placed": placed, "offers": len(found)}
    if codes := sorted({str(offer.detail["why"]) for offer in found if offer.detail.get("code") == "refused"}):
        data["answers"] = codes
    if any(offer.availability != Availability.NO_QUOTA for offer in found):
        return Wait(WaitReason.WAITING_FOR_CAPACITY, {"code": "offers", **data})
    if asked.failed:
        return _unavailable(asked.failed)
    if found:
        return Wait(WaitReason.NO_QUOTA, {**data, "backends": sorted({offer.backend for offer in found})})
    refused = Counter(why for offer in asked.offers if (why := refusal(spec, offer)))
    return Wait(WaitReason.IMPOSSIBLE, {"code": Impossible.NO_OFFER, "refused": dict(sorted(refused.items()))})


def _unavailable(failed: Mapping[str, Unavailable]) -> Wait:
    """One code for all backends: temporary failures first, then what an admin must set up."""
    code = min(failed.values(), key=list(Unavailable).index)
    names = sorted(name for name, why in failed.items() if why == code)
    return Wait(WaitReason.BACKEND_UNAVAILABLE, {"code": code, "backends": names})
