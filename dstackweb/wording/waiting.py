"""The words of why a run waits, and of what each place that was tried lacks; part of `wording`.

Codes with their numbers come in, sentences in the reader's language go out.
"""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop as _later
from django.utils.translation import ngettext

from dstackweb.wording.statuses import Label
from dstackweb.wording.units import cpus, dollars, gpus, mebibytes, moment


def reason(code: str, data: dict[str, Any]) -> Label:
    """Why a run waits, with its numbers."""
    match code:
        case "starting":
            return Label(_("starting"), _("its turn is being looked at"), "go")
        case "queue_paused":
            return Label(_("paused"), _("the queue is paused; a manager resumes it"), "info")
        case "waiting_for_capacity":
            return Label(_("capacity"), _no_offer_free(data) if data.get("code") == "offers" else _shortfall(data))
        case "impossible":
            return Label(_("impossible"), _impossible(data), "bad")
        case "backend_unavailable":
            return Label(_("unavailable"), _unavailable(data), "bad")
        case "no_quota":
            where = ", ".join(data.get("backends", ()))
            return Label(_("quota"), _("the quota for it is used up at %s") % where, "wait")
        case "budget_limit":
            numbers = {name: dollars(data.get(name, 0)) for name in ("spent", "budget")}
            text = _("the project has spent %(spent)s of its %(budget)s for paid backends this month")
            return Label(_("budget"), text % numbers, "wait")
        case "user_limit" | "queue_limit":
            return Label(_("limit"), _over_limit(data), "bad" if data.get("never") else "wait")
        case "reserved_for_other":
            return Label(_("reserved"), _reserved(data), "wait")
        case "not_waiting":
            return Label(_("not waiting"), _("it isn't in the queue now"), "info")
    return Label(code.replace("_", " "), "")


def _over_limit(data: dict[str, Any]) -> str:
    numbers = {name: data.get(name, 0) for name in ("limit", "used", "asked")}
    if data.get("never"):
        texts = {
            "max_running": _("the queue lets nothing start: its limit of runs is 0"),
            "max_gpus": _("it asks for %(asked)d GPUs, and the queue's limit is %(limit)d: it can never start so"),
            "max_running_per_user": _("the queue lets nobody's runs start: its limit per member is 0"),
            "max_gpus_per_user": _(
                "it asks for %(asked)d GPUs, and a member's limit is %(limit)d: it can never start so"
            ),
        }
    else:
        texts = {
            "max_running": _("%(used)d of the queue's %(limit)d runs are placed"),
            "max_gpus": _("needs %(asked)d GPUs, and the queue's runs hold %(used)d of their %(limit)d"),
            "max_running_per_user": _("%(used)d of the member's %(limit)d runs are placed"),
            "max_gpus_per_user": _("needs %(asked)d GPUs, and the member's runs hold %(used)d of their %(limit)d"),
        }
    return texts.get(data.get("code", ""), _("a limit is reached")) % numbers


def _reserved(data: dict[str, Any]) -> str:
    """For whom, from when, and which `max_duration` would let it start before."""
    other = data.get("run") or _("a run of another project")
    if not data.get("starts_at"):
        until = moment(data["expires_at"]) if data.get("expires_at") else ""
        text = _("what is free is kept for %s, which has waited longest") % other
        return text + _(", until %s at most") % until if until else text
    text = _("what is free is kept for %(run)s, which starts by %(at)s") % {
        "run": other,
        "at": moment(data["starts_at"]),
    }
    left_s = (dt.datetime.fromisoformat(data["starts_at"]) - timezone.now()).total_seconds() - data.get("spare_s", 0)
    if left_s < 60:
        return text
    return text + _("; with a max_duration of %s it could start before") % f"{math.floor(left_s / 60)}m"


def _no_offer_free(data: dict[str, Any]) -> str:
    count = data.get("offers", 0)
    text = ngettext(
        "%d offer would do, and it is not to be had now", "%d offers would do, and none can be had now", count
    )
    if data.get("nodes", 1) > 1:
        numbers = {"placed": data.get("nodes_placed", 0), "nodes": data["nodes"]}
        return _("room for %(placed)d of %(nodes)d nodes in one region") % numbers
    return str(text % count)


def tried(code: str, data: dict[str, Any]) -> Label:
    """How a place did that a decision tried."""
    match code:
        case "fits":
            if data.get("of", 1) > 1:
                return Label(_("fits"), _("room for %(nodes)d of %(of)d nodes") % data, "go")
            return Label(_("fits"), "", "go")
        case "reserved":
            return Label(_("reserved"), _("what is free there is kept for a run that has waited longer"))
        case "busy" if data.get("short"):
            return Label(_("busy"), "; ".join(_lack(what, data) for what in data["short"]) + _busy_until(data))
        case "too_small":
            return Label(_("too small"), "; ".join(_has_only(what, data) for what in data.get("short", ())), "bad")
    label, text, tone = _TRIED.get(code, (code.replace("_", " "), "", "wait"))
    return Label(_(label), _(text) % _Asked(data) if text else "", tone)


