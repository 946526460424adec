"""The words for what the test of a connection found: what it is, how it is, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dstackweb.backends.aws import policy, wording
from dstackweb.backends.aws.check import Finding, State
from dstackweb.backends.aws.regions import NAMES


@dataclass(frozen=True)
class Line:
    """One line of the checklist: `told` is what was found, `todo` what helps, one sentence or two each."""

    title: str
    state: str
    mark: str
    told: str
    todo: str = ""


@dataclass(frozen=True)
class Part:
    """The lines of a region, or those of all at the head."""

    title: str
    lines: tuple[Line, ...]
    state: str


@dataclass(frozen=True)
class Report:
    """The checklist as it is shown; `missing` is a policy with what was denied, empty where nothing was."""

    state: str
    summary: str
    parts: tuple[Part, ...]
    missing: str
    everything: str


def report(findings: Sequence[Finding]) -> Report:
    """All of it."""
    by_region: dict[str, list[Finding]] = {}
    for one in findings:
        by_region.setdefault(one.region, []).append(one)
    parts = tuple(
        Part(_place(region), tuple(line(one) for one in ones), _worst(ones)) for region, ones in by_region.items()
    )
    denied = sorted({str(e["action"]) for one in findings for e in one.errors if e.get("code") == "access_denied"})
    everything = policy.document((*policy.READING, *policy.STARTING))
    state = _worst(findings)
    return Report(state, _summary(state, findings), parts, policy.document(denied) if denied else "", everything)


def line(finding: Finding) -> Line:
    """One finding in words."""
    marks = {
        State.OK: _("OK"), State.WARNING: _("Worth a look"), State.FAILED: _("Failed"), State.SKIPPED: _("Not asked"),
    }  # fmt: skip
    told, todo = _told(finding)
    return Line(_title(finding.step), finding.state.value, marks[finding.state], told, todo)


def _worst(findings: Sequence[Finding]) -> str:
    order = [State.OK, State.SKIPPED, State.WARNING, State.FAILED]
    return max((one.state for one in findings), key=order.index).value


def _summary(state: str, findings: Sequence[Finding]) -> str:
    count = sum(one.state is State.FAILED for one in findings)
    if count:
        return ngettext("%d thing to put right.", "%d things to put right.", count) % count
    if state == State.WARNING:
        return _("It works. Some lines are worth a look.")
    return _("Everything works.")


def _place(region: str) -> str:
    if not region:
        return _("Account and server")
    return f"{region} · {NAMES[region]}" if region in NAMES else region


def _title(step: str) -> str:
    return {
        "identity": _("Identity"),
        "public_url": _("This server from outside"),
        "enabled": _("Region enabled"),
        "instance_types": _("Instance types"),
        "prices": _("Prices"),
        "spot_prices": _("Spot prices"),
        "quotas": _("Quotas"),
        "usage": _("What is in use"),
        "subnets": _("Subnets"),
        "image": _("Image to start from"),
        "launch": _("Starting instances"),
        "end": _("Ending instances"),
    }[step]


def _told(finding: Finding) -> tuple[str, str]:
    """What was found, and what to do."""
    if finding.errors:
        told = " ".join(dict.fromkeys(wording.failure(error) for error in finding.errors))
        if finding.step == "enabled":
            return _("Whether it is enabled is not known."), told
        if finding.step == "end" and finding.state is State.WARNING and finding.errors[0]["code"] == "access_denied":
            return told, _(
                "If the policy allows ec2:TerminateInstances for instances with the tag dstackweb:deployment, all is "
                "well: this was tried on an instance that isn't there. Otherwise instances could not be ended."
            )
        return told, ""
    if finding.detail.get("code") == "no_image":
        return _("Not tried, for want of an image."), ""
    if finding.state is State.SKIPPED:
        return _("Not asked, since AWS could not be signed in to."), ""
    if finding.detail.get("code") == "no_answer":
        return _("It has not answered in time."), _("Test again. If it stays so, look at the network from this server.")
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
            told = _("A trial start of %(instance_type)s, on demand and spot, would have gone well; none was started.")
            return told % finding.detail, ""
        case "end":
            return _("A trial would have gone well; nothing was ended."), ""
    return _("May be read."), ""


def _image(detail: Mapping[str, Any]) -> tuple[str, str]:
    if detail.get("code") == "ami":
        told = _("This account has no image %(text)s there.") % detail
        return told, _("Set the ID of one under AMI, a line for each region, or leave it empty for AWS's own.")
    return ", ".join(f"{image['name'] or '–'} ({image['id']})" for image in detail["images"]), ""


def _enabled(detail: Mapping[str, Any]) -> tuple[str, str]:
    match detail.get("code"):
        case "unknown_region":
            return _("AWS knows no such region."), _("Take it out, or correct its name.")
        case "not_enabled":
            told = _("The account has not enabled it.")
            return told, _("Enable it in the AWS console under Account, AWS Regions, or take it out.")
    return _("Yes."), ""


def _quotas(detail: Mapping[str, Any]) -> tuple[str, str]:
    names = {"standard": _("without GPU"), "g": "G, VT", "p": "P"}
    shown = [
        _("%(name)s %(on_demand)d, spot %(spot)d") % {"name": name_shown, **detail[name]}
        for name, name_shown in names.items()
    ]
    told = _("vCPUs: %s.") % "; ".join(shown)
    if detail.get("code") != "no_gpus":
        return told, ""
    return told, _(
        "No GPU may run here yet: in the AWS console under Service Quotas, Amazon EC2, ask for more "
        "“Running On-Demand G and VT instances” or “P instances”. New accounts have none, and AWS takes hours to days."
    )


def _reached(detail: Mapping[str, Any]) -> tuple[str, str]:
    docs = _("docs/aws.md shows a tunnel for a server without a public address.")
    match detail["code"]:
        case "ok":
            return _("%(url)s answers.") % detail, ""
        case "missing":
            told = _("DSTACKWEB_PUBLIC_URL is not set, so instances don't know where to call.")
            return told, _("Set it to the https:// address of this server, and start it again.") + f" {docs}"
        case "not_https":
            told = _("DSTACKWEB_PUBLIC_URL is %(url)s, which is not encrypted.") % detail
            return told, _("Set it to an https:// address.") + f" {docs}"
        case "private":
            told = _("DSTACKWEB_PUBLIC_URL is %(url)s, which only this machine or its network reaches.") % detail
            return told, _("Set a public one, or allow it under Special cases where a VPN leads here.") + f" {docs}"
        case "no_such_name":
            told = _("%(host)s has no address: %(text)s.") % detail
            return told, _("Check DSTACKWEB_PUBLIC_URL and the DNS record of its name.")
        case "certificate":
            told = _("The certificate of %(url)s is not good: %(text)s.") % detail
            return told, _("Give the server one that is signed for this name, such as Let's Encrypt's.")
        case "redirect":
            told = _("%(url)s leads elsewhere: %(to)s.") % detail
            return told, _(
                "Set DSTACKWEB_PUBLIC_URL to where it leads, or let /healthz and /api/ pass without sign-in."
            )
        case "other_server":
            told = _("Something else than dstackweb answers at %(url)s.") % detail
            return told, _("Have its proxy lead to this server, and let /healthz and /api/ pass without sign-in.")
        case "api_blocked":
            told = _("%(url)s answers, but instances could not fetch the runner from /api/ there.") % detail
            return told, _("Have what stands before the server let /api/ pass without sign-in of its own.")
        case "resolves_private":
            told = _("%(url)s answers; from here %(host)s is %(address)s, which is private.") % detail
            return told, _("From outside it must be another address: try it from another network.")
    told = _("%(url)s did not answer from here: %(text)s.") % detail
    return told, _("Some networks don't let a server call its own public address: try it from another network.")
