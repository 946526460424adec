"""The words for offers of any backend: why one is or isn't to be had, and why a backend could not be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _

from dstackweb.backends.aws import wording as aws_wording
from dstackweb.backends.contract import Offer
from dstackweb.spec.requirements import Requirements
from dstackweb.wording import waiting
from dstackweb.wording.statuses import Label
from dstackweb.wording.units import cpus, mebibytes

OF_HOSTS = frozenset({"idle", "busy", "too_small", "offline", "draining", "no_isolation"})


def why(detail: Mapping[str, Any], needs: Requirements) -> str:
    """How likely an offer is to be had for these needs, with its numbers (`Offer.detail`)."""
    if detail.get("code") in OF_HOSTS:
        wants = {"gpus": needs.gpu_count_min, "cpus": needs.cpu_min, "memory_mib": needs.memory_min_mib}
        return waiting.offer_detail({**wants, **detail})
    if detail.get("code") == "idle_instance":
        return str(_("Kept from an earlier run of the project"))
    return aws_wording.availability(detail)


def failure(error: Mapping[str, Any]) -> str:
    """Why something could not be asked, and what to do."""
    match error.get("code"):
        case "not_served":
            return str(_("Nothing here serves backends of the kind %s.") % error.get("kind", ""))
        case "failed":
            return str(_("Its offers can't be read: %s") % error.get("text", ""))
    return aws_wording.failure(error)


def has(offer: Offer) -> str:
    """All that the place of an offer has: `4 × A100-SXM4-80GB · 64 CPUs · 512 GB`."""
    gpu = f"{offer.gpu_count} × {offer.gpu_name.removeprefix('NVIDIA ')}" if offer.gpu_count else ""
    return " · ".join(filter(None, (gpu, cpus(offer.cpus), mebibytes(offer.memory_mib))))


def availability(code: str) -> Label:
    """An offer's availability as a badge."""
    tones = {"available": "go", "idle": "go", "no_quota": "bad", "not_available": "bad"}
    return Label(code.replace("_", " "), "", tones.get(code, "wait"))
