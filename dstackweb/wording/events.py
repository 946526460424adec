"""What happened to a run, one sentence per event: the timeline of the run page."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from itertools import groupby
from typing import Any, assert_never

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from dstackweb.runs.codes import ReservationEnd, RunEventKind, ScheduleWait, WaitReason
from dstackweb.runs.models import RunEvent
from dstackweb.runs.states import Reason
from dstackweb.wording import messages, policy
from dstackweb.wording.sentence import Sentence, as_text, fill, known
from dstackweb.wording.statuses import exited, instance_end, status, termination
from dstackweb.wording.units import dollars, duration, gpus

Data = dict[str, Any]


def told(event: RunEvent, nodes: int) -> Sentence:
    """The sentence of one event of a run with so many nodes, without who did it."""
    kind = known(RunEventKind, event.kind)
    text = Sentence(as_text(event.kind) if kind is None else _worded(kind, event.data))
    if nodes == 1 or event.node is None or kind not in _OF_NODES:
        return text
    return fill(_("node %(node)d: %(text)s"), node=event.node, text=text)


_OF_NODES = {
    None,
    RunEventKind.OFFER_FAILED,
    RunEventKind.MACHINE_STARTED,
    RunEventKind.CLAIMED,
    RunEventKind.JOB_RUNNING,
    RunEventKind.JOB_TERMINATING,
    RunEventKind.JOB_DONE,
    RunEventKind.JOB_FAILED,
    RunEventKind.JOB_TERMINATED,
}
"""Events that say of which node they are, in a run with several."""


def _worded(kind: RunEventKind, data: Data) -> str:
    match kind:
        case RunEventKind.SUBMITTED:
            numbers = {"queue": data.get("queue", "default"), "priority": data.get("priority", "")}
            return _("submitted to queue %(queue)s with priority %(priority)s") % numbers
        case RunEventKind.PRIORITY:
            return _("priority changed from %(from)s to %(to)s") % data
        case RunEventKind.MOVED:
            return _moved(data)
        case RunEventKind.MOVE_UNDONE:
            return _move_undone(data)
        case RunEventKind.QUEUE:
            return _("moved from queue %(from)s to queue %(to)s") % data
        case RunEventKind.RESERVED:
            return _reserved(data)
        case RunEventKind.RESERVATION_ENDED:
            return _("reservation ended: %s") % _reservation_end(data.get("reason", ""))
        case RunEventKind.PENDING | RunEventKind.RUNNING:
            return status(kind)
        case RunEventKind.PROVISIONING:
            return _placed(data.get("nodes", []))
        case RunEventKind.STOP_REQUESTED | RunEventKind.TERMINATING:
            return _stopping(data)
        case RunEventKind.DONE | RunEventKind.FAILED | RunEventKind.TERMINATED:
            return _ended(kind, data)
        case RunEventKind.RETRY:
            return (
                termination(data.get("job_reason", ""))
                + " "
                + _("It will be retried and keeps its place in the queue.")
            )
        case RunEventKind.REQUEUED:
            return _("queued again for the next attempt")
        case RunEventKind.EXTENDED:
            times = {"by": duration(data.get("by_s")), "total": duration(data.get("total_s"))}
            return _("extended by %(by)s to %(total)s in total") % times
        case RunEventKind.SCHEDULED:
            return _("scheduled for %s UTC after the previous run ended") % _utc(data)
        case RunEventKind.CAME_ROUND:
            return _("queued on schedule")
        case RunEventKind.NEXT_SCHEDULED:
            return _("next run scheduled for %s UTC") % _utc(data)
        case RunEventKind.SCHEDULE_WAITS | RunEventKind.SCHEDULE_ENDED:
            return _schedule_wait(data)
        case RunEventKind.START_DEADLINE:
            return _("it did not start in time")
        case RunEventKind.SPOT_INTERRUPTION:
            return fill(_("the cloud reclaims its spot instance at %(at)s"), at=dt.datetime.fromisoformat(data["at"]))
        case RunEventKind.UTILIZATION_NOTICE:
            return policy.notice(data)
        case RunEventKind.UTILIZATION_STOP:
            return policy.stop(data)
        case RunEventKind.UTILIZATION_WOULD_STOP:
            return policy.would_stop(data)
        case RunEventKind.UTILIZATION_KEPT:
            return policy.kept(data)
        case RunEventKind.UTILIZATION_NEXT:
            return _("its GPUs went to %s") % (data.get("run") or _("a run of another project"))
        case RunEventKind.UTILIZATION_POLICY_CHANGED:
            return policy.changed(data)
        case RunEventKind.OFFER_FAILED:
            return _offer_failed(data)
        case RunEventKind.MACHINE_STARTED:
            numbers = {"what": _offer(data), "id": data["cloud_id"], "price": dollars(data["price"])}
            return _("%(what)s starts as %(id)s at %(price)s per hour") % numbers
        case RunEventKind.CLAIMED:
            return _("its runner is up on %s") % str(data.get("where", ""))
        case RunEventKind.JOB_RUNNING:
            return _("its commands have started")
        case RunEventKind.JOB_TERMINATING:
            return _("asked to stop")
        case RunEventKind.JOB_DONE:
            return _("finished")
        case RunEventKind.JOB_FAILED | RunEventKind.JOB_TERMINATED:
            return _job_end(data)
        case never:
            assert_never(never)


def _utc(data: Data) -> str:
    """Times of schedules are UTC, as cron expressions are."""
    return str(data.get("at", ""))[:16].replace("T", " ")


def _reserved(data: Data) -> Sentence:
    what = {"what": gpus(data["gpus"]) if data.get("gpus") else _("room"), "hosts": ", ".join(data["hosts"])}
    text = Sentence(_("%(what)s on %(hosts)s reserved for it") % what)
    if starts := data.get("starts_at"):
        return text + fill(_(", free by %(at)s"), at=dt.datetime.fromisoformat(starts))
    if expires := data.get("expires_at"):
        return text + fill(_(", until %(at)s at most"), at=dt.datetime.fromisoformat(expires))
    return text


def _reservation_end(reason: str) -> str:
    code = known(ReservationEnd, reason)
    match code:
        case ReservationEnd.PLACED:
            return _("the run was placed")
        case ReservationEnd.LEFT:
            return _("the run left the queue")
        case ReservationEnd.OUTRANKED:
            return _("a run ahead of it has one now")
        case ReservationEnd.VANISHED:
            return _("the reserved capacity is gone")
        case ReservationEnd.EXPIRED:
            return _("its time is over, and its start is still unknown")
        case ReservationEnd.QUEUE_PAUSED:
            return _("the queue is paused")
        case ReservationEnd.UNREADABLE:
            return _("another version stored the run's settings")
        case None:
            return _waits_otherwise(reason)
        case never:
            assert_never(never)


def _waits_otherwise(reason: str) -> str:
    if reason == WaitReason.QUEUE_LIMIT:
        return _("a queue limit is reached")
    if reason == WaitReason.USER_LIMIT:
        return _("the member's limit is reached")
    return _("the run waits for something else now")


def _schedule_wait(data: Data) -> str:
    code = known(ScheduleWait, data.get("reason", ""))
    match code:
        case ScheduleWait.DRAINING:
            return _("next run delayed: its queue is draining")
        case ScheduleWait.NAME_TAKEN:
            return _("next run delayed: another active run has its name")
        case ScheduleWait.NO_MEMBER:
            return _("schedule ended: %s may no longer submit runs here") % str(data.get("user", ""))
        case None:
            return _("next run delayed")
        case never:
            assert_never(never)


def _moved(data: Data) -> str:
    if None not in (data.get("from"), data.get("to")):
        text = _("moved from position %(from)s to %(to)s")
    else:
        text = {
            "before": _("moved before %(anchor)s"),
            "after": _("moved after %(anchor)s"),
            "top": _("moved to the top"),
            "bottom": _("moved to the bottom"),
        }[data["target"]]
    return text % {"anchor": "", **data} + _with_priority(data)


def _move_undone(data: Data) -> str:
    if None in (data.get("from"), data.get("to")):
        return _("move undone") + _with_priority(data)
    return _("move undone: position %(from)s to %(to)s") % data + _with_priority(data)


def _with_priority(data: Data) -> str:
    before, after = data.get("priority", (None, None))
    return "" if before == after else _(", priority %(before)s to %(after)s") % {"before": before, "after": after}


def _placed(nodes: list[Data]) -> str:
    hosts = ", ".join(dict.fromkeys(_place_of(node) for node in nodes))
    count = sum(node.get("gpus", 0) for node in nodes)
    text = _("placed on %s") % hosts if hosts else _("placed")
    if len(nodes) > 1:
        text += ", " + ngettext("%d node", "%d nodes", len(nodes)) % len(nodes)
    return f"{text}, {gpus(count)}" if count else text


def _place_of(node: Data) -> str:
    """A host's name, or what was taken of another backend."""
    if "host" in node:
        return str(node["host"])
    return " ".join(filter(None, (node.get("backend"), node.get("region"), node.get("instance_type"))))


