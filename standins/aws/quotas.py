"""Service Quotas: the vCPU limits of EC2 under their real codes and names, among 200 other quotas."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import Any

from standins.aws import catalog
from standins.aws.catalog import ACCOUNT
from standins.aws.wire import AwsError, Call, page

ON_DEMAND = {
    "Standard": ("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", 256),
    "G": ("L-DB2E81BA", "Running On-Demand G and VT instances", 64),
    "P": ("L-417A185B", "Running On-Demand P instances", 192),
    "Inf": ("L-1945791B", "Running On-Demand Inf instances", 64),
    "Trn": ("L-2C3B7624", "Running On-Demand Trn instances", 8),
    "DL": ("L-6E869C2A", "Running On-Demand DL instances", 0),
    "F": ("L-74FC7D96", "Running On-Demand F instances", 0),
    "X": ("L-7295265B", "Running On-Demand X instances", 0),
    "HighMem": ("L-43DA4232", "Running On-Demand High Memory instances", 0),
    "HPC": ("L-F7808C92", "Running On-Demand HPC instances", 0),
}
SPOT = {
    "Standard": ("L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests", 256),
    "G": ("L-3819A6DF", "All G and VT Spot Instance Requests", 64),
    "P": ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests", 96),
    "P5": ("L-C4BD4855", "All P5 Spot Instance Requests", 192),
    "Inf": ("L-B5D1601B", "All Inf Spot Instance Requests", 64),
    "Trn": ("L-6B0D517C", "All Trn Spot Instance Requests", 8),
    "DL": ("L-85EED4F7", "All DL Spot Instance Requests", 0),
    "F": ("L-88CF9481", "All F Spot Instance Requests", 0),
    "X": ("L-E3A00192", "All X Spot Instance Requests", 0),
}


def code_of(instance_type: str, *, spot: bool) -> str | None:
    """The quota that an instance of this type counts against; None where none is known."""
    family = instance_type.split(".")[0]
    for prefix, group in (
        (r"hpc", "HPC"), (r"u\d*[in-]", "HighMem"), (r"inf", "Inf"), (r"trn", "Trn"), (r"dl", "DL"), (r"vt|g", "G"),
        (r"p[5-9]", "P5" if spot else "P"), (r"p", "P"), (r"f", "F"), (r"x", "X"), (r"mac", ""),
        (r"[acdhimrtz]", "Standard"),
    ):  # fmt: skip
        if re.match(prefix, family):
            return (SPOT if spot else ON_DEMAND).get(group, (None,))[0]
    return None


@cache
def _table() -> dict[str, tuple[str, float, str]]:
    """Code: (name, usual value, class of the usage metric)."""
    table = {code: (name, float(v), f"{group}/OnDemand") for group, (code, name, v) in ON_DEMAND.items()}
    table |= {code: (name, float(v), f"{group}/Spot") for group, (code, name, v) in SPOT.items()}
    families = sorted({name.split(".")[0] for name in catalog.ALL})
    others = [f"Running Dedicated {family} Hosts" for family in families]
    others += ["EC2-VPC Elastic IPs", "Key pairs", "AMIs", "AMI sharing", "Public AMIs", "Launch templates"]
    for name in others:
        code = f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}"
        table[code] = (name, 2.0 if "Dedicated" in name else 5000.0, "")
    return dict(sorted(table.items()))


class Quotas:
    """The limits of one account; `values` override the usual ones."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}

    def value(self, code: str, region: str) -> float:
        usual = _table()[code][1] if code in _table() else 0.0
        return self.values.get((region, code), self.values.get(("*", code), usual))

    def answer(self, call: Call) -> dict[str, Any]:
        """ListServiceQuotas or GetServiceQuota."""
        if call.data.get("ServiceCode") != "ec2":
            raise AwsError(
                "NoSuchResourceException", "The request failed because the specified service does not exist."
            )
        if call.action == "ListServiceQuotas":
            codes, more = page(_table(), call)
            return {"Quotas": [self._quota(code, call.region) for code in codes], **more}
        code = call.data.get("QuotaCode", "")
        if code not in _table():
            raise AwsError("NoSuchResourceException", "The request failed because the specified quota does not exist.")
        return {"Quota": self._quota(code, call.region)}

    def _quota(self, code: str, region: str) -> dict[str, Any]:
        name, _, usage = _table()[code]
        quota: dict[str, Any] = {
            "ServiceCode": "ec2",
            "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
            "QuotaArn": f"arn:aws:servicequotas:{region}:{ACCOUNT}:ec2/{code}",
            "QuotaCode": code,
            "QuotaName": name,
            "Value": self.value(code, region),
            "Unit": "None",
            "Adjustable": True,
            "GlobalQuota": False,
            "QuotaAppliedAtLevel": "ACCOUNT",
        }
        if usage:
            quota["UsageMetric"] = {
                "MetricNamespace": "AWS/Usage",
                "MetricName": "ResourceCount",
                "MetricDimensions": {"Class": usage, "Resource": "vCPU", "Service": "EC2", "Type": "Resource"},
                "MetricStatisticRecommendation": "Maximum",
            }
        return quota
