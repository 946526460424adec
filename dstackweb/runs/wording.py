"""The words for codes and numbers: the one place where statuses, reasons and events become sentences (DESIGN 3.11).

Every function takes what is stored and returns text in the reader's language; an unknown code is shown as it is, so
that a newer server's event is still told.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dstackweb.backends.contract import Offer


class Told(NamedTuple):
    """A short word for a badge, a sentence for beside it, and a tone: `go`, `wait`, `bad` or `info`."""

    label: str
    text: str
    tone: str = "wait"


def duration(seconds: float | None) -> str:
    """Seconds as `12 s`, `4 min`, `2 h 05`, `1 d 2 h`. app.js says the same."""
    if seconds is None:
        return "–"
    s = max(0, math.floor(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02d}"
    hours = s % 86400 // 3600
    return f"{s // 86400} d {hours} h" if hours else f"{s // 86400} d"


def mebibytes(mib: int | None) -> str:
    """Memory with the unit that fits: `512 MB`, `80 GB`, `1.5 TB`."""
    if mib is None:
        return "–"
    if mib < 1024:
        return f"{mib} MB"
    amount, unit = (mib / 1024, "GB") if mib < 1024 * 1024 else (mib / 1024 / 1024, "TB")
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def gpus(count: int) -> str:
    """`1 GPU`, `4 GPUs`."""
    return ngettext("%d GPU", "%d GPUs", count) % count


def cpus(count: int) -> str:
    """`1 CPU`, `8 CPUs`."""
    return ngettext("%d CPU", "%d CPUs", count) % count


def status(code: str) -> str:
    """A run's or job's status; dstack's own words, which the API and the command line use as well."""
    return {
        "pending": _("pending"),
        "submitted": _("submitted"),
        "provisioning": _("provisioning"),
        "running": _("running"),
        "terminating": _("terminating"),
        "done": _("done"),
        "failed": _("failed"),
        "terminated": _("terminated"),
    }.get(code, code)


def termination(code: str) -> str:
    """Why a run or a job ended, as a sentence."""
    return {
        "all_jobs_done": _("All commands finished."),
        "job_failed": _("A job failed."),
        "stopped_by_user": _("Stopped by a member."),
        "aborted_by_user": _("Aborted by a member."),
        "retry_limit_exceeded": _("It failed again after the time for retries had passed."),
        "server_error": _("The server could not go on with it."),
        "done_by_runner": _("All commands finished."),
        "container_exited_with_error": _("A command failed."),
        "terminated_by_user": _("Stopped by a member."),
        "terminated_by_server": _("Stopped because another node of the run ended."),
        "max_duration_exceeded": _("It ran longer than its max_duration."),
        "executor_error": _("Its runner failed."),
        "instance_unreachable": _("It was interrupted: its host or its runner went away."),
        "failed_to_start_due_to_no_capacity": _("It could not be started on its host in time."),
        "creating_container_error": _("Its container could not be created."),
        "log_quota_exceeded": _("It wrote more log than is allowed."),
        "hold_ended": _("Held for its time, and given back."),
        "given_back": _("Given back before its time was over."),
        "terminated_due_to_utilization_policy": _("Stopped by the utilization policy: its GPUs were not used enough."),
    }.get(code, code)


def exited(code: int) -> str:
    """An exit code, with what it usually means where it has a usual meaning."""
    usual = {
        126: _("the command can't be executed"),
        127: _("command not found"),
        130: _("interrupted"),
        137: _("killed; often out of memory"),
        139: _("crashed: segmentation fault"),
        143: _("terminated"),
    }.get(code)
    text = _("Exit code %d") % code
    return f"{text}: {usual}." if usual else f"{text}."


def reason(code: str, data: dict[str, Any]) -> Told:
    """Why a run waits, with its numbers."""
    match code:
        case "starting":
            return Told(_("starting"), _("its turn is being looked at"), "go")
        case "queue_paused":
            return Told(_("paused"), _("the queue is paused; a manager resumes it"), "info")
        case "waiting_for_capacity":
            return Told(_("capacity"), _shortfall(data))
        case "impossible":
            return Told(_("impossible"), _impossible(data), "bad")
        case "backend_unavailable":
            return Told(_("unavailable"), _unavailable(data), "bad")
        case "no_quota":
            return Told(_("quota"), _("the cloud account's quota is used up"), "wait")
        case "budget_limit":
            return Told(_("budget"), _("the project's budget for this month is used up"), "wait")
        case "user_limit":
            return Told(_("limit"), _("the member's own limit is reached"), "wait")
        case "queue_limit":
            return Told(_("limit"), _("the queue's limit is reached"), "wait")
        case "reserved_for_other":
            return Told(_("reserved"), _("what is free is reserved for a run ahead of it"), "wait")
    return Told(code.replace("_", " "), "")


def _shortfall(data: dict[str, Any]) -> str:
    """`needs 4 GPUs, 1 of 8 free on gpu-box-1`: each thing that the closest host lacks, with its numbers."""
    lacks = [_lack(what, data) for what in data.get("short", ())]
    text = "; ".join(lacks) or _("nothing that fits is free")
    if lacks and data.get("host"):
        text = _("%(lacks)s on %(host)s") % {"lacks": text, "host": data["host"]}
    if data.get("nodes", 1) > 1:
        numbers = {"nodes": data["nodes"], "placed": data.get("nodes_placed", 0), "text": text}
        text = _("room for %(placed)d of %(nodes)d nodes; %(text)s") % numbers
    return text


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
            return _("it asks for spot instances, and only own hosts are set up")
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
            return "; ".join(_never(what, detail) for what in detail.get("short", ())) or _("too small")
        case "offline":
            return _("offline")
        case "draining":
            return _("draining: takes no new jobs")
        case "no_isolation":
            return _("refuses jobs: it can't isolate them")
        case "image_not_supported":
            return _("runs no containers")
    return ""


def has(offer: Offer) -> str:
    """All that the place of an offer has: `4 × A100-SXM4-80GB · 64 CPUs · 512 GB`."""
    gpu = f"{offer.gpu_count} × {offer.gpu_name.removeprefix('NVIDIA ')}" if offer.gpu_count else ""
    return " · ".join(filter(None, (gpu, cpus(offer.cpus), mebibytes(offer.memory_mib))))


def availability(code: str) -> Told:
    """An offer's availability as a badge."""
    tones = {"available": "go", "idle": "go", "no_quota": "bad", "not_available": "bad"}
    return Told(code.replace("_", " "), "", tones.get(code, "wait"))


def isolation(code: str) -> str:
    """How a host keeps jobs apart from the server."""
    return {
        "user": _("jobs run as another user"),
        "container": _("jobs run in containers"),
        "shared": _("none: jobs share the server's user"),
        "none": _("none: jobs are refused"),
    }.get(code, code)
