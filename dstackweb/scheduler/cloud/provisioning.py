"""The rows of a job placed on a backend's offer: the job's own, and its new instance's."""

from __future__ import annotations

import uuid
from decimal import Decimal

from dstackweb.backends.contract import Offer
from dstackweb.backends.models import Backend, Instance
from dstackweb.backends.registry import cloud_kinds
from dstackweb.runs.models import Job


def assign_offer(job: Job, offer: Offer, backend: Backend) -> None:
    """Write the offer into the job, unsaved. The job gets the whole instance."""
    job.backend, job.region, job.instance_type = backend, offer.region, offer.instance_type
    job.price, job.is_spot = offer.price, offer.spot
    job.cpus, job.memory_mib = offer.cpus, offer.memory_mib


def new_instance(job: Job, offer: Offer) -> Instance | None:
    """The job's new instance, unsaved; None for an idle one, or for a backend without instances."""
    if "instance" in offer.detail or job.backend.kind not in cloud_kinds():
        return None
    made = Instance(
        pk=uuid.uuid4(),
        backend=job.backend,
        project_id=job.run.project_id,
        holder=job.pk,
        region=offer.region,
        instance_type=offer.instance_type,
        is_spot=offer.spot,
        price=offer.price,
        zone_prices=_zone_prices(offer, job.run.spec.get("max_price")),
        cpus=offer.cpus,
        memory_mib=offer.memory_mib,
        gpu_name=offer.gpu_name,
        gpu_count=offer.gpu_count,
        gpu_memory_mib=offer.gpu_memory_mib,
    )
    job.instance = made
    return made


def _zone_prices(offer: Offer, max_price: float | None) -> dict[str, str]:
    """The zones within the run's `max_price`, with their prices, where an offer's price depends on the zone."""
    prices: dict[str, str] = offer.detail.get("zone_prices", {}) if offer.spot else {}
    return {
        zone: price for zone, price in prices.items() if max_price is None or Decimal(price) <= Decimal(str(max_price))
    }
