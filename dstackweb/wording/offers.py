"""Offers: how available they are and why, what they have, and why a backend's offers cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from dstackweb.backends import registry
from dstackweb.backends.contract import Availability, Offer, PlaceCode
from dstackweb.offers.refusals import PASSING
from dstackweb.runs.codes import Shortfall
from dstackweb.spec.effective import Requirements
from dstackweb.wording.places import launch_failure, tried
from dstackweb.wording.sentence import Label, as_text, words
from dstackweb.wording.units import cpus, duration, mebibytes

OF_HOSTS = frozenset({"idle", "busy", "too_small", "offline", "draining", "held_back", "no_isolation"})


def why(offer: Offer, needs: Requirements) -> str:
    """Why an offer is or isn't available for these needs, with its numbers (`Offer.detail`)."""
    return detail_text(offer.kind, offer.detail, needs)


def detail_text(kind: str, detail: Mapping[str, Any], needs: Requirements) -> str:
    """As `why`, of an offer's detail alone."""
    code = detail.get("code")
    if code in OF_HOSTS:
        return _of_host(detail, needs)
    if code == "idle_instance":
        return _("Kept from an earlier run of the project")
    if code == "refused":
        return refused(detail)
    if code == "tried_now":
        return _("Refused before; another run tries it now")
    text = registry.KINDS[kind].offer_detail(detail) if kind in registry.KINDS else ""
    quota = detail_text(kind, detail["quota"], needs) if "quota" in detail else ""
    return f"{text or as_text(str(code or ''))} {quota}".rstrip()


def refused(detail: Mapping[str, Any]) -> str:
    """Say when and why the cloud refused an offer, with the cloud's text where the settings may be to blame."""
    age_s = max(0, round(timezone.now().timestamp() - float(detail["at"])))
    numbers = {"ago": duration(age_s), "why": launch_failure(detail["why"]), "text": detail.get("text", "")}
    if detail["why"] in PASSING or not numbers["text"]:
        return _("Refused %(ago)s ago: %(why)s") % numbers
    return _("Refused %(ago)s ago: %(why)s: %(text)s") % numbers


def _of_host(detail: Mapping[str, Any], needs: Requirements) -> str:
    if detail["code"] != "idle":
        wanted = {"gpus": needs.gpu_count_min, "cpus": needs.cpu_min, "memory_mib": needs.memory_min_mib}
        label = tried(PlaceCode(detail["code"]), cast(Shortfall, {**wanted, **detail}))
        return label.text or label.label
    if detail.get("gpus_free"):
        return _("%(free)d of %(total)d GPUs free") % {"free": detail["gpus_free"], "total": detail["gpus_total"]}
    free = int(detail["cpus_free"])
    return ngettext("%d CPU free", "%d CPUs free", free) % free


def failure(kind: str, error: Mapping[str, Any]) -> str:
    """Why a source, or a whole backend, of this kind could not be read, and what to do."""
    match error.get("code"):
        case "not_served":
            if why := registry.BROKEN.get(kind):
                text = _("The package of backend kind %(kind)s cannot be loaded: %(why)s")
                return text % {"kind": kind, "why": why}
            return _("No installed package serves backend kind %s. Install it, or delete the backend.") % kind
        case "failed":
            return _("Its offers cannot be read: %s") % str(error.get("text", ""))
    text = registry.KINDS[kind].source_failure(error) if kind in registry.KINDS else ""
    return text or str(error.get("text") or "") or as_text(str(error.get("code", "")))


def engine_wait(kind: str, code: str) -> str:
    """What a backend of this kind waits for before it starts an instance."""
    text = registry.KINDS[kind].wait_reason(code) if kind in registry.KINDS else ""
    return text or _("Its backend has accepted it, and has not started it yet: %s") % as_text(code)


def has(offer: Offer) -> str:
    """All that the place of an offer has: `4 × A100-SXM4-80GB · 64 CPUs · 512 GB`."""
    gpu = f"{offer.gpu_count} × {offer.gpu_name.removeprefix('NVIDIA ')}" if offer.gpu_count else ""
    return " · ".join(filter(None, (gpu, cpus(offer.cpus), mebibytes(offer.memory_mib))))


_availability = words(
    {
        Availability.AVAILABLE: gettext_lazy("available"),
        Availability.IDLE: gettext_lazy("idle"),
        Availability.BUSY: gettext_lazy("busy"),
        Availability.NO_QUOTA: gettext_lazy("no quota"),
        Availability.NOT_AVAILABLE: gettext_lazy("not available"),
        Availability.UNKNOWN: gettext_lazy("unknown"),
    }
)
_TONES: dict[str, str] = {
    Availability.AVAILABLE: "go",
    Availability.IDLE: "go",
    Availability.NO_QUOTA: "bad",
    Availability.NOT_AVAILABLE: "bad",
}


def availability(code: str) -> Label:
    """An offer's availability as a badge."""
    return Label(_availability(code), "", _TONES.get(code, "wait"))
