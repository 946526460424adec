"""What clouds answered to orders lately, shared by all runs and processes: an offer that was refused is not asked for
again for a while, whoever wants it, and then by one run at a time, until the cloud launches it again.

All of a backend is one object of the shared cache. Two processes that write at the same moment may lose one of the two
answers, which costs one more call. While the cache is down, each process knows only its own answers.
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
ENGINE_REFUSED_S = 5.0
"""A cluster has room again with the end of any job."""
SETTINGS_REFUSED_S = 600.0
"""The longest for what our settings or permissions are to blame for: it doubles from REFUSED_S."""
REMEMBERED_S = 3600.0
PASSING = (LaunchFailure.NO_CAPACITY, LaunchFailure.QUOTA, LaunchFailure.SPOT_PRICE)
"""Refusals that end by themselves."""
SKEW_S = 5.0
"""Clocks of two machines differ by less."""
MAX_TEXT = 300
SIZE = ("cpus", "memory_mib", "gpu_name", "gpu_count")


class Asked(NamedTuple):
    """What an order asks for, whichever run it is for. An engine's offers differ by their size alone."""

    region: str
    instance_type: str
    spot: bool
    cpus: int
    memory_mib: int
    gpu_name: str
    gpu_count: int

    @classmethod
    def by(cls, offer: Offer | Instance) -> Asked:
        spot = offer.spot if isinstance(offer, Offer) else offer.is_spot
        return cls(offer.region, offer.instance_type, spot, *(getattr(offer, name) for name in SIZE))

    def in_zone(self, zone: str) -> str:
        """The key of its answers in a zone; empty: wherever the cloud likes."""
        return "|".join(map(str, (*self, zone)))


@dataclass(frozen=True)
class Answer:
    """A cloud's latest answer: a LaunchFailure with its text, or empty where it launched the instance.

    Times are seconds since the epoch. `times`: how often in a row it refused.
    """

    code: str
    text: str
    at: float
    until: float
    times: int = 0

    def holds(self, now: float) -> bool:
        """Whether it still says something: for a while that there is room, or that there is none."""
        return self.at - SKEW_S < now < self.until


Answers = dict[str, Answer]

_own: store.LocalCache[str, Answers] = store.LocalCache(100)


class Known:
    """The answers of one backend, as of now."""

    def __init__(self, backend: Backend) -> None:
        self.answers, self.now = _read(backend), timezone.now().timestamp()

    def refusal(self, asked: Asked, zones: Iterable[str] = ()) -> Answer | None:
        """Why it is no use to ask now: it was refused lately, or in each of these zones if there are any."""
        whole = self._refused(asked, "")
        if whole is not None:
            return whole
        answers = [self._refused(asked, zone) for zone in zones]
        refused = [answer for answer in answers if answer is not None]
        return max(refused, key=lambda answer: answer.at) if refused and len(refused) == len(answers) else None

    def full_zones(self, asked: Asked) -> tuple[str, ...]:
        """Zones that refused it lately."""
        start = asked.in_zone("")
        zones = (key.removeprefix(start) for key in self.answers if key.startswith(start))
        return tuple(sorted(zone for zone in zones if zone and self._refused(asked, zone)))

    def is_launching(self, asked: Asked) -> bool:
        """Whether the cloud has launched one just now, so that several may be asked for at once."""
        answer = self.answers.get(asked.in_zone(""))
        return answer is not None and not answer.code and answer.holds(self.now)

    def marked(self, offer: Offer) -> Offer:
        """The offer without what was refused lately."""
        asked, prices = Asked.by(offer), offer.detail.get("zone_prices") or {}
        refused = self.refusal(asked, prices)
        if refused is not None:
            if offer.availability not in (Availability.AVAILABLE, Availability.UNKNOWN):
                return offer
            availability = Availability.NO_QUOTA if refused.code == LaunchFailure.QUOTA else Availability.BUSY
            why = {"code": "refused", "why": refused.code, "text": refused.text, "at": refused.at}
            return dataclasses.replace(offer, availability=availability, detail={**offer.detail, **why})
        if self._was_refused(asked, "") or (prices and all(self._was_refused(asked, zone) for zone in prices)):
            offer = dataclasses.replace(offer, detail={**offer.detail, "on_trial": True})
        if full := set(self.full_zones(asked)) & prices.keys():
            open_zones = {zone: price for zone, price in prices.items() if zone not in full}
            cheapest = min(open_zones, key=lambda zone: Decimal(open_zones[zone]))
            detail = {**offer.detail, "zone": cheapest, "zone_prices": open_zones}
            offer = dataclasses.replace(offer, price=Decimal(open_zones[cheapest]), detail=detail)
        return offer

    def _was_refused(self, asked: Asked, zone: str) -> bool:
        answer = self.answers.get(asked.in_zone(zone))
        return answer is not None and bool(answer.code)

    def _refused(self, asked: Asked, zone: str) -> Answer | None:
        answer = self.answers.get(asked.in_zone(zone))
        return answer if answer is not None and answer.code and answer.holds(self.now) else None


def marked(backend: Backend, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """A backend's offers, with those that it refused lately marked."""
    known = Known(backend)
    return tuple(map(known.marked, offers)) if known.answers else offers


def launched(instance: Instance, zone: str) -> None:
    """Remember that the cloud has launched it: what was refused before no longer counts."""
    asked, now = Asked.by(instance), timezone.now().timestamp()
    answers = _read(instance.backend)
    known = answers.get(asked.in_zone(""))
    if known is not None and not known.code and now - known.at < REFUSED_S / 2:
        return
    answers.pop(asked.in_zone(zone), None)
    _write(instance.backend, answers | {asked.in_zone(""): Answer("", "", now, now + REFUSED_S)})


def refused(instance: Instance, failed: LaunchFailed) -> None:
    """Remember a refusal: of the zone where one was tried, and of the offer unless it may be launched in others."""
    backend, asked, now = instance.backend, Asked.by(instance), timezone.now().timestamp()
    zone = str(failed.data.get("zone", ""))
    keys = {asked.in_zone(zone)}
    if not instance.zone_prices and not failed.data.get("elsewhere"):
        keys.add(asked.in_zone(""))
    answers = _read(backend)
    for key in keys:
        before = answers.get(key)
        times = before.times + 1 if before is not None and before.code == failed.code else 1
        wait_s = REFUSED_S if registry.is_machine(backend) else ENGINE_REFUSED_S
        if failed.code not in PASSING:
            wait_s = min(SETTINGS_REFUSED_S, REFUSED_S * 2.0 ** min(times - 1, 10))
        answers[key] = Answer(failed.code, failed.text[:MAX_TEXT], now, now + wait_s, times)
    _write(backend, answers)


def clear(backend: Backend) -> None:
    """Forget what a backend refused: a person has asked for what is new, and may have changed something."""
    _own.drop(lambda name: name == _name(backend))
    store.delete(_name(backend))


def forget() -> None:
    _own.forget()


def _name(backend: Backend) -> str:
    """With its version: other settings may have other answers."""
    return f"refusals:{backend.pk}:{backend.version}"


def _read(backend: Backend) -> Answers:
    answers: Answers | None = store.get(_name(backend), Answers)
    if answers is None and store.is_down():
        answers = _own.get(_name(backend))
    oldest = timezone.now().timestamp() - REMEMBERED_S
    return {key: answer for key, answer in (answers or {}).items() if answer.at > oldest}


def _write(backend: Backend, answers: Answers) -> None:
    _own.put(_name(backend), answers)
    store.put(_name(backend), answers, Answers, REMEMBERED_S)
