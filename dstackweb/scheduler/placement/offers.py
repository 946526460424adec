"""Which offers of other backends a run may take, and which of them it takes: pure (docs/design.md#scheduling).

The cheapest first, by (price, backend, region, instance type). A run's nodes all go to one backend and region. An
idle machine is taken before a new one, unless that costs less than half: it starts at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from dstackweb.backends.contract import Availability, Offer, PlaceCode
from dstackweb.backends.whole import meets
from dstackweb.runs.codes import Impossible, Unavailable, WaitReason
from dstackweb.scheduler.placement.hosts import Wait
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.spec.requirements import Requirements

OfferKey = tuple[str, str, str, bool, str]
"""What an offer is, whoever asked for it: backend, region, instance type, spot, and the machine where it is there."""

IDLE_PRICE_FACTOR = Decimal("0.5")
"""So much of its price is an idle machine weighed by."""

NOT_NOW = {
    Availability.NO_QUOTA: PlaceCode.NO_QUOTA,
    Availability.NOT_AVAILABLE: PlaceCode.NOT_AVAILABLE,
    Availability.BUSY: PlaceCode.BUSY,
}


@dataclass(frozen=True)
class BackendOffers:
    """What the backends that a run may use have answered; `failed`: those without an answer, and why."""

    offers: tuple[Offer, ...] = ()
    failed: Mapping[str, Unavailable] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there was nobody to ask."""
        return not self.offers and not self.failed


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
        """What the price counts where several are compared."""
        return sum(map(effective_price, self.offers), Decimal(0))


def offer_key(offer: Offer) -> OfferKey:
    """What tells one offer from another."""
    return offer.backend, offer.region, offer.instance_type, offer.spot, str(offer.detail.get("instance", ""))


def refusal(spec: EffectiveSpec, offer: Offer) -> PlaceCode | None:
    """Why the run never takes this offer, whether it is to be had or not; None when it may."""
    named = spec.backends is not None and offer.backend in spec.backends
    if offer.price > 0 and not named:
        return PlaceCode.NOT_NAMED
    if spec.labels:
        return PlaceCode.HAS_NO_LABELS
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


def matching_idle(idle: Iterable[Offer], needs: Requirements, *, image: str | None = None) -> tuple[Offer, ...]:
    """The idle instances that have what each node of a run needs. None of them runs containers."""
    return () if image is not None else tuple(offer for offer in idle if meets(offer, needs))


def nodes_available(offer: Offer, used: Mapping[OfferKey, int], most: int) -> int:
    """How many nodes it can take now, up to `most`. Unknown is not zero."""
    if offer.availability in NOT_NOW:
        return 0
    fits = offer.detail.get("fits")
    return most if fits is None else max(0, min(most, int(fits) - used.get(offer_key(offer), 0)))


def acceptable_offers(spec: EffectiveSpec, asked: BackendOffers) -> list[Offer]:
    """Those that the run may take, the cheapest first, also where they are not to be had now."""
    return sorted((offer for offer in asked.offers if refusal(spec, offer) is None), key=_price_order)


def choose_offers(spec: EffectiveSpec, asked: BackendOffers, used: Mapping[OfferKey, int]) -> OfferPlacement | Wait:
    """The cheapest offers for all nodes of a run at once, or why there are none. `used`: nodes given away before."""
    found = acceptable_offers(spec, asked)
    places: defaultdict[tuple[str, str], list[Offer]] = defaultdict(list)
    for offer in found:
        nodes = places[offer.backend, offer.region]
        nodes += [offer] * nodes_available(offer, used, spec.nodes - len(nodes))
    whole = [OfferPlacement(tuple(nodes)) for nodes in places.values() if len(nodes) == spec.nodes]
    if whole:
        return min(whole, key=lambda bought: (bought.weight, [_price_order(offer) for offer in bought.offers]))
    return _reason_to_wait(spec, asked, found, max((len(nodes) for nodes in places.values()), default=0))


def effective_price(offer: Offer) -> Decimal:
    """What its price counts where offers are compared."""
    return offer.price * IDLE_PRICE_FACTOR if _is_idle(offer) else offer.price


def _is_idle(offer: Offer) -> bool:
    return "instance" in offer.detail


def _price_order(offer: Offer) -> tuple[Decimal, bool, str, str, str, bool]:
    """At the same weight what is there goes first: it starts at once."""
    return effective_price(offer), not _is_idle(offer), offer.backend, offer.region, offer.instance_type, offer.spot


def _reason_to_wait(spec: EffectiveSpec, asked: BackendOffers, found: Sequence[Offer], placed: int) -> Wait:
    """The reason that is cured first: any backend that answers, or any offer that comes free, would do."""
    data: dict[str, Any] = {"nodes": spec.nodes, "nodes_placed": placed, "offers": len(found)}
    if any(offer.availability != Availability.NO_QUOTA for offer in found):
        return Wait(WaitReason.WAITING_FOR_CAPACITY, {"code": "offers", **data})
    if asked.failed:
        return _unavailable(asked.failed)
    if found:
        return Wait(WaitReason.NO_QUOTA, {**data, "backends": _names(found)})
    refused = Counter(why for offer in asked.offers if (why := refusal(spec, offer)))
    return Wait(WaitReason.IMPOSSIBLE, {"code": Impossible.NO_OFFER, "refused": dict(sorted(refused.items()))})


def _unavailable(failed: Mapping[str, Unavailable]) -> Wait:
    """One code for all: what may come back by itself is named before what an admin must set up."""
    code = min(failed.values(), key=list(Unavailable).index)
    names = sorted(name for name, why in failed.items() if why == code)
    return Wait(WaitReason.BACKEND_UNAVAILABLE, {"code": code, "backends": names})


def _names(offers: Iterable[Offer]) -> list[str]:
    return sorted({offer.backend for offer in offers})