class _Asked(dict[str, Any]):
    """Numbers for a text, with lists joined and nothing where a number is missing."""

    def __missing__(self, key: str) -> str:
        return ""

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        return ", ".join(map(str, found)) if isinstance(found, list | tuple) else found


_TRIED = {
    "busy": (_later("busy"), _later("it can't be had now"), "wait"),
    "no_quota": (_later("quota"), _later("the account's quota for it is used up"), "wait"),
    "not_available": (_later("not available"), _later("it isn't offered now"), "wait"),
    "offline": (_later("offline"), _later("the host has not been heard of lately"), "bad"),
    "draining": (_later("draining"), _later("it takes no new jobs"), "wait"),
    "no_isolation": (_later("refuses jobs"), _later("it can't isolate them"), "bad"),
    "image_not_supported": (_later("no containers"), _later("it can't run the image %(image)s"), "bad"),
    "other_region": (_later("other region"), _later("the run names %(asked)s"), "info"),
    "other_instance_type": (_later("not named"), _later("the run names %(asked)s"), "info"),
    "has_no_labels": (_later("labels"), _later("the run asks for %(asked)s"), "info"),
    "is_spot": (_later("spot"), _later("the run's spot_policy is on-demand"), "info"),
    "is_on_demand": (_later("not spot"), _later("the run's spot_policy is spot"), "info"),
    "too_expensive": (_later("too expensive"), _later("the run's max_price is $%(max_price)s an hour"), "info"),
    "not_named": (_later("not named"), _later("it costs money, and the run doesn't name its backend"), "info"),
    "no_such_backend": (_later("not set up"), _later("no enabled backend is called so"), "bad"),
    "not_served": (_later("not served"), _later("nothing here serves this kind of backend"), "bad"),
    "failed": (_later("failed"), _later("the backend could not be asked for its offers"), "bad"),
}


def _shortfall(data: dict[str, Any]) -> str:
    """`needs 4 GPUs, 1 of 8 free on gpu-box-1`: each thing that the closest host lacks, with its numbers."""
    lacks = [_lack(what, data) for what in data.get("short", ())]
    text = "; ".join(lacks) or _("nothing that fits is free")
    if lacks and data.get("host"):
        text = _("%(lacks)s on %(host)s") % {"lacks": text, "host": data["host"]}
    text += _busy_until(data)
    if data.get("nodes", 1) > 1:
        numbers = {"nodes": data["nodes"], "placed": data.get("nodes_placed", 0), "text": text}
        text = _("room for %(placed)d of %(nodes)d nodes; %(text)s") % numbers
    return text


def _busy_until(data: dict[str, Any]) -> str:
    if "gpus" not in data.get("short", ()) or not data.get("busy_until"):
        return ""
    return _("; %(busy)d busy until at most %(at)s") % {"busy": data["busy"], "at": moment(data["busy_until"])}


def _lack(what: str, data: dict[str, Any]) -> str:
    free, total = data.get(f"{what}_free", 0), data.get(f"{what}_total", 0)
    if what == "gpus":
        text = _("needs %(needs)s, %(free)d of %(total)d free") % {
            "needs": gpus(data.get("gpus", 0)),
            "free": free,
            "total": total,
        }
        if outside := data.get("gpus_outside"):
            text += _(" (%d used outside dstackweb)") % outside
        return text
    if what == "cpus":
        needs = cpus(data.get("cpus", 0))
        return _("needs %(needs)s, %(free)d of %(total)d free") % {"needs": needs, "free": free, "total": total}
    return _("needs %(needs)s of memory, %(free)s of %(total)s free") % {
        "needs": mebibytes(data.get("memory_mib", 0)),
        "free": mebibytes(free),
        "total": mebibytes(total),
    }


def _impossible(data: dict[str, Any]) -> str:
    match data.get("code"):
        case "no_spot_on_hosts":
            return _("it asks for spot instances, and own hosts are none")
        case "no_offer":
            return _nothing_offered(data.get("refused", {}))
        case "image_not_supported":
            return _("it asks for the image %s, and no host runs containers") % str(data.get("image", ""))
        case "no_such_place":
            return _no_such_place(data)
        case "too_large":
            # The numbers are those of the closest host now: only what it will never have makes it impossible.
            lacks = [_never(what, data) for what in data.get("short", ()) if data[f"{what}_total"] < data.get(what, 0)]
            if lacks:
                return _("no host could ever give this: %s") % "; ".join(lacks)
            if data.get("nodes", 1) > 1:
                return _("the hosts together can never hold all %d nodes at once") % int(data["nodes"])
    return _("no host could ever give this")


