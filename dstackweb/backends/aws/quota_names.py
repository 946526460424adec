"""What AWS calls the quotas that count vCPUs, in English as in its console, where people ask for more of them."""

from __future__ import annotations

from collections.abc import Mapping

_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"

NAMES: Mapping[str, str] = {
    "L-1216C47A": f"Running On-Demand {_STANDARD} instances",
    "L-34B43A08": f"All {_STANDARD} Spot Instance Requests",
    "L-DB2E81BA": "Running On-Demand G and VT instances",
    "L-3819A6DF": "All G and VT Spot Instance Requests",
    "L-417A185B": "Running On-Demand P instances",
    "L-7212CCBC": "All P4, P3 and P2 Spot Instance Requests",
    "L-C4BD4855": "All P5 Spot Instance Requests",
    "L-1945791B": "Running On-Demand Inf instances",
    "L-B5D1601B": "All Inf Spot Instance Requests",
    "L-2C3B7624": "Running On-Demand Trn instances",
    "L-6B0D517C": "All Trn Spot Instance Requests",
    "L-6E869C2A": "Running On-Demand DL instances",
    "L-85EED4F7": "All DL Spot Instance Requests",
    "L-74FC7D96": "Running On-Demand F instances",
    "L-88CF9481": "All F Spot Instance Requests",
    "L-7295265B": "Running On-Demand X instances",
    "L-E3A00192": "All X Spot Instance Requests",
    "L-43DA4232": "Running On-Demand High Memory instances",
    "L-F7808C92": "Running On-Demand HPC instances",
}


def name_of(code: str) -> str:
    """A quota's name; its code where this knows none."""
    return NAMES.get(code, code)
