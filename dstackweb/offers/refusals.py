"""Recent answers of clouds to orders, shared by all runs and processes. A refused offer is not ordered again for a
while, and then by one run at a time until the cloud launches it again.

All answers of a backend are one object in the shared cache. Two processes that write at the same moment may lose one of
the two answers, which costs one more call. While the cache is down, each process knows only its own answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import Availability, LaunchFailed, LaunchFailure, Offer
from dstackweb.backends.models import Backend, Instance
from dstackweb.offers import store

REFUSED_S = 60.0
"""Seconds after a refusal in which an offer of a cloud is not ordered."""
ENGINE_REFUSED_S = 5.0
"""The same for a cluster, which has room again as soon as any job ends."""
SETTINGS_REFUSED_S = 600.0
"""The longest time after refusals that settings or permissions cause. It starts at REFUSED_S and doubles."""
REMEMBERED_S = 3600.0
"""Seconds for which an answer is stored."""
PASSING = (LaunchFailure.NO_CAPACITY, LaunchFailure.QUOTA, LaunchFailure.SPOT_PRICE)
"""Refusals that end without a change of settings."""
SKEW_S = 5.0
"""Clocks of two machines differ by less."""
MAX_TEXT = 300
SIZE = ("cpus", "memory_mib", "gpu_name", "gpu_count")


class OfferKey(NamedTuple):
    """The part of an order that decides the cloud's answer. A cluster's offers differ only in their size."""

    region: str
    instance_type: str
    spot: bool
    cpus: int
    memory_mib: int
    gpu_name: str
    gpu_count: int

    @classmethod
    def of(cls, offer: Offer | Instance) -> OfferKey:
        spot = offer.spot if isinstance(offer, Offer) else offer.is_spot
        return cls(offer.region, offer.instance_type, spot, *(getattr(offer, name) for name in SIZE))

    def in_zone(self, zone: str) -> str:
        """Return the name of the answer for a zone. An empty `zone` stands for an order without a zone."""
        return "|".join(map(str, (*self, zone)))


@dataclass(frozen=True)
class Answer:
    """A cloud's latest answer to an order.

    `code` is the LaunchFailure of a refusal, or empty if the instance was launched. `at` and `until` are seconds since
    the epoch. `times` counts refusals in a row.
    """

    code: str
    text: str
    at: float
    until: float
    times: int = 0

    def holds(self, now: float) -> bool:
        """Return whether the answer still counts."""
        return self.at - SKEW_S < now < self.until


Answers = dict[str, Answer]

_local: store.LocalCache[str, Answers] = store.LocalCache(100)


class RecentAnswers:
    """The recent answers of one backend."""

    def __init__(self, backend: Backend) -> None:
        self.answers, self.now = _read(backend), timezone.now().timestamp()

    def refusal(self, key: OfferKey, zones: Iterable[str] = ()) -> Answer | None:
        """Return the refusal because of which the offer can't be ordered now: one for the offer itself, or the latest
        if each of `zones` refused it."""
        whole = self._refused(key, "")
        if whole is not None:
            return whole
        answers = [self._refused(key, zone) for zone in zones]
        refused = [answer for answer in answers if answer is not None]
        return max(refused, key=lambda answer: answer.at) if refused and len(refused) == len(answers) else None

    def full_zones(self, key: OfferKey) -> tuple[str, ...]:
        """Return the zones that can't be ordered from now."""
        start = key.in_zone("")
        zones = (name.removeprefix(start) for name in self.answers if name.startswith(start))
        return tuple(sorted(zone for zone in zones if zone and self._refused(key, zone)))

    def is_launching(self, key: OfferKey) -> bool:
        """Return whether the cloud has just launched one. Then several may be ordered at once."""
        answer = self.answers.get(key.in_zone(""))
        return answer is not None and not answer.code and answer.holds(self.now)

    def mark(self, offer: Offer) -> Offer:
        """Return the offer as unavailable if it was refused, or else without the zones that refused it."""
        key, prices = OfferKey.of(offer), offer.detail.get("zone_prices") or {}
        refused = self.refusal(key, prices)
        if refused is not None:
            if offer.availability not in (Availability.AVAILABLE, Availability.UNKNOWN):
                return offer
            availability = Availability.NO_QUOTA if refused.code == LaunchFailure.QUOTA else Availability.BUSY
            why = {"code": "refused", "why": refused.code, "text": refused.text, "at": refused.at}
            return dataclasses.replace(offer, availability=availability, detail={**offer.detail, **why})
        if self._was_refused(key, "") or (prices and all(self._was_refused(key, zone) for zone in prices)):
            offer = dataclasses.replace(offer, detail={**offer.detail, "on_trial": True})
        if full := set(self.full_zones(key)) & prices.keys():
            open_zones = {zone: price for zone, price in prices.items() if zone not in full}
            cheapest = min(open_zones, key=lambda zone: Decimal(open_zones[zone]))
            detail = {**offer.detail, "zone": cheapest, "zone_prices": open_zones}
            offer = dataclasses.replace(offer, price=Decimal(open_zones[cheapest]), detail=detail)
        return offer

    def _was_refused(self, key: OfferKey, zone: str) -> bool:
        answer = self.answers.get(key.in_zone(zone))
        return answer is not None and bool(answer.code)

    def _refused(self, key: OfferKey, zone: str) -> Answer | None:
        answer = self.answers.get(key.in_zone(zone))
        return answer if answer is not None and answer.code and answer.holds(self.now) else None


