"""What happened to a run, told in a sentence each: the timeline of the run page."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dstackweb.runs.models import RunEvent
from dstackweb.web import wording


def told(event: RunEvent) -> str:
    """The sentence of one event, without who did it."""
    data: dict[str, Any] = event.data
    worded = _run_event(event.kind, data) or _job_event(event.kind, data, event.node)
    return worded or event.kind.replace("_", " ")


def _run_event(kind: str, data: dict[str, Any]) -> str | None:
    match kind:
        case "submitted":
            numbers = {"queue": data.get("queue", "default"), "priority": data.get("priority", "")}
            return _("submitted to queue %(queue)s with priority %(priority)s") % numbers
        case "priority":
            return _("priority changed from %(from)s to %(to)s") % data
        case "queue":
            return _("moved from queue %(from)s to %(to)s") % data
        case "provisioning":
            return _placed(data.get("nodes", []))
        case "running":
            return _("running")
        case "stop_requested" | "terminating":
            return _stopping(data)
        case "retry":
            why = wording.termination(data.get("job_reason", ""))
            return _("%(why)s Waiting to be tried again, with its place in the queue kept.") % {"why": why}
        case "requeued":
            return _("back in the queue for the next attempt")
        case "done" | "failed" | "terminated":
            return _ended(kind, data)
        case "start_deadline":
            return _("it did not start in time")
    return None


def _placed(nodes: list[dict[str, Any]]) -> str:
    hosts = ", ".join(dict.fromkeys(str(node.get("host", "")) for node in nodes))
    gpus = sum(node.get("gpus", 0) for node in nodes)
    text = _("placed on %s") % hosts if hosts else _("placed")
    if len(nodes) > 1:
        text += ", " + ngettext("%d node", "%d nodes", len(nodes)) % len(nodes)
    return f"{text}, {wording.gpus(gpus)}" if gpus else text


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
    text = wording.status(kind)
    return f"{text}: {wording.termination(why)}" if why else text


def _job_event(kind: str, data: dict[str, Any], node: int | None) -> str | None:
    numbers = {"node": node, "where": data.get("where", "")}
    match kind:
        case "claimed":
            return _("node %(node)s: its runner is up on %(where)s") % numbers
        case "job_running":
            return _("node %(node)s: its commands have started") % numbers
        case "job_terminating":
            return _("node %(node)s: told to stop") % numbers
        case "job_done":
            return _("node %(node)s: finished") % numbers
        case "job_failed" | "job_terminated":
            return _("node %s: ") % node + _job_end(data)
    return None


def _job_end(data: dict[str, Any]) -> str:
    text = wording.termination(data.get("termination_reason", "")) or _("ended")
    if (code := data.get("exit_code")) is not None:
        usual = wording.exit_code(code)
        text += " " + _("Exit code %d") % code + (f" ({usual})." if usual else ".")
    if message := data.get("message"):
        text += f" {message}"
    return text
