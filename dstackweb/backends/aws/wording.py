"""The words for why AWS could not be asked, and for what is known of an offer: what happened, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import ngettext


def failure(error: Mapping[str, Any]) -> str:
    """Why a source could not be asked (`Reading.error`), as a sentence or two."""
    code = str(error.get("code", ""))
    numbers = {"region": "", "api": "", "text": "", "endpoint": "", "action": "", **error}
    match code:
        case "access_denied":
            if error.get("who"):
                told = _("Access denied in %(region)s: the policy of %(who)s lacks %(action)s.") % numbers
            else:
                told = _("Access denied in %(region)s: the policy lacks %(action)s.") % numbers
            return f"{told} " + _("Allow it in IAM.")
        case "bad_credentials":
            return _bad_credentials(numbers)
        case "no_credentials":
            return _(
                "There are no AWS credentials: set them for the backend, or give the server boto3's variables, a "
                "profile or an instance role."
            )
        case "throttled":
            return _throttled(numbers)
        case "unreachable":
            told = _("%(endpoint)s can't be reached") % numbers
            return f"{told}: {_plain(numbers['text'])}. " + _(
                "Check the name of the region, the endpoint URL and the network."
            )
        case "region_disabled":
            if error.get("sure"):
                return _("The account has not enabled the region %(region)s: enable it, or take it out.") % numbers
            return (
                _(
                    "AWS refuses the credentials in %(region)s. Where they work in other regions, the account has not "
                    "enabled this one: enable it, or take it out."
                )
                % numbers
            )
        case "service_error":
            return _("%(api)s failed in %(region)s: %(text)s") % numbers
        case "not_asked":
            return _("It has not been asked yet.")
    return str(error.get("text") or code)


def _throttled(numbers: Mapping[str, Any]) -> str:
    if numbers.get("by") == "limiter":
        told = _("So much is asked of %(api)s in %(region)s just now that the turn for this has not come.") % numbers
    else:
        told = _("AWS said that %(api)s is asked too often in %(region)s.") % numbers
    until = parse_datetime(str(numbers.get("until", "")))
    if until is None:
        return told
    again = _("It is left alone until %(time)s UTC, and asked again by itself.") % {"time": f"{until:%H:%M:%S}"}
    return f"{told} {again}"


def _bad_credentials(numbers: Mapping[str, Any]) -> str:
    match numbers.get("why"):
        case "expired":
            return _("The AWS credentials have expired: sign in again, or set new ones.")
        case "clock":
            return _("AWS refuses requests of this time of day: set this machine's clock.")
        case "config":
            return _("The AWS credentials can't be read: %(text)s") % numbers
    return _("AWS refuses the credentials: %(text)s Set an access key that is active, and its secret.") % numbers


def availability(detail: Mapping[str, Any]) -> str:
    """How likely an offer is to be had, with its numbers (`Offer.detail`)."""
    match detail.get("code"):
        case "quota":
            fits = int(detail["fits"])
            told = ngettext("Fits %d more", "Fits %d more", fits) % fits
            return f"{told}: " + _vcpus(detail)
        case "no_quota":
            return _("No quota: ") + _vcpus(detail)
        case "quota_unknown":
            return _("The quota is unknown: ") + _quota_unknown(str(detail.get("why", "")))
        case "subnets_unknown":
            return _("The zones of the configured subnets are unknown.")
        case "not_in_zone":
            return _("Offered in %(offered)s, while the configured subnets are in %(zones)s.") % {
                "offered": ", ".join(detail["offered_in"]),
                "zones": ", ".join(detail["zones"]) or "–",
            }
        case "image_not_supported":
            return _("Instances run no images yet.")
        case "no_driver":
            told = _("No public image of AWS has a driver for the GPUs of %(family)s: set `ami` to one that has.")
            return told % detail
        case "public_url":
            return {
                "missing": _("Set DSTACKWEB_PUBLIC_URL, so that instances can reach this server."),
                "not_https": _(
                    "DSTACKWEB_PUBLIC_URL must be an https:// URL, so that instances can trust this server."
                ),
                "private": _("Instances can't reach DSTACKWEB_PUBLIC_URL, which is private: set a public one."),
            }.get(str(detail.get("why")), str(detail.get("why")))
    return str(detail.get("code", ""))


def _vcpus(detail: Mapping[str, Any]) -> str:
    return _("%(used)d of %(limit)d vCPUs are in use, and it needs %(needs)d.") % detail


def _quota_unknown(why: str) -> str:
    return {
        "access_denied": _("access denied."),
        "not_asked": _("it has not been asked yet."),
        "not_documented": _("AWS does not say which one this family counts against."),
        "not_listed": _("Service Quotas doesn't list it."),
        "throttled": _("AWS is asked too often."),
    }.get(why, f"{why}.")


def _plain(text: str) -> str:
    return text.rstrip(". ")


def quota_families() -> list[tuple[str, str, str]]:
    """What Service Quotas counts apart: the families, and the codes of their quotas, on demand and as spot.

    Either code may be empty: P5 has a quota of its own as spot only.
    """
    return [
        (_("P: large GPUs (P4, P5, P6)"), "L-417A185B", "L-7212CCBC"),
        (_("P5 and P5e as spot"), "", "L-C4BD4855"),
        (_("G and VT: GPUs for graphics and inference"), "L-DB2E81BA", "L-3819A6DF"),
        (_("Standard: A, C, D, H, I, M, R, T, Z"), "L-1216C47A", "L-34B43A08"),
        (_("X: much memory"), "L-7295265B", "L-E3A00192"),
        (_("Trn"), "L-2C3B7624", "L-6B0D517C"),
        (_("Inf"), "L-1945791B", "L-B5D1601B"),
        (_("DL"), "L-6E869C2A", "L-85EED4F7"),
        (_("F"), "L-74FC7D96", "L-88CF9481"),
        (_("High memory (U)"), "L-43DA4232", ""),
        (_("HPC"), "L-F7808C92", ""),
    ]
