"""Events of runs, one sentence each."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, assert_never

from django.utils.translation import gettext as _, gettext_lazy, ngettext

from dstackweb.backends.contract import InstanceEnd
from dstackweb.runs.codes import LogCut, MessageCode, ReservationEnd, RunEventKind, ScheduleWait, WaitReason
from dstackweb.runs.models import RunEvent
from dstackweb.runs.service_codes import ServiceState
from dstackweb.runs.states import Reason
from dstackweb.wording import gateway, policy, statuses
from dstackweb.wording.sentence import (
    Sentence,
    as_text,
    clauses,
    colon,
    enumeration,
    fill,
    known,
    listing,
    visible,
    words,
)
from dstackweb.wording.statuses import exited, instance_end, status, termination
from dstackweb.wording.units import dollars, duration, exact_duration, gpus, size

Data = dict[str, Any]


def event_text(event: RunEvent, nodes: int) -> Sentence:
    """The sentence of one event of a run with so many nodes, without who did it."""
    kind = known(RunEventKind, event.kind)
    text = Sentence(as_text(event.kind) if kind is None else _worded(kind, event.data))
    return _with_node(text, event.node if nodes > 1 and kind in _OF_NODES else None)


def _with_node(text: Sentence, node: int | None) -> Sentence:
    return text if node is None else fill(_("node %(node)d: %(text)s"), node=node, text=text)


_OF_NODES = {
    None,
    RunEventKind.OFFER_FAILED,
    RunEventKind.MACHINE_STARTED,
    RunEventKind.MACHINE_ASKED,
    RunEventKind.CLAIMED,
    RunEventKind.JOB_RUNNING,
    RunEventKind.LOG_CUT,
    RunEventKind.JOB_TERMINATING,
    RunEventKind.JOB_DONE,
    RunEventKind.JOB_FAILED,
    RunEventKind.JOB_TERMINATED,
}
"""Events whose sentence starts with the node, in a run with several."""


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
        case RunEventKind.PROVISIONING if data.get("restored"):
            return _("found after a restore: %s") % _placed(data.get("nodes", []))
        case RunEventKind.PROVISIONING:
            return _placed(data.get("nodes", []))
        case RunEventKind.STOP_REQUESTED | RunEventKind.TERMINATING:
            return _stopping(data)
        case RunEventKind.DONE | RunEventKind.FAILED | RunEventKind.TERMINATED:
            return _ended(kind, data)
        case RunEventKind.RETRY:
            again = _("It will be retried and keeps its place in the queue.")
            return f"{termination(data.get('job_reason', ''))} {again}"
        case RunEventKind.REQUEUED:
            return _("queued again for the next attempt")
        case RunEventKind.FOLLOWS:
            return _("queued, now that these have ended: %s") % listing(data.get("runs", ()))
        case RunEventKind.RELEASED:
            return _("released: it no longer waits for other runs")
        case RunEventKind.DISPLACED:
            return _displaced(data)
        case RunEventKind.DISPLACES:
            return _displaces(data.get("runs", ()))
        case RunEventKind.RETURNED if data.get("job_reason") == Reason.PREEMPTED:
            return _("back in its place in the queue after it was displaced")
        case RunEventKind.RETURNED if data.get("job_reason") == InstanceEnd.NO_ROOM:
            return _("back in its place in the queue: the cluster is full")
        case RunEventKind.RETURNED if data.get("code") == MessageCode.OUT_OF_CAPACITY:
            return _("back in its place in the queue: no offer that it may use has room now")
        case RunEventKind.RETURNED:
            why = statuses.message(data.get("detail", {}), data.get("message", ""))
            text = _("back in its place in the queue: its host did not start it")
            return f"{text} ({why})" if why else text
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
        case RunEventKind.REPLACED:
            return _("retried with its sweep, as a new run of this name")
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
        case RunEventKind.INACTIVITY_NOTICE:
            return policy.inactive(data)
        case RunEventKind.INACTIVITY_STOP:
            return _("stopped: unused for %s") % duration(data.get("limit_s"))
        case RunEventKind.TASKS_FAIL:
            return tasks_fail(data)
        case RunEventKind.SERVICE_HEALTHY | RunEventKind.SERVICE_UNHEALTHY:
            return _service(kind, data)
        case RunEventKind.OFFER_FAILED:
            return _offer_failed(data)
        case RunEventKind.MACHINE_STARTED:
            numbers = {"what": _offer(data), "id": data["cloud_id"], "price": dollars(data["price"])}
            paid = _("starting instance %(id)s: %(what)s at %(price)s per hour")
            return (paid if float(data["price"]) else _("starting instance %(id)s: %(what)s")) % numbers
        case RunEventKind.MACHINE_ASKED:
            return _("a signal ended its commands; asking the cloud about its machine")
        case RunEventKind.CLAIMED:
            return _("its runner is up on %s") % str(data.get("where", ""))
        case RunEventKind.JOB_RUNNING:
            return _("its commands have started")
        case RunEventKind.LOG_CUT:
            return _log_cut(data)
        case RunEventKind.JOB_TERMINATING:
            return _("asked to stop")
        case RunEventKind.JOB_DONE:
            return _("finished")
        case RunEventKind.JOB_FAILED | RunEventKind.JOB_TERMINATED:
            return _job_end(data)
        case never:
            assert_never(never)


def tasks_fail(data: Data) -> Sentence:
    """The share of failures of a prefix has risen."""
    text = _("%(failed)s of %(ended)s %(prefix)s tasks failed: %(now)s %%, up from %(was)s %% within 5 minutes")
    numbers = {name: f"{data[name]:,}" for name in ("failed", "ended")}
    return fill(text, **{**data, **numbers, "prefix": visible(data["prefix"])})


def _service(kind: RunEventKind, data: Data) -> str:
    """A service changed between healthy and not."""
    lasted = data.get("after_s")
    if kind == RunEventKind.SERVICE_HEALTHY:
        if lasted is None:
            return _("healthy")
        if data.get("before") == ServiceState.UNHEALTHY:
            return _("healthy again after %s") % exact_duration(lasted)
        return _("healthy after %s") % exact_duration(lasted)
    why = gateway.check_failure(data.get("error", ""), data.get("error_data", {}))
    failed = ngettext("unhealthy: %(n)d check failed", "unhealthy: %(n)d checks failed in a row", data["failures"])
    return f"{failed % {'n': data['failures']}} ({why})" if why else failed % {"n": data["failures"]}


def whose(data: Data) -> str:
    """A run that displaces or is displaced, and its member: `train of ann`."""
    return _("%(run)s of %(user)s") % {"run": data.get("run", ""), "user": data.get("user", "")}


def _displaced(data: Data) -> str:
    if data.get("queue"):
        why = _("displaced by %(whose)s, which takes back GPUs that queue %(queue)s lent: it stops and is queued again")
        return why % {"whose": whose(data), "queue": data["queue"]}
    return _("displaced by %s: it stops and is queued again") % whose(data)


def _displaces(runs: Sequence[Data]) -> str:
    names, queues = listing(map(whose, runs)), dict.fromkeys(one["queue"] for one in runs if "queue" in one)
    if queues:
        text = _("takes back GPUs that its queue lent to %(queues)s: displaces %(runs)s")
        return text % {"queues": enumeration(list(queues)), "runs": names}
    return _("displaces %s") % names


def _log_cut(data: Data) -> str:
    match known(LogCut, data["why"]):
        case LogCut.PROJECT_QUOTA:
            why = _("the project's logs have reached their quota of %s")
        case LogCut.JOB_LIMIT:
            why = _("its log has reached the limit of %s")
        case None:
            why = _("its log has reached a limit (%s)")
        case never:
            assert_never(never)
    return clauses([why % size(data["limit"]), _("later output is not kept, and the run goes on")])


def _utc(data: Data) -> str:
    """Times of schedules are UTC, as cron expressions are."""
    return str(data.get("at", ""))[:16].replace("T", " ")


def _reserved(data: Data) -> Sentence:
    what = {"what": gpus(data["gpus"]) if data.get("gpus") else _("room"), "hosts": listing(data["hosts"])}
    text = Sentence(_("%(what)s on %(hosts)s reserved for it") % what)
    if starts := data.get("starts_at"):
        return text + fill(_(", free by %(at)s"), at=dt.datetime.fromisoformat(starts))
    if expires := data.get("expires_at"):
        return text + fill(_(", until %(at)s at most"), at=dt.datetime.fromisoformat(expires))
    return text


def _reservation_end(reason: str) -> str:
    if known(ReservationEnd, reason):
        return RESERVATION_ENDS(reason)
    if reason == WaitReason.QUEUE_LIMIT:
        return _("a queue limit is reached")
    if reason == WaitReason.USER_LIMIT:
        return _("the member's limit is reached")
    return _("the run waits for something else now")


RESERVATION_ENDS = words(
    {
        ReservationEnd.PLACED: gettext_lazy("the run was placed"),
        ReservationEnd.LEFT: gettext_lazy("the run left the queue"),
        ReservationEnd.OUTRANKED: gettext_lazy("a run ahead of it has one now"),
        ReservationEnd.VANISHED: gettext_lazy("the reserved capacity is gone"),
        ReservationEnd.EXPIRED: gettext_lazy(
            "its time is over, and its start is still unknown; it is another run's turn now"
        ),
        ReservationEnd.QUEUE_PAUSED: gettext_lazy("the queue is paused"),
        ReservationEnd.UNREADABLE: gettext_lazy("another version stored the run's settings"),
    }
)


def _schedule_wait(data: Data) -> str:
    code = known(ScheduleWait, data.get("reason", ""))
    match code:
        case ScheduleWait.DRAINING:
            return _("next run delayed: its queue is draining")
        case ScheduleWait.NAME_TAKEN:
            return _("next run delayed: another active run or sweep has its name")
        case ScheduleWait.STOPPED:
            return _("schedule ended")
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
    hosts = listing(dict.fromkeys(_place_of(node) for node in nodes))
    count = sum(node.get("gpus", 0) for node in nodes)
    text = _("placed on %s") % hosts if hosts else _("placed")
    if len(nodes) > 1:
        text = listing([text, ngettext("%d node", "%d nodes", len(nodes)) % len(nodes)])
    return listing([text, gpus(count)]) if count else text


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
        case Reason.INACTIVITY:
            return _("stopping: unused")
    if data.get("node") is not None:
        return _("stopping the other nodes because node %d ended") % int(data["node"])
    return _("stopping")


def _ended(kind: RunEventKind, data: Data) -> str:
    why = data.get("reason") or data.get("termination_reason") or data.get("job_reason") or ""
    return colon(status(kind), termination(why)) if why else status(kind)


def _offer_failed(data: Data) -> str:
    """An instance that could not be launched, or that did not come up; with what the cloud said."""
    numbers = {"what": _offer(data), "why": instance_end(data.get("code", "")), "text": data.get("text", "")}
    text = _("no instance on %(what)s: %(why)s: %(text)s") if numbers["text"] else _("no instance on %(what)s: %(why)s")
    return text % numbers


def _offer(data: Data) -> str:
    """A cloud's offer: its backend, region and instance type."""
    what = " ".join(filter(None, (data.get("backend"), data.get("region"), data.get("instance_type"))))
    return _("%s (spot)") % what if data.get("spot") else what


