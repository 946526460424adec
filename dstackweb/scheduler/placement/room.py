"""What is free of a cluster: a reading of it, less what was ordered since (docs/design.md#scheduling). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from dstackweb.backends.contract import Allocation, Availability, Counted, Offer, SourceReading
from dstackweb.spec.effective import Requirements


class PlacedOrder(NamedTuple):
    """An order of a placed run, from its instance's row.

    `answered_at`: the number of the last reading that had begun when the cluster's answer was stored; None: it has not
    answered.
    """

    takes: Allocation
    answered_at: int | None = None

    def is_counted_by(self, reading: SourceReading) -> bool:
        """Whether the cluster had the order when the reading began, so that its value counts it."""
        return self.answered_at is not None and self.answered_at < reading.number


@dataclass(frozen=True)
class Room:
    """The free capacity of one backend's cluster."""

    driver: Counted
    reading: SourceReading

    @classmethod
    def after(cls, driver: Counted, reading: SourceReading, orders: Iterable[PlacedOrder]) -> Room:
        """Take from a reading all orders that it does not count."""
        room = cls(driver, reading)
        for order in orders if reading.value is not None else ():
            if not order.is_counted_by(reading):
                # One that has no room takes none: the cluster keeps it waiting, or refuses it.
                room = room.take(order.takes) or room
        return room

    def take(self, order: Allocation) -> Room | None:
        """Return what an order leaves; None where it has no room."""
        value = self.driver.take(self.reading.value, order)
        return None if value is None else replace(self, reading=replace(self.reading, value=value))

    def fill(self, order: Allocation, most: int) -> tuple[int, Room]:
        """Take as many equal orders as fit, up to `most`; return how many, and what they leave."""
        room = self
        for count in range(most):
            smaller = room.take(order)
            if smaller is None:
                return count, room
            room = smaller
        return most, room

    def offers(self, needs: Requirements, *, image: str | None = None) -> list[Offer]:
        """The driver's offers of what is free. A refuted reading shows room that is not there: then none is."""
        offers = self.driver.join({self.driver.key: self.reading}, needs, image=image)
        if not self.reading.is_refuted:
            return list(offers)
        return [
            replace(offer, availability=Availability.BUSY, detail={**offer.detail, "code": "cluster_busy", "fits": 0})
            if offer.availability in (Availability.AVAILABLE, Availability.UNKNOWN)
            else offer
            for offer in offers
        ]
