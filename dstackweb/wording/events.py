"""What happened to a run, told in a sentence each: the timeline of the run page."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dstackweb.runs.models import RunEvent
from dstackweb.wording import policy as policy_words
from dstackweb.wording import statuses, units


def told(event: RunEvent, nodes: int) -> str:
    """The sentence of one event of a run with so many nodes, without who did it."""
    data: dict[str, Any] = event.data
    if (worded := _run_event(event.kind, data) or policy_words.told(event.kind, data)) is not None:
        return worded
    worded = _job_event(event.kind, data) or event.kind.replace("_", " ")
    return worded if nodes == 1 or event.node is None else _("node %d: ") % event.node + worded


def _run_event(kind: str, data: dict[str, Any]) -> str | None:
    match kind:
        case "submitted":
            numbers = {"queue": data.get("queue", "default"), "priority": data.get("priority", "")}
            return _("submitted to queue %(queue)s with priority %(priority)s") % numbers
        case "priority":
            return _("priority changed from %(from)s to %(to)s") % data
        case "moved" | "move_undone":
            return _moved(kind, data)
        case "queue":
            return _("moved from queue %(from)s to %(to)s") % data
        case "provisioning":
            return _placed(data.get("nodes", []))
        case "running":
            return _("running")
        case "stop_requested" | "terminating":
            return _stopping(data)
        case "retry":
            why = statuses.termination(data.get("job_reason", ""))
            return _("%(why)s Waiting to be tried again, with its place in the queue kept.") % {"why": why}
        case "extended":
            times = {"by": units.duration(data.get("by_s")), "total": units.duration(data.get("total_s"))}
            return _("%(by)s more: %(total)s in all") % times
        case "scheduled" | "came_round" | "next_scheduled" | "schedule_waits" | "schedule_ended":
            return _schedule(kind, data)
        case "requeued":
            return _("back in the queue for the next attempt")
        case "done" | "failed" | "terminated":
            return _ended(kind, data)
        case "start_deadline":
            return _("it did not start in time")
        case "spot_interruption":
            return _("the cloud takes its spot machine back at %s") % units.moment(data["at"])
        case "reserved":
            return _reserved(data)
        case "reservation_ended":
            return _reservation_ended(data.get("reason", ""))
    return None


def _reserved(data: dict[str, Any]) -> str:
    what = {"what": units.gpus(data["gpus"]) if data.get("gpus") else _("room"), "hosts": ", ".join(data["hosts"])}
    text = _("%(what)s on %(hosts)s reserved for it") % what
    if data.get("starts_at"):
        return text + _(", free by %s") % units.moment(data["starts_at"])
    return text + _(", until %s at most") % units.moment(data["expires_at"]) if data.get("expires_at") else text


def _reservation_ended(reason: str) -> str:
    why = {
        "placed": _("it was placed"),
        "left": _("it left the queue"),
        "outranked": _("a run before it in the queue has one now"),
        "vanished": _("what was reserved is no longer there"),
        "expired": _("nobody knew when it could start, and its time is over"),
        "queue_paused": _("the queue is paused"),
        "queue_limit": _("a limit of the queue holds it up"),
        "user_limit": _("the member's own limit holds it up"),
    }.get(reason) or _("it waits for something else now")
    return _("reservation ended: %s") % why


def _schedule(kind: str, data: dict[str, Any]) -> str:
    """How a run with a schedule comes round. Times are UTC, as cron expressions are."""
    at = str(data.get("at", ""))[:16].replace("T", " ")
    match kind:
        case "scheduled":
            return _("scheduled for %s UTC, after the run before it had ended") % at
        case "came_round":
            return _("its time has come: in the queue")
        case "next_scheduled":
            return _("the next one is scheduled for %s UTC") % at
        case "schedule_ended":
            return _("its schedule has ended: %s may not submit runs here any more") % str(data.get("user", ""))
    if data.get("reason") == "draining":
        return _("the next one waits: its queue takes no new runs")
    return _("the next one waits: another active run has its name")


def _moved(kind: str, data: dict[str, Any]) -> str:
    before, after = data.get("priority", (None, None))
    numbers = {name: data.get(name) for name in ("from", "to", "anchor")} | {"before": before, "after": after}
    counted = None not in (numbers["from"], numbers["to"])
    if kind == "move_undone":
        text = _("a move was taken back: from position %(from)s to %(to)s") if counted else _("a move was taken back")
    elif counted:
        text = _("moved from position %(from)s to %(to)s")
    else:
        text = {
            "before": _("moved to before %(anchor)s"),
            "after": _("moved to after %(anchor)s"),
            "top": _("moved to the top"),
            "bottom": _("moved to the bottom"),
        }[data["target"]]
    if before != after:
        text += _(", with its priority from %(before)s to %(after)s")
    return text % numbers


def _placed(nodes: list[dict[str, Any]]) -> str:
    hosts = ", ".join(dict.fromkeys(_place_of(node) for node in nodes))
    gpus = sum(node.get("gpus", 0) for node in nodes)
    text = _("placed on %s") % hosts if hosts else _("placed")
    if len(nodes) > 1:
        text += ", " + ngettext("%d node", "%d nodes", len(nodes)) % len(nodes)
    return f"{text}, {units.gpus(gpus)}" if gpus else text


def _place_of(node: dict[str, Any]) -> str:
    """A host's name, or what was taken of another backend."""
    if "host" in node:
        return str(node["host"])
    return " ".join(filter(None, (node.get("backend"), node.get("region"), node.get("instance_type"))))


