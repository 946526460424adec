"""Why a host or an offer that a decision tried takes a run or not, and what a host lacks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any, assert_never, cast

from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.backends.contract import LaunchFailure, PlaceCode
from dstackweb.runs.codes import Shortfall
from dstackweb.wording.hosts import isolation
from dstackweb.wording.sentence import Label, as_text, clauses, fill, joined, known, listing, words
from dstackweb.wording.units import cpus, gpus, mebibytes

LAUNCH_FAILURES = {
    LaunchFailure.NO_CAPACITY: gettext_lazy("the cloud has no capacity now"),
    LaunchFailure.NO_ROOM: gettext_lazy("the cluster is full"),
    LaunchFailure.QUOTA: gettext_lazy("the account's quota is used up"),
    LaunchFailure.SPOT_PRICE: gettext_lazy("the spot price is above the price offered"),
    LaunchFailure.NOT_ALLOWED: gettext_lazy("the backend's credentials lack a permission"),
    LaunchFailure.AMI: gettext_lazy("no image can be used for it"),
    LaunchFailure.NETWORK: gettext_lazy("its network cannot be used"),
    LaunchFailure.REFUSED: gettext_lazy("the cloud refused"),
}
launch_failure = words(LAUNCH_FAILURES)
"""The clause that says why a cloud refused to launch an instance."""


def tried(code: str, data: Mapping[str, Any]) -> Label:
    """Whether a place that a decision tried takes the run, or why not."""
    found = known(PlaceCode, code)
    return Label(as_text(code), "") if found is None else _tried(found, data)


def _tried(code: PlaceCode, data: Mapping[str, Any]) -> Label:
    short = cast(Shortfall, data)
    match code:
        case PlaceCode.FITS:
            several = data.get("of", 1) > 1
            return Label(_("fits"), _("room for %(nodes)d of %(of)d nodes") % data if several else "", "go")
        case PlaceCode.RESERVED:
            return Label(_("reserved"), _("its free capacity is reserved for a run that has waited longer"))
        case PlaceCode.BUSY:
            if data.get("code") == "refused":
                return Label(_("refused"), launch_failure(data["why"]))
            lacks = [lack(what, short) for what in data.get("short", ())]
            return Label(_("busy"), joined(_("; "), lacks) + busy_until(short) if lacks else _("not available now"))
        case PlaceCode.TOO_SMALL:
            return Label(_("too small"), clauses(too_small(what, short) for what in data.get("short", ())), "bad")
        case PlaceCode.NO_QUOTA:
            return Label(_("quota"), _("the account's quota is used up"))
        case PlaceCode.NOT_AVAILABLE:
            return Label(_("not available"), _("not offered now"))
        case PlaceCode.OFFLINE:
            return Label(_("offline"), _("the host has sent no heartbeat lately"), "bad")
        case PlaceCode.DRAINING:
            return Label(_("draining"), _("it takes no new jobs"))
        case PlaceCode.HELD_BACK:
            return Label(_("held back"), _("starts fail on it; it gets jobs again once a start works"), "bad")
        case PlaceCode.NO_ISOLATION:
            return Label(_("refuses jobs"), _("it cannot isolate them"), "bad")
        case PlaceCode.TOO_LITTLE_ISOLATION:
            return Label(_("isolation"), _("the project requires: %s") % isolation(data.get("isolation", "")), "bad")
        case PlaceCode.IMAGE_NOT_SUPPORTED:
            return Label(_("no containers"), _("it cannot run the image %s") % data.get("image", ""), "bad")
        case PlaceCode.VOLUME_NOT_LISTED:
            asked = listing(data.get("asked", ()))
            return Label(_("volumes"), _("jobs may not mount there: %s") % asked, "bad")
        case PlaceCode.NO_SUCH_BACKEND:
            return Label(_("not set up"), _("no enabled backend has this name"), "bad")
        case PlaceCode.OTHER_PROJECT:
            return Label(_("other projects"), _("it takes no runs of this project"), "bad")
        case PlaceCode.NOT_SERVED:
            return Label(_("not supported"), _("this server does not support this kind of backend"), "bad")
        case PlaceCode.FAILED:
            return Label(_("failed"), _("its offers cannot be read"), "bad")
        case PlaceCode.PARTLY_READ:
            return Label(_("partly read"), _("some of its offers are not known yet"), "wait")
        case PlaceCode.OTHER_REGION | PlaceCode.OTHER_INSTANCE_TYPE | PlaceCode.HAS_NO_LABELS:
            label = {PlaceCode.OTHER_REGION: _("other region"), PlaceCode.HAS_NO_LABELS: _("labels")}
            named = listing(map(str, data.get("asked", ())))
            return Label(label.get(code, _("not named")), _("the run requires %s") % named if named else "", "info")
        case PlaceCode.IS_SPOT:
            return Label(_("spot"), _("the run's spot_policy is on-demand"), "info")
        case PlaceCode.IS_ON_DEMAND:
            return Label(_("not spot"), _("the run's spot_policy is spot"), "info")
        case PlaceCode.TOO_EXPENSIVE:
            price = data.get("max_price", "")
            return Label(_("too expensive"), _("the run's max_price is $%s per hour") % price, "info")
        case PlaceCode.NOT_NAMED:
            return Label(_("not named"), _("it costs money, and the run does not name its backend"), "info")
        case never:
            assert_never(never)


def lack(what: str, data: Shortfall) -> str:
    numbers: Mapping[str, Any] = data
    amount, plain = AMOUNTS[what]
    counts = {"needs": amount(numbers.get(what, 0)), "total": plain(numbers.get(f"{what}_total", 0))}
    text = _("needs %(needs)s, %(free)s of %(total)s free") % {**counts, "free": plain(numbers.get(f"{what}_free", 0))}
    outside = data.get("gpus_outside") if what == "gpus" else None
    return text + _(" (%d used outside dstackweb)") % outside if outside else text


def too_small(what: str, data: Shortfall) -> str:
    """What one host will never have enough of."""
    numbers: Mapping[str, Any] = data
    amount, plain = AMOUNTS[what]
    total = numbers.get(f"{what}_total", 0)
    has = plain(total) if total or what != "gpus" else _("none")
    return _("needs %(needs)s, has %(has)s") % {"needs": amount(numbers.get(what, 0)), "has": has}


def busy_until(data: Shortfall) -> str:
    """When enough GPUs are free at the latest, as a clause to append; empty if that is not known."""
    if "gpus" not in data.get("short", ()) or not data.get("busy_until"):
        return ""
    at = dt.datetime.fromisoformat(data["busy_until"])
    return fill(_("; %(busy)d busy until %(at)s at most"), busy=data["busy"], at=at)


def _memory(mib: int) -> str:
    return _("%s of memory") % mebibytes(mib)


AMOUNTS: dict[str, tuple[Callable[[int], str], Callable[[int], str]]] = {
    "gpus": (gpus, str),
    "cpus": (cpus, str),
    "memory_mib": (_memory, mebibytes),
}
"""How an amount is written with its noun, and where the noun is clear."""
