"""EC2 where moto is slow or too simple: instance types in pages, launches with limits, machines that run."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from moto.ec2 import utils as moto_utils
from moto.ec2.models import EC2Backend, ec2_backends
from moto.ec2.models.instances import Instance, Reservation

from standins.aws import catalog, quotas
from standins.aws.machines import USER_SHUTDOWN, Fleet
from standins.aws.pricing import SpotPrices
from standins.aws.wire import AwsError, Call, Response, Xml, ec2_model, page, xml

USER_DATA_BYTES = 16384
_NOT_COMPARED = {"Action", "Version", "ClientToken"}

# Filters of DescribeInstances that moto lacks.
moto_utils.filter_dict_attribute_mapping |= {"instance-lifecycle": "lifecycle", "client-token": "client_token"}


@dataclass
class Capacity:
    """How many more instances start; patterns with "*" for any."""

    instance_type: str
    zone: str
    market: str
    left: int

    def fits(self, name: str, zone: str, market: str) -> bool:
        return self.instance_type in {"*", name} and self.zone in {"*", zone} and self.market in {"*", market}


class Compute:
    def __init__(self, fleet: Fleet, limits: quotas.Quotas, spot: SpotPrices) -> None:
        self.fleet, self.limits, self.spot = fleet, limits, spot
        self.capacity: list[Capacity] = []
        self.tokens: dict[tuple[str, str, str], tuple[str, Reservation]] = {}
        """The request's digest and its reservation, by region, zone (empty: any) and client token."""
        self._launching: Call | None = None
        self._again: Reservation | None = None
        self._hook()

    def _hook(self) -> None:
        """Give each of moto's instances a machine, which starts as pending and ends as shutting down."""
        run, fleet = EC2Backend.run_instances, self.fleet

        def run_instances(backend: EC2Backend, *args: Any, **kwargs: Any) -> Reservation:
            if self._again is not None:
                return self._again
            reservation = run(backend, *args, **kwargs)
            data = base64.b64decode(self._launching.form.get("UserData", "")) if self._launching else b""
            for instance in reservation.instances:
                if instance.lifecycle == "spot":
                    # moto's class of instances does not declare it; its answers have all attributes.
                    instance.spot_instance_request_id = f"sir-{instance.id[-8:]}"  # type: ignore[attr-defined]
                fleet.launched(instance, data)
            return reservation

        def ended(towards: str) -> Callable[..., list[tuple[Instance, Any]]]:
            def end(backend: EC2Backend, instance_ids: list[str]) -> list[tuple[Instance, Any]]:
                found = backend.get_multi_instances_by_id(instance_ids)
                before = [(instance, copy(instance.instance_state)) for instance in found]
                for instance in found:
                    if towards == "stopped" and instance.lifecycle == "spot":
                        raise AwsError(
                            "UnsupportedOperation",
                            f"You can't stop the Spot Instance '{instance.id}' because it is associated with a "
                            "one-time Spot Instance request. You can only stop Spot Instances associated with "
                            "persistent Spot Instance requests.",
                        )
                    fleet.machines[instance.id].end(towards, USER_SHUTDOWN)
                return before

            return end

        # moto has no hooks for its own classes, so its methods are replaced.
        EC2Backend.run_instances = run_instances  # type: ignore[method-assign, assignment]
        EC2Backend.terminate_instances = ended("terminated")  # type: ignore[method-assign]
        EC2Backend.stop_instances = ended("stopped")  # type: ignore[method-assign]

    def describe_instance_types(self, call: Call) -> dict[str, Any]:
        names, filters = call.numbered("InstanceType"), call.filters()
        offered = set(catalog.in_region(call.region))
        if len(names) > 100:
            raise AwsError("InvalidParameterValue", "The maximum number of instance types that can be listed is 100")
        if unknown := sorted(set(names) - offered):
            raise AwsError("InvalidInstanceType", f"The following supplied instance types do not exist: {unknown}")
        found = sorted(name for name in catalog.matching(names, filters) if name in offered)
        rows, more = page(found, call)
        return {"InstanceTypes": [_type_xml(name) for name in rows], **more}

    def describe_instance_type_offerings(self, call: Call) -> dict[str, Any]:
        kind, filters = call.form.get("LocationType", "region"), call.filters()
        found = [
            row
            for row in catalog.offerings(kind, call.region)
            if _fits(row["InstanceType"], filters.get("instance-type"))
            and _fits(row["Location"], filters.get("location"))
        ]
        rows, more = page(found, call, 1000)
        return {"InstanceTypeOfferings": rows, **more}

    def describe_regions(self, call: Call, disabled: set[str]) -> dict[str, Any]:
        wanted, every = set(call.numbered("RegionName")), call.form.get("AllRegions") == "true"
        return {
            "Regions": [
                {
                    "RegionName": name,
                    "Endpoint": f"ec2.{name}.amazonaws.com",
                    "OptInStatus": "not-opted-in" if name in disabled else "opt-in-not-required",
                }
                for name in catalog.regions()
                if (every or name not in disabled) and (not wanted or name in wanted)
            ]
        }

    def run_instances(self, call: Call, onward: Callable[[Call], Response]) -> Response:
        """The checks and choices that AWS makes; moto makes the record. The fleet's lock is held."""
        form, token = call.form, call.form.get("ClientToken", "")
        place = call.region, _zone_of(call) if token else "", token
        digest = hashlib.sha256(
            json.dumps(sorted((k, v) for k, v in form.items() if k not in _NOT_COMPARED)).encode()
        ).hexdigest()
        if token and (known := self.tokens.get(place)):
            if known[0] != digest:
                raise AwsError(
                    "IdempotentParameterMismatch",
                    "The request uses the same client token as a previous, but non-identical request.",
                )
            for key in [key for key in form if key.startswith("IamInstanceProfile.")]:
                del form[key]
            self._again = known[1]
            try:
                return onward(call)
            finally:
                self._again = None
        count = self._checked(call)
        form["MinCount"] = str(count)
        before = set(ec2_backends[catalog.ACCOUNT][call.region].reservations)
        self._launching = call
        try:
            answer = onward(call)
        finally:
            self._launching = None
        if not answer.code:
            reservations = ec2_backends[catalog.ACCOUNT][call.region].reservations
            new = next(reservations[key] for key in reservations if key not in before)
            if token:
                self.tokens[place] = (digest, new)
            for instance in new.instances:
                for row in self.capacity:
                    if row.fits(instance.instance_type, str(instance.availability_zone), _market(form)):
                        row.left -= 1
        return answer

    def _checked(self, call: Call) -> int:
        """How many may start. Writes the zone into the call if it names none."""
        form = call.form
        name, market = form.get("InstanceType", "m1.small"), _market(form)
        fewest, most = int(form.get("MinCount", 1)), int(form.get("MaxCount", 1))
        try:
            if len(base64.b64decode(form.get("UserData", ""), validate=True)) > USER_DATA_BYTES:
                raise AwsError("InvalidParameterValue", "User data is limited to 16384 bytes")
        except binascii.Error:
            raise AwsError("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.") from None
        zones = catalog.zones_of(call.region).get(name)
        if name not in catalog.NAMES or not zones:
            raise AwsError("InvalidParameterValue", f"Invalid value '{name}' for InstanceType.")
        if market == "spot" and "spot" not in catalog.ALL[name]["SupportedUsageClasses"]:
            raise AwsError("InvalidParameterCombination", f"The instance type {name} is not offered as Spot Instance.")
        backend = ec2_backends[catalog.ACCOUNT][call.region]
        zone = _zone_of(call)
        if zone and zone not in zones:
            raise AwsError(
                "Unsupported",
                f"Your requested instance type ({name}) is not supported in your requested Availability Zone ({zone}). "
                f"Please retry your request by not specifying an Availability Zone or choosing {', '.join(zones)}.",
            )
        catalog.add_images(call.region)
        if form.get("ImageId") not in backend.amis:
            raise AwsError("InvalidAMIID.NotFound", f"The image id '[{form.get('ImageId')}]' does not exist")
        if (key := form.get("KeyName")) and key not in backend.key_pairs:
            raise AwsError("InvalidKeyPair.NotFound", f"The key pair '{key}' does not exist")
        count = min(most, self._within_quota(call.region, name, market, fewest))
        self._max_price(form, name, zone or zones[0])
        room = {each: self._room(name, each, market) for each in ([zone] if zone else zones)}
        best = max(room, key=lambda each: room[each])
        if room[best] < fewest:
            raise _no_capacity(name, zone, [each for each in zones if self._room(name, each, market) >= fewest], market)
        if not zone:
            form["Placement.AvailabilityZone"] = best
        return int(min(count, room[best]))

    def _room(self, name: str, zone: str, market: str) -> float:
        return min((row.left for row in self.capacity if row.fits(name, zone, market)), default=float("inf"))

    def _within_quota(self, region: str, name: str, market: str, fewest: int) -> int:
        code = quotas.code_of(name, spot=market == "spot")
        limit = self.limits.value(code, region) if code else 0.0
        fits = int((limit - self.usage(region).get(code or "", 0)) // catalog.vcpus(name))
        if fits >= fewest:
            return fits
        if market == "spot":
            raise AwsError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        raise AwsError(
            "VcpuLimitExceeded",
            f"You have requested more vCPU capacity than your current vCPU limit of {limit:.0f} allows for the "
            "instance bucket that the specified instance type belongs to. Please visit "
            "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
        )

    def _max_price(self, form: dict[str, str], name: str, zone: str) -> None:
        most = form.get("InstanceMarketOptions.SpotOptions.MaxPrice")
        price = self.spot.at(name, zone, datetime.now(UTC).timestamp())[0]
        if most and float(most) < price:
            raise AwsError(
                "SpotMaxPriceTooLow",
                f"Your Spot request price of {most} is lower than the minimum required Spot request fulfillment price "
                f"of {price}.",
            )

    def usage(self, region: str) -> dict[str, int]:
        """vCPUs of pending and running instances, by quota code."""
        found: dict[str, int] = {}
        for machine in self.fleet.machines.values():
            instance = machine.instance
            if instance.region_name == region and machine.state in {"pending", "running"}:
                code = quotas.code_of(instance.instance_type, spot=instance.lifecycle == "spot") or ""
                found[code] = found.get(code, 0) + catalog.vcpus(instance.instance_type)
        return found


def _zone_of(call: Call) -> str:
    """The zone of a launch or of its subnet; empty: any. The client token counts within it."""
    form = call.form
    subnet = form.get("SubnetId") or form.get("NetworkInterface.1.SubnetId")
    if subnet:
        return str(ec2_backends[catalog.ACCOUNT][call.region].get_subnet(subnet).availability_zone)
    return form.get("Placement.AvailabilityZone", "")


def _market(form: dict[str, str]) -> str:
    return form.get("InstanceMarketOptions.MarketType") or "on-demand"


def _no_capacity(name: str, zone: str | None, elsewhere: list[str], market: str) -> AwsError:
    if market == "spot":
        message = "There is no Spot capacity available that matches your request."
    elif zone is None:
        message = f"We currently do not have sufficient {name} capacity in the Region you requested."
    else:
        message = (
            f"We currently do not have sufficient {name} capacity in the Availability Zone you requested ({zone}). "
            "Our system will be working on provisioning additional capacity. "
        )
        if elsewhere:
            message += (
                f"You can currently get {name} capacity by not specifying an Availability Zone in your request or "
                f"choosing {', '.join(elsewhere)}."
            )
    return AwsError("InsufficientInstanceCapacity", message, 500)


def _fits(value: str, allowed: list[str] | None) -> bool:
    return allowed is None or any(
        value == each or (each.endswith("*") and value.startswith(each[:-1])) for each in allowed
    )


@cache
def _type_xml(name: str) -> Xml:
    return xml(ec2_model().shape_for("InstanceTypeInfo"), catalog.ALL[name], "item")