def mark_refused(backend: Backend, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """Mark the offers of a backend that it refused."""
    recent = RecentAnswers(backend)
    return tuple(map(recent.mark, offers)) if recent.answers else offers


def remember_launch(instance: Instance, zone: str) -> None:
    """Remember that the cloud launched an instance in a zone. Earlier refusals of the offer there no longer count."""
    key, now = OfferKey.of(instance), timezone.now().timestamp()
    answers = _read(instance.backend)
    latest = answers.get(key.in_zone(""))
    was_refused = bool(zone) and answers.pop(key.in_zone(zone), None) is not None
    if not was_refused and latest is not None and not latest.code and now - latest.at < REFUSED_S / 2:
        return  # a write for each of many launches would tell others nothing new
    _write(instance.backend, answers | {key.in_zone(""): Answer("", "", now, now + REFUSED_S)})


def remember_refusal(instance: Instance, failed: LaunchFailed) -> None:
    """Remember a refusal for the zone that refused, and for the whole offer unless other zones may launch it."""
    backend, key, now = instance.backend, OfferKey.of(instance), timezone.now().timestamp()
    zone = str(failed.data.get("zone", ""))
    names = {key.in_zone(zone)}
    if not instance.zone_prices and not failed.data.get("elsewhere"):
        names.add(key.in_zone(""))
    answers = _read(backend)
    for name in names:
        previous = answers.get(name)
        times = previous.times + 1 if previous is not None and previous.code == failed.code else 1
        wait_s = REFUSED_S if registry.is_machine(backend) else ENGINE_REFUSED_S
        if failed.code not in PASSING:
            wait_s = min(SETTINGS_REFUSED_S, REFUSED_S * 2.0 ** min(times - 1, 10))
        answers[name] = Answer(failed.code, failed.text[:MAX_TEXT], now, now + wait_s, times)
    _write(backend, answers)


def clear(backend: Backend) -> None:
    """Forget the answers of a backend: a person refreshes its offers, and may have changed something in the account."""
    _local.drop(lambda name: name == _name(backend))
    store.delete(_name(backend))


def forget() -> None:
    _local.forget()


def _name(backend: Backend) -> str:
    """Return the cache key of a backend's answers. It has the version, since other settings may get other answers."""
    return f"refusals:{backend.pk}:{backend.version}"


def _read(backend: Backend) -> Answers:
    answers: Answers | None = store.get(_name(backend), Answers)
    if answers is None and store.is_down():
        answers = _local.get(_name(backend))
    oldest = timezone.now().timestamp() - REMEMBERED_S
    return {name: answer for name, answer in (answers or {}).items() if answer.at > oldest}


def _write(backend: Backend, answers: Answers) -> None:
    _local.put(_name(backend), answers)
    store.put(_name(backend), answers, Answers, REMEMBERED_S)