def _stopping(data: Data) -> str:
    match data.get("reason"):
        case Reason.STOPPED_BY_USER:
            return _("asked to stop")
        case Reason.ABORTED_BY_USER:
            return _("asked to abort")
        case Reason.UTILIZATION_POLICY:
            return _("stopping because of its utilization policy")
    if data.get("node") is not None:
        return _("stopping the other nodes because node %d ended") % int(data["node"])
    return _("stopping")


def _ended(kind: RunEventKind, data: Data) -> str:
    why = data.get("reason") or data.get("termination_reason") or data.get("job_reason") or ""
    return f"{status(kind)}: {termination(why)}" if why else status(kind)


def _offer_failed(data: Data) -> str:
    """An instance that could not be launched, or that did not come up; with what the cloud said."""
    numbers = {"what": _offer(data), "why": instance_end(data.get("code", "")), "text": data.get("text", "")}
    return (_("%(what)s: %(why)s: %(text)s") if numbers["text"] else _("%(what)s: %(why)s")) % numbers


def _offer(data: Data) -> str:
    """A cloud's offer: its backend, region and instance type."""
    what = " ".join(filter(None, (data.get("backend"), data.get("region"), data.get("instance_type"))))
    return _("%s (spot)") % what if data.get("spot") else what


def _job_end(data: Data) -> str:
    text = termination(data.get("termination_reason", "")) or _("ended")
    if (code := data.get("exit_code")) is not None:
        text += f" {exited(code)}"
    return f"{text} {messages.beyond_reason(data.get('detail', {}), data.get('message', ''))}".strip()


