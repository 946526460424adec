"""An example of a backend kind outside the repository: machines rented by the hour through a company's portal.

docs/writing-a-backend.md explains each part. It passes the conformance suite (`tests/backends/contract/`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import httpx
from django.utils import timezone
from pydantic import SecretStr

from dstackweb.backends.contract import (
    Availability,
    Cloud,
    CloudInstance,
    InstanceEnd,
    InstanceOrder,
    InstanceState,
    LaunchFailed,
    LaunchFailure,
    Offer,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceReading,
    SourceSpec,
)
from dstackweb.backends.kinds import Kind
from dstackweb.backends.models import Backend
from dstackweb.spec.effective import Requirements
from dstackweb.spec.fields import Keys, Names, Text, key

STOCK = SourceKey("stock", "")


class RentalSettings(Keys):
    """What an admin sets."""

    portal: Text = key("an address, such as https://rental.example/api", "Address of the customer portal")
    sites: Names = key("a list of sites, such as berlin", "Sites to rent at")
    price_per_gpu: float = key("a number", "USD per GPU and hour", default=1.5)
    api_key: SecretStr = key("text", "Key of the customer portal")


class RentalBackend(Cloud):
    """One customer account. A driver is made for each use, so it keeps nothing."""

    sources = {"stock": SourceSpec(60.0, dict[str, int], ("portal",))}
    """One source for all regions: how many machines are free at each site."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.config = backend, backend.config

    def regions(self) -> Sequence[str]:
        return list(self.config["sites"])

    # Offers: `fetch` uses the network, in the background; `join` never does.

    def wanted(self) -> Sequence[SourceKey]:
        return [STOCK]

    def fetch(self, key: SourceKey) -> dict[str, int]:
        return dict(self._call("GET", "sites"))

    def join(
        self, readings: Mapping[SourceKey, SourceReading], requirements: Requirements, *, image: str | None = None
    ) -> list[Offer]:
        free = readings[STOCK].value
        if free is None:  # an empty list would say that there never is an offer
            raise SourceFailed(**{"code": SourceFailure.NOT_READ, **(readings[STOCK].error or {})})
        return [self._offer(site, free.get(site, 0)) for site in self.config["sites"]]

    def _offer(self, site: str, free: int) -> Offer:
        return Offer(
            backend=self.backend.name,
            region=site,
            instance_type="octo",
            cpus=64,
            memory_mib=512 * 1024,
            gpu_name="L40S",
            gpu_count=8,
            gpu_memory_mib=48 * 1024,
            price=Decimal(str(self.config.get("price_per_gpu", 1.5))) * 8,
            availability=Availability.AVAILABLE if free else Availability.NOT_AVAILABLE,
            detail={"fits": free} if free else {"code": "sold_out", "site": site},
        )

    # Instances: each call may be repeated, doubled or lost.

    def launch(self, order: InstanceOrder) -> CloudInstance:
        """The portal rents one machine for each name: a repeated order gets the first, which may have ended."""
        asked = {"owner": order.deployment, "site": order.region, "script": order.user_data}
        return _machine(self._call("PUT", f"machines/{order.instance}", asked))

    def instances(self, region: str, deployment: str) -> list[CloudInstance]:
        found = self._call("GET", f"machines?owner={deployment}")
        return [_machine(shown) for shown in found if shown["site"] == region]

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        for cloud_id in cloud_ids:
            self._call("DELETE", f"machines/{cloud_id}", missing_is_fine=True)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, missing_is_fine: bool = False
    ) -> Any:
        """The portal's answer. What is no answer of its own is a SourceFailed: nothing is concluded from it."""
        url, key = f"{self.config['portal']}/{path}", Kind.secrets_of(self.backend.secret).get("api_key", "")
        try:
            answer = httpx.request(method, url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=10)
        except httpx.HTTPError as error:
            raise SourceFailed(SourceFailure.UNREACHABLE, endpoint=self.config["portal"], text=str(error)) from error
        if answer.status_code == 429:
            until = timezone.now() + dt.timedelta(seconds=int(answer.headers["Retry-After"]))
            raise SourceFailed(SourceFailure.THROTTLED, api="portal", until=until.isoformat())
        if answer.status_code == 401:
            raise SourceFailed("wrong_key")
        if answer.status_code == 409:
            raise LaunchFailed(LaunchFailure.NO_CAPACITY, answer.text)
        if not (answer.is_success or (answer.status_code == 404 and missing_is_fine)):
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=answer.text[:200])
        return answer.json()


def _machine(shown: Mapping[str, Any]) -> CloudInstance:
    is_gone = shown["state"] == "ended"
    return CloudInstance(
        instance=shown["name"],
        cloud_id=shown["id"],
        region=shown["site"],
        state=InstanceState.GONE if is_gone else InstanceState.RUNNING,
        launched_at=dt.datetime.fromisoformat(shown["since"]),
        why=InstanceEnd.CLOUD if is_gone else "",
    )


class RentalKind(Kind):
    """Found by its entry point."""

    name = "rental"
    label = "GPU rental"
    driver_class = RentalBackend
    schema = RentalSettings
    setup_hint = "Machines rented by the hour."

    def location(self, config: Mapping[str, Any]) -> str:
        return ", ".join(config["sites"])

    def source_failure(self, error: Mapping[str, Any]) -> str:
        if error.get("code") == "wrong_key":
            return "The portal refused the key. Copy the key again from the portal's page “Access”."
        return super().source_failure(error)

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        if detail.get("code") == "sold_out":
            return f"Sold out in {detail['site']}."
        return super().offer_detail(detail)
