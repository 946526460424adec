"""A paid backend for tests: what it offers is what the test says, behind the contract that real ones serve."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest

from dstackweb.backends.contract import Availability, Offer
from dstackweb.backends.models import Backend
from dstackweb.spec.effective import Requirements
from tests.backends.kinds import use_driver


def offer(price: str = "1.0", **fields: Any) -> Offer:
    values: dict[str, Any] = {
        "backend": "cloud", "instance_type": "g5.xlarge", "cpus": 4, "memory_mib": 16384, "region": "eu-west-1",
        "availability": Availability.AVAILABLE, "gpu_name": "A10G", "gpu_count": 1, "price": Decimal(price),
    } | fields  # fmt: skip
    return Offer(**values)


class StubMarket:
    """What its backends offer by name; an exception is raised instead. `asked` counts the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str = "aws") -> None:
        self.offers: dict[str, Sequence[Offer] | Exception] = {}
        self.asked: list[str] = []
        self.kind = kind
        market = self

        class Driver:
            def __init__(self, backend: Backend) -> None:
                self.name = backend.name

            def offers(self, requirements: Requirements, *, image: str | None = None) -> Sequence[Offer]:
                market.asked.append(self.name)
                answer = market.offers[self.name]
                if isinstance(answer, Exception):
                    raise answer
                return answer

        use_driver(monkeypatch, kind, Driver)

    def has(self, name: str, *offers: Offer, fails: Exception | None = None) -> Backend:
        """A backend of this name is set up and offers this."""
        self.offers[name] = fails or offers
        return Backend.objects.create(name=name, kind=self.kind)
