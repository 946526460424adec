"""Words for the codes that all kinds of backends share (backends/contract.py). A kind words its own codes first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import ngettext


def source_failure(error: Mapping[str, Any]) -> str:
    """Why a source could not be read, and what to do; empty for codes that are not shared."""
    data = {"region": "", "api": "", "text": "", "endpoint": "", "action": "", **error}
    match error.get("code"):
        case "access_denied":
            return _("Access denied in %(region)s: %(action)s is not allowed.") % data
        case "throttled":
            return _throttled(data)
        case "unreachable":
            what = _("%(endpoint)s is unreachable") % data
            hint = _("Check the region name, the endpoint URL and the network.")
            return f"{what}: {str(data['text']).rstrip('. ')}. {hint}"
        case "service_error":
            return _("%(api)s failed in %(region)s: %(text)s") % data
        case "not_asked":
            return _("Not read yet.")
    return ""


def offer_detail(detail: Mapping[str, Any]) -> str:
    """What limits an offer, with its numbers; empty for codes that are not shared."""
    match detail.get("code"):
        case "quota":
            fits = int(detail["fits"])
            return ngettext("Fits %d more", "Fits %d more", fits) % fits + ": " + _vcpus(detail)
        case "no_quota":
            return _("No quota: ") + _vcpus(detail)
        case "quota_unknown":
            why = str(detail.get("why", ""))
            reasons = {
                "access_denied": _("access denied"),
                "not_asked": _("not read yet"),
                "throttled": _("throttled"),
            }
            return _("Quota unknown: %s.") % reasons.get(why, why)
    return ""


def _vcpus(detail: Mapping[str, Any]) -> str:
    return _("%(used)d of %(limit)d vCPUs in use, %(needs)d needed.") % detail


def _throttled(data: Mapping[str, Any]) -> str:
    if data.get("by") == "limiter":
        text = _("Rate limit of %(api)s in %(region)s reached; this call is waiting.") % data
    else:
        text = _("%(api)s is throttled in %(region)s.") % data
    until = parse_datetime(str(data.get("until", "")))
    return f"{text} " + _("Retry at %s UTC.") % f"{until:%H:%M:%S}" if until else text
