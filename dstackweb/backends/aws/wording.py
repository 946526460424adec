"""Words for AWS: why a source could not be read, and what limits an offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _

from dstackweb.backends import wording as generic
from dstackweb.backends.kinds import QuotaFamily

_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"

QUOTA_NAMES: Mapping[str, str] = {
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
"""Quotas by code, as AWS calls them in its console, where people ask for more; in English as there."""


def failure(error: Mapping[str, Any]) -> str:
    """Why a source could not be read (`SourceReading.error`), and what to do."""
    code = str(error.get("code", ""))
    numbers = {"region": "", "api": "", "text": "", "endpoint": "", "action": "", **error}
    match code:
        case "access_denied":
            if error.get("who"):
                text = _("Access denied in %(region)s: the policy of %(who)s lacks %(action)s.") % numbers
            else:
                text = _("Access denied in %(region)s: the policy lacks %(action)s.") % numbers
            return f"{text} " + _("Allow it in IAM.")
        case "bad_credentials":
            return _bad_credentials(numbers)
        case "no_credentials":
            return _(
                "No AWS credentials found. Set them for the backend, or give the server boto3's variables, a profile "
                "or an instance role."
            )
        case "region_disabled":
            if error.get("sure", True):
                text = _("Region %(region)s is not enabled in this account.") % numbers
            else:  # AWS answers the same to wrong keys
                text = _("Region %(region)s seems not enabled: AWS rejects the credentials there.") % numbers
            return text + " " + _("Enable it, or remove it from the backend.")
    return generic.source_failure(error)


def _bad_credentials(numbers: Mapping[str, Any]) -> str:
    match numbers.get("why"):
        case "expired":
            return _("The AWS credentials have expired. Sign in again, or set new ones.")
        case "clock":
            return _("AWS rejects requests because this server's clock is wrong. Set the clock.")
        case "config":
            return _("The AWS credentials cannot be read: %(text)s") % numbers
    return _("AWS rejected the credentials: %(text)s Set an active access key and its secret.") % numbers


def availability(detail: Mapping[str, Any]) -> str:
    """What limits an offer, with its numbers (`Offer.detail`)."""
    match detail.get("code"):
        case "quota_unknown":
            if detail.get("why") == "not_documented":
                return _("Quota unknown: AWS does not document the quota of this family.")
            if detail.get("why") == "not_listed":
                return _("Quota unknown: not listed by Service Quotas.")
        case "subnets_unknown":
            return _("Zones of the configured subnets unknown.")
        case "not_in_zone":
            return _("Available in %(offered)s, but the configured subnets are in %(zones)s.") % {
                "offered": ", ".join(detail["offered_in"]),
                "zones": ", ".join(detail["zones"]) or "–",
            }
        case "image_not_supported":
            return _("Cloud instances do not run container images yet.")
        case "no_driver":
            text = _("No public AWS image has a driver for the GPUs of %(family)s. Set `ami` to one that has.")
            return text % detail
        case "public_url":
            return {
                "missing": _("Set DSTACKWEB_PUBLIC_URL so that instances can reach this server."),
                "not_https": _("DSTACKWEB_PUBLIC_URL must be an https:// URL."),
                "private": _(
                    "DSTACKWEB_PUBLIC_URL is private. Set a public one, so that instances can reach this server."
                ),
            }.get(str(detail.get("why")), str(detail.get("why")))
    return generic.offer_detail(detail)


def quota_families() -> list[QuotaFamily]:
    """Families with quotas of their own, and the quotas' codes. P5 has one of its own as spot only."""
    return [
        QuotaFamily(_("P: large GPUs (P4, P5, P6)"), "L-417A185B", "L-7212CCBC"),
        QuotaFamily(_("P5 and P5e as spot"), "", "L-C4BD4855"),
        QuotaFamily(_("G and VT: GPUs for graphics and inference"), "L-DB2E81BA", "L-3819A6DF"),
        QuotaFamily(_("Standard: A, C, D, H, I, M, R, T, Z"), "L-1216C47A", "L-34B43A08"),
        QuotaFamily(_("X: high memory"), "L-7295265B", "L-E3A00192"),
        QuotaFamily(_("Trn"), "L-2C3B7624", "L-6B0D517C"),
        QuotaFamily(_("Inf"), "L-1945791B", "L-B5D1601B"),
        QuotaFamily(_("DL"), "L-6E869C2A", "L-85EED4F7"),
        QuotaFamily(_("F"), "L-74FC7D96", "L-88CF9481"),
        QuotaFamily(_("High memory (U)"), "L-43DA4232", ""),
        QuotaFamily(_("HPC"), "L-F7808C92", ""),
    ]
