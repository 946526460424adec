"""An account's vCPU quotas in a region by instance family, on demand and spot, and their use: others' as read from EC2,
and that of the backend's own instances as their rows have it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from django.utils.translation import gettext_noop as _

from dstackweb.backends.aws.instance_types import describe
from dstackweb.backends.aws.instances import described, read
from dstackweb.backends.contract import Quota

if TYPE_CHECKING:
    from dstackweb.backends.aws.client import Aws


class QuotaGroup(NamedTuple):
    """Instance families that share quotas; the quotas' codes are None if AWS documents none.

    `families` are their first letters, with the generation where that matters. `name` is in the quotas' names in the
    AWS console, `spot_name` where it differs for spot. `label` is shown on the quotas page.
    """

    families: str
    on_demand: str | None
    spot: str | None
    name: str
    label: str
    spot_name: str = ""


_P = "L-417A185B"
GROUPS = (
    QuotaGroup("p2 p3 p4", _P, "L-7212CCBC", "P", _("P: large GPUs (P4, P5, P6)"), "P4, P3 and P2"),
    QuotaGroup("p5", _P, "L-C4BD4855", "P", _("P5 and P5e as spot"), "P5"),
    QuotaGroup("p", _P, None, "P", ""),
    QuotaGroup("g gr vt", "L-DB2E81BA", "L-3819A6DF", "G and VT", _("G and VT: GPUs for graphics and inference")),
    QuotaGroup(
        "a c d h i im is m r t z", "L-1216C47A", "L-34B43A08", "Standard (A, C, D, H, I, M, R, T, Z)",
        _("Standard: A, C, D, H, I, M, R, T, Z"),
    ),
    QuotaGroup("x", "L-7295265B", "L-E3A00192", "X", _("X: high memory")),
    QuotaGroup("trn", "L-2C3B7624", "L-6B0D517C", "Trn", "Trn"),
    QuotaGroup("inf", "L-1945791B", "L-B5D1601B", "Inf", "Inf"),
    QuotaGroup("dl", "L-6E869C2A", "L-85EED4F7", "DL", "DL"),
    QuotaGroup("f", "L-74FC7D96", "L-88CF9481", "F", "F"),
    QuotaGroup("u", "L-43DA4232", None, "High Memory", _("High memory (U)")),
    QuotaGroup("hpc", "L-F7808C92", None, "HPC", "HPC"),
)  # fmt: skip
"""https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html and the names in Service Quotas. AWS
does not document which spot quota P families after P5 count against."""

BY_FAMILY = {family: group for group in GROUPS for family in group.families.split()}
NAMES: Mapping[str, str] = {
    **{group.on_demand: f"Running On-Demand {group.name} instances" for group in GROUPS if group.on_demand},
    **{group.spot: f"All {group.spot_name or group.name} Spot Instance Requests" for group in GROUPS if group.spot},
}
"""Quotas by code, as the AWS console calls them."""

_LETTERS = re.compile(r"([a-z]+)(\d*)")
_NOT_COUNTED = ("capacity-block", "scheduled", "interruptible-capacity-reservation")


def code_of(instance_type: str, *, spot: bool) -> str | None:
    """The quota that an instance type counts against; None if unknown."""
    found = _LETTERS.match(instance_type.partition(".")[0])
    group = found and (BY_FAMILY.get(found[0]) or BY_FAMILY.get(found[1]))
    return (group.spot if spot else group.on_demand) if group else None


def limits(aws: Aws, region: str) -> dict[str, int]:
    """The vCPU limits by quota, of those that Service Quotas lists. Raises SourceFailed."""
    listed = {"ServiceCode": "ec2", "MaxResults": 100}
    quotas = aws.items("service-quotas", region, "ListServiceQuotas", "Quotas", _read_limit, **listed)
    return {code: limit for code, limit in quotas if code in NAMES}


def _read_limit(quota: Mapping[str, Any]) -> tuple[str, int]:
    """A quota's code and value. Raises one of `errors.ODD` if it can't be read."""
    limit = int(quota["Value"])
    if limit < 0:
        raise ValueError(f"{limit} is no limit")
    return str(quota["QuotaCode"]), limit


def use_by_others(aws: Aws, region: str, are_own: Callable[[Iterable[str]], Collection[str]]) -> dict[str, int]:
    """The vCPUs in use by quota, without own instances. Raises SourceFailed.

    That is running and starting instances, and open spot requests. `are_own`: which of these orders, by their tags, are
    the backend's own; their use is known from their rows at any time.
    """
    instances = list(_running(aws, region))
    own_orders = are_own(order for order, _, _ in instances if order)
    running = Counter((name, spot) for order, name, spot in instances if order not in own_orders)
    running.update((name, True) for name in _requested(aws, region))
    kinds = describe(aws, region, (name for name, _ in running))
    used = dict.fromkeys(NAMES, 0)
    for (name, spot), count in running.items():
        if (code := code_of(name, spot=spot)) is not None and name in kinds:
            # The default counts even if an instance has fewer threads.
            used[code] += count * kinds[name]["VCpuInfo"]["DefaultVCpus"]
    return used


def quotas_of(limits: Mapping[str, int], others: Mapping[str, int] | None, own: Mapping[str, int]) -> dict[str, Quota]:
    """The quotas with their use; it is unknown where that of others is (None)."""
    return {
        code: Quota(limit, None if others is None else others.get(code, 0) + own.get(code, 0))
        for code, limit in sorted(limits.items())
    }


def _running(aws: Aws, region: str) -> Iterable[tuple[str, str, bool]]:
    """Fetch, of each running or starting instance, the order in its tag (or ""), its type, and whether it is spot.

    Dedicated hosts and capacity blocks have quotas of their own.
    """
    for instance in described(aws, region, {"instance-state-name": ["pending", "running"]}):
        on_dedicated_host = (instance.get("Placement") or {}).get("Tenancy") == "host"
        lifecycle = instance.get("InstanceLifecycle")
        if not on_dedicated_host and lifecycle not in _NOT_COUNTED and instance.get("InstanceType"):
            yield read(instance, region).instance, instance["InstanceType"], lifecycle == "spot"


def _requested(aws: Aws, region: str) -> Iterable[str]:
    """Instance types of open spot requests. Fulfilled requests are instances."""
    params = {"Filters": [{"Name": "state", "Values": ["open"]}], "MaxResults": 1000}

    def read_type(request: Mapping[str, Any]) -> str:
        return str(request.get("LaunchSpecification", {}).get("InstanceType", ""))

    requests = aws.items("ec2", region, "DescribeSpotInstanceRequests", "SpotInstanceRequests", read_type, **params)
    yield from filter(None, requests)