def _stopping(data: dict[str, Any]) -> str:
    match data.get("reason"):
        case "stopped_by_user":
            return _("asked to stop")
        case "aborted_by_user":
            return _("asked to stop at once")
        case "terminated_due_to_utilization_policy":
            return _("stopping by the utilization policy")
    if data.get("node") is not None:
        return _("stopping the other nodes, because node %d ended") % int(data["node"])
    return _("stopping")


def _ended(kind: str, data: dict[str, Any]) -> str:
    why = data.get("reason") or data.get("termination_reason") or data.get("job_reason") or ""
    text = statuses.status(kind)
    return f"{text}: {statuses.termination(why)}" if why else text


def _job_event(kind: str, data: dict[str, Any]) -> str | None:
    match kind:
        case "offer_failed":
            return _offer_failed(data)
        case "machine_started":
            return _machine_started(data)
        case "claimed":
            return _("its runner is up on %s") % str(data.get("where", ""))
        case "job_running":
            return _("its commands have started")
        case "job_terminating":
            return _("told to stop")
        case "job_done":
            return _("finished")
        case "job_failed" | "job_terminated":
            return _job_end(data)
    return None


def _offer_failed(data: dict[str, Any]) -> str:
    """A machine that was not to be had, or that did not come up."""
    what = _machine(data)
    why = statuses.no_machine(data.get("code", ""))
    text = beyond(why, data.get("text", ""))
    return _("%(what)s: %(why)s") % {"what": what, "why": f"{why}: {text}" if text else why}


def _machine_started(data: dict[str, Any]) -> str:
    told = {"what": _machine(data), "id": data["cloud_id"], "price": units.hourly(Decimal(data["price"]))}
    return _("%(what)s starts as %(id)s, for %(price)s an hour") % told


def _machine(data: dict[str, Any]) -> str:
    """A cloud's machine: its backend, region and type."""
    what = " ".join(filter(None, (data.get("backend"), data.get("region"), data.get("instance_type"))))
    return what + " " + _("(spot)") if data.get("spot") else what


def _job_end(data: dict[str, Any]) -> str:
    text = why = statuses.termination(data.get("termination_reason", "")) or _("ended")
    if (code := data.get("exit_code")) is not None:
        text += f" {statuses.exited(code)}"
    return f"{text} {beyond(why, data.get('message', ''))}".strip()


def beyond(reason: str, message: str) -> str:
    """A message as it came; empty where it only repeats the reason's sentence, which stands before it."""
    return "" if reason and message.lower().startswith(reason.rstrip(".").lower()) else message
