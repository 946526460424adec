"""An example of a backend kind outside the repository: machines rented by the month from a price list.

It only makes offers; a kind that also starts instances implements `contract.Cloud`. docs/writing-a-backend.md
explains each part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from pydantic import SecretStr

from dstackweb.backends.contract import Availability, Offer
from dstackweb.backends.kinds import Kind
from dstackweb.backends.models import Backend
from dstackweb.spec.effective import Requirements
from dstackweb.spec.fields import Keys, Names, key


class RentalSettings(Keys):
    """What an admin sets."""

    sites: Names = key("a list of sites, such as berlin", "Sites to rent at")
    price_per_gpu: float = key("a number", "USD per GPU and hour", default=1.5)
    api_key: SecretStr = key("text", "Key of the customer portal")


class RentalBackend:
    """Offers of one customer account. `offers` reads the settings alone: it never waits for a network."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def offers(self, requirements: Requirements, *, image: str | None = None) -> Sequence[Offer]:
        """One machine with eight GPUs per site; those of Oslo are sold out."""
        return [
            Offer(
                backend=self.backend.name,
                region=site,
                instance_type="octo",
                cpus=64,
                memory_mib=512 * 1024,
                gpu_name="L40S",
                gpu_count=8,
                gpu_memory_mib=48 * 1024,
                price=Decimal(str(self.backend.config.get("price_per_gpu", 1.5))) * 8,
                availability=Availability.NOT_AVAILABLE if site == "oslo" else Availability.AVAILABLE,
                detail={"code": "sold_out", "site": site} if site == "oslo" else {},
            )
            for site in self.backend.config["sites"]
        ]


class RentalKind(Kind):
    """Found by its entry point."""

    name = "rental"
    label = "GPU rental"
    driver_class = RentalBackend
    schema = RentalSettings
    setup_hint = "Machines rented by the month."

    def location(self, config: Mapping[str, Any]) -> str:
        return ", ".join(config["sites"])

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        if detail.get("code") == "sold_out":
            return f"Sold out in {detail['site']}."
        return super().offer_detail(detail)