REPEATED = ("no_capacity", "quota")
"""Launch failures that say everything: clouds word them differently for each offer."""


def grouped(found: Iterable[RunEvent], nodes: int) -> list[tuple[RunEvent, Sentence]]:
    """Events with their sentences, in their order; successive offers that failed for the same cause are one."""
    lines: list[tuple[RunEvent, Sentence]] = []
    for (kind, _attempt, node, code), group in groupby(found, _cause):
        same = list(group)
        if kind != RunEventKind.OFFER_FAILED or code not in REPEATED or len(same) == 1:
            lines += [(event, told(event, nodes)) for event in same]
            continue
        numbers = {
            "n": len(same),
            "why": instance_end(code),
            "names": ", ".join(_offer({**event.data, "backend": ""}) for event in reversed(same)),
        }
        text = fill(
            ngettext("%(n)d offer: %(why)s: %(names)s", "%(n)d offers: %(why)s: %(names)s", len(same)), **numbers
        )
        if nodes > 1 and node is not None:
            text = fill(_("node %(node)d: %(text)s"), node=node, text=text)
        lines.append((same[0], text))
    return lines


def _cause(event: RunEvent) -> tuple[str, int, int | None, str]:
    return event.kind, event.attempt, event.node, str(event.data.get("code", ""))
