"""Words for the connection test: what was checked, the result, and what to do."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.utils.translation import gettext as _, ngettext

from dstackweb.backends.aws.check import Finding, FindingState
from dstackweb.backends.aws.config import region_names
from dstackweb.backends.aws.kind import AwsKind
from dstackweb.backends.contract import SourceFailure
from dstackweb.backends.kinds import ConnectionReport, ReportLine, ReportPart, Snippet

READING = (
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribeRegions",
    "ec2:DescribeSpotInstanceRequests",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "pricing:GetProducts",
    "servicequotas:ListServiceQuotas",
)
STARTING = (
    "ec2:CreateTags",
    "ec2:DescribeImages",
    "ec2:RunInstances",
    "ec2:TerminateInstances",
    "iam:CreateServiceLinkedRole",
    "ssm:GetParameter",
)
"""`iam:CreateServiceLinkedRole`: AWS creates a role for the account's first spot instance."""

_LIMITED: Mapping[str, Mapping[str, Any]] = {
    "iam:CreateServiceLinkedRole": {
        "Resource": "arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/*",
        "Condition": {"StringEquals": {"iam:AWSServiceName": "spot.amazonaws.com"}},
    },
    "iam:PassRole": {
        "Resource": "arn:aws:iam::*:role/THE-PROFILES-ROLE",
        "Condition": {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
    },
}
"""Passing or creating any role grants that role's rights, so each is limited to one."""


def policy_document(actions: Collection[str]) -> str:
    """A policy that allows the actions, as JSON to paste into IAM."""
    plain = sorted(set(actions) - set(_LIMITED))
    statements: list[Mapping[str, Any]] = [{"Effect": "Allow", "Action": plain, "Resource": "*"}] if plain else []
    statements += [
        {"Effect": "Allow", "Action": action, **limits} for action, limits in _LIMITED.items() if action in actions
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)


def report(findings: Sequence[Finding]) -> ConnectionReport:
    """All findings by region, with the IAM policy that is missing and the whole one."""
    by_region: dict[str, list[Finding]] = {}
    for one in findings:
        by_region.setdefault(one.region, []).append(one)
    parts = tuple(
        ReportPart(_place(region), tuple(line(one) for one in ones), _worst(ones)) for region, ones in by_region.items()
    )
    denied = sorted(
        {str(e["action"]) for one in findings for e in one.errors if e.get("code") == SourceFailure.ACCESS_DENIED}
    )
    everything = policy_document((*READING, *STARTING))
    state = _worst(findings)
    missing = Snippet(
        _("Missing permissions"), policy_document(denied), _("Add this policy to the user or role in IAM:"), open=True
    )
    whole = Snippet(_("Full IAM policy for dstackweb"), everything)
    return ConnectionReport(state, _summary(state, findings), parts, (missing, whole) if denied else (whole,))


def line(finding: Finding) -> ReportLine:
    found, fix = _result(finding)
    return ReportLine(_title(finding.step), finding.state.value, str(finding.state.label), found, fix)


def _worst(findings: Sequence[Finding]) -> str:
    order = [FindingState.OK, FindingState.SKIPPED, FindingState.WARNING, FindingState.FAILED]
    return max((one.state for one in findings), key=order.index).value


def _summary(state: str, findings: Sequence[Finding]) -> str:
    count = sum(one.state is FindingState.FAILED for one in findings)
    if count:
        return ngettext("%d problem to fix.", "%d problems to fix.", count) % count
    if state == FindingState.WARNING:
        return _("It works, with warnings.")
    return _("Everything works.")


def _place(region: str) -> str:
    if not region:
        return _("Account and server")
    name = region_names().get(region)
    return f"{region} · {name}" if name else region


def _title(step: str) -> str:
    return {
        "identity": _("Identity"),
        "public_url": _("Server reachable from outside"),
        "enabled": _("Region enabled"),
        "instance_types": _("Instance types"),
        "prices": _("Prices"),
        "spot_prices": _("Spot prices"),
        "quotas": _("Quotas"),
        "usage": _("Usage"),
        "subnets": _("Subnets"),
        "image": _("Machine image"),
        "launch": _("Starting instances"),
        "end": _("Ending instances"),
    }[step]


def _result(finding: Finding) -> tuple[str, str]:
    if finding.errors:
        found = " ".join(dict.fromkeys(AwsKind().source_failure(error) for error in finding.errors))
        if finding.step == "enabled":
            return _("Unknown: AWS could not be reached."), found
        if (
            finding.step == "end"
            and finding.state is FindingState.WARNING
            and finding.errors[0]["code"] == SourceFailure.ACCESS_DENIED
        ):
            return found, _(
                "The test used an instance that does not exist. If the policy allows ec2:TerminateInstances only for "
                "instances tagged dstackweb:deployment, this is fine. Otherwise instances could not be terminated."
            )
        return found, ""
    if finding.detail.get("code") == "no_image":
        return _("Skipped: no machine image."), ""
    if finding.state is FindingState.SKIPPED:
        return _("Skipped: sign-in failed."), ""
    if finding.detail.get("code") == "no_answer":
        return _("No answer in time."), _("Test again. If it persists, check this server's network.")
    match finding.step:
        case "identity":
            return _("Signed in to account %(account)s as %(arn)s.") % finding.detail, ""
        case "public_url":
            return _reached(finding.detail)
        case "enabled":
            return _enabled(finding.detail)
        case "quotas":
            return _quotas(finding.detail)
        case "subnets":
            return _("In %s.") % ", ".join(finding.detail["zones"]), ""
        case "image":
            return _image(finding.detail)
        case "launch":
            found = _("A dry run of %(instance_type)s, on demand and spot, succeeded. Nothing was started.")
            return found % finding.detail, ""
        case "end":
            return _("A dry run succeeded. Nothing was terminated."), ""
    return _("Readable."), ""


def _image(detail: Mapping[str, Any]) -> tuple[str, str]:
    if detail.get("code") == "ami":
        found = _("This account has no image %(text)s in this region.") % detail
        return found, _("Set an image ID under AMI, one line per region, or leave it empty to use AWS's images.")
    return ", ".join(f"{image['name'] or '–'} ({image['id']})" for image in detail["images"]), ""


def _enabled(detail: Mapping[str, Any]) -> tuple[str, str]:
    match detail.get("code"):
        case "unknown_region":
            return _("AWS has no such region."), _("Remove it or correct its name.")
        case "not_enabled":
            found = _("The account has not enabled it.")
            return found, _("Enable it in the AWS console under Account, AWS Regions, or remove it.")
    return _("Yes."), ""


def _quotas(detail: Mapping[str, Any]) -> tuple[str, str]:
    names = {"standard": _("without GPU"), "g": "G, VT", "p": "P"}
    shown = [
        _("%(name)s %(on_demand)d, spot %(spot)d") % {"name": name_shown, **detail[name]}
        for name, name_shown in names.items()
    ]
    found = _("vCPUs: %s.") % "; ".join(shown)
    if detail.get("code") != "no_gpus":
        return found, ""
    return found, _(
        "The GPU quotas are 0, as in every new account. Request “Running On-Demand G and VT instances” or "
        "“P instances” in the AWS console under Service Quotas, Amazon EC2. Approval takes hours to days."
    )


def _reached(detail: Mapping[str, Any]) -> tuple[str, str]:
    docs = _("docs/aws.md shows how to tunnel to a server without a public address.")
    match detail["code"]:
        case "ok":
            return _("%(url)s answers.") % detail, ""
        case "missing":
            found = _("DSTACKWEB_PUBLIC_URL is not set, so instances cannot reach this server.")
            return found, _("Set it to this server's https:// address and restart.") + f" {docs}"
        case "not_https":
            found = _("DSTACKWEB_PUBLIC_URL is %(url)s, which is not encrypted.") % detail
            return found, _("Set it to an https:// address.") + f" {docs}"
        case "private":
            found = _("DSTACKWEB_PUBLIC_URL is %(url)s, reachable only from this network.") % detail
            return found, _(
                "Set a public address, or allow a private one under Special cases if a VPN connects the networks."
            ) + f" {docs}"
        case "no_such_name":
            found = _("%(host)s has no address: %(text)s.") % detail
            return found, _("Check DSTACKWEB_PUBLIC_URL and the DNS record of its name.")
        case "certificate":
            found = _("The certificate of %(url)s is invalid: %(text)s.") % detail
            return found, _("Install a certificate for this name, for example from Let's Encrypt.")
        case "redirect":
            found = _("%(url)s redirects to %(to)s.") % detail
            return found, _(
                "Set DSTACKWEB_PUBLIC_URL to the target, or let /healthz and /api/ pass the proxy without sign-in."
            )
        case "other_server":
            found = _("Another server answers at %(url)s.") % detail
            return found, _("Point its proxy to this server, and let /healthz and /api/ pass without sign-in.")
        case "api_blocked":
            found = _("%(url)s answers, but instances could not download the runner from /api/.") % detail
            return found, _("Let /api/ pass the proxy without sign-in.")
        case "resolves_private":
            found = _("%(url)s answers, but here %(host)s resolves to the private address %(address)s.") % detail
            return found, _("It must resolve to a public address outside. Test it from another network.")
    found = _("%(url)s did not answer from here: %(text)s.") % detail
    return found, _("Some networks block calls to their own public address. Test it from another network.")
