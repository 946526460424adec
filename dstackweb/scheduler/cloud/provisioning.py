"""A job placed on an offer of another backend than hosts: what its row says, and that of the machine it is to get."""

from __future__ import annotations

import uuid
from decimal import Decimal

from dstackweb.backends.contract import Offer
from dstackweb.backends.models import Backend, Instance
from dstackweb.backends.registry import cloud_kinds
from dstackweb.runs.models import Job


def on_offer(job: Job, offer: Offer, backend: Backend) -> None:
    """The whole of what is offered is the job's."""
    job.backend, job.region, job.instance_type = backend, offer.region, offer.instance_type
    job.price, job.is_spot = offer.price, offer.spot
    job.cpus, job.memory_mib = offer.cpus, offer.memory_mib


def machine_for(job: Job, offer: Offer) -> Instance | None:
    """The row, not saved yet, of the machine that a cloud is to be asked for; None where the backend is no cloud, or
    the machine is there already. The job names it from now on."""
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
    """Of an offer whose price depends on the zone, those zones that the run may have."""
    prices: dict[str, str] = offer.detail.get("zone_prices", {}) if offer.spot else {}
    return {
        zone: price for zone, price in prices.items() if max_price is None or Decimal(price) <= Decimal(str(max_price))
    }