def _nothing_offered(refused: dict[str, int]) -> str:
    """`no backend offers such a machine`, or why the run takes none of those offered."""
    if not refused:
        return _("none of its backends offers such a machine")
    each = [f"{count} × {tried(code, {}).label}" for code, count in refused.items()]
    return _("none of the machines offered will do: %s") % ", ".join(each)


def _no_such_place(data: dict[str, Any]) -> str:
    """`none of 3 hosts has the label disk=nvme`, or that no single host has everything the run names."""
    total, missing = data.get("hosts_total", 0), data.get("missing", ())
    if missing:
        one = _("none of %(total)d hosts has the label %(labels)s")
        more = _("none of %(total)d hosts has any of the labels %(labels)s")
        if total == 1:
            one, more = _("the only host lacks the label %(labels)s"), _("the only host lacks the labels %(labels)s")
        return (one if len(missing) == 1 else more) % {"total": total, "labels": ", ".join(missing)}
    asked = ", ".join([*data.get("regions", ()), *data.get("instance_types", ()), *data.get("labels", ())])
    if data.get("labels"):
        return _("no host has all that it names at once: %s") % asked
    return _("no host is in the regions or of the instance types it names: %s") % asked


def _never(what: str, data: dict[str, Any]) -> str:
    """What the closest host lacks for good: its total is what counts, not what is free."""
    total = data.get(f"{what}_total", 0)
    if what == "gpus":
        if not total:
            return _("needs %s, and no host has such a GPU") % gpus(data.get("gpus", 0))
        return _("needs %(needs)s, the most on one host is %(total)d") % {
            "needs": gpus(data.get("gpus", 0)),
            "total": total,
        }
    if what == "cpus":
        return _("needs %(needs)d CPUs, the largest host has %(total)d") % {
            "needs": data.get("cpus", 0),
            "total": total,
        }
    return _("needs %(needs)s of memory, the largest host has %(total)s") % {
        "needs": mebibytes(data.get("memory_mib", 0)),
        "total": mebibytes(total),
    }


def _has_only(what: str, data: dict[str, Any]) -> str:
    """What one host lacks for good."""
    needs, has = data.get(what, 0), data.get(f"{what}_total", 0)
    texts = {
        "gpus": (gpus(needs), str(has) if has else _("none")),
        "cpus": (cpus(needs), str(has)),
        "memory_mib": (_("%s of memory") % mebibytes(needs), mebibytes(has)),
    }
    return _("needs %(needs)s, has %(has)s") % dict(zip(("needs", "has"), texts[what], strict=True))


def _unavailable(data: dict[str, Any]) -> str:
    hosts = ", ".join(data.get("hosts", ()))
    match data.get("code"):
        case "no_hosts":
            return _("no host is registered yet")
        case "hosts_offline":
            return _("the hosts that could run it are offline or draining: %s") % hosts
        case "no_isolation":
            return _("the hosts that could run it refuse jobs because they can't isolate them: %s") % hosts
        case "no_such_backend":
            return _("it is limited to backends that aren't set up: %s") % ", ".join(data.get("backends", ()))
        case "not_served":
            return _("nothing here serves the kind of its backends: %s") % ", ".join(data.get("backends", ()))
        case "failed":
            return _("its backends can't be asked for offers now: %s") % ", ".join(data.get("backends", ()))
        case "no_backend":
            return _("no backend that it may use is set up")
        case "unreadable":
            return _("its settings were stored by another version, which this one can't read: submit it again")
    return _("the backend can't be asked")


def offer_detail(detail: dict[str, Any]) -> str:
    """What an offer says beside its availability; `detail` also holds the needs it was asked for."""
    match detail.get("code"):
        case "idle" if detail.get("gpus_total"):
            return _("%(free)d of %(total)d GPUs free") % {"free": detail["gpus_free"], "total": detail["gpus_total"]}
        case "idle":
            free = int(detail["cpus_free"])
            return ngettext("%d CPU free", "%d CPUs free", free) % free
        case "busy":
            return "; ".join(_lack(what, detail) for what in detail.get("short", ()))
        case "too_small":
            return "; ".join(_has_only(what, detail) for what in detail.get("short", ())) or _("too small")
        case "offline":
            return _("offline")
        case "draining":
            return _("draining: takes no new jobs")
        case "no_isolation":
            return _("refuses jobs: it can't isolate them")
        case "image_not_supported":
            return _("runs no containers")
    return ""