def _job_end(data: Data) -> str:
    text = termination(data.get("termination_reason", "")) or _("ended")
    if (code := data.get("exit_code")) is not None:
        text += f" {exited(code)}"
    return f"{text} {statuses.beyond_reason(data.get('detail', {}), data.get('message', ''))}".strip()


REPEATED = ("no_capacity", "quota")
"""Launch failures that are grouped, since the cloud's own text adds nothing."""


def grouped(found: Iterable[RunEvent], nodes: int) -> list[tuple[RunEvent, Sentence]]:
    """Events with their sentences, in their order; successive offers that failed for the same cause are one."""
    lines: list[tuple[RunEvent, Sentence]] = []
    for (kind, _attempt, node, code), group in groupby(found, _cause):
        same = list(group)
        if kind != RunEventKind.OFFER_FAILED or code not in REPEATED or len(same) == 1:
            lines += [(event, event_text(event, nodes)) for event in same]
            continue
        names = listing(_offer({**event.data, "backend": ""}) for event in reversed(same))
        template = ngettext("%(n)d offer: %(why)s: %(names)s", "%(n)d offers: %(why)s: %(names)s", len(same))
        text = fill(template, n=len(same), why=instance_end(code), names=names)
        lines.append((same[0], _with_node(text, node if nodes > 1 else None)))
    return lines


def _cause(event: RunEvent) -> tuple[str, int, int | None, str]:
    return event.kind, event.attempt, event.node, str(event.data.get("code", ""))
