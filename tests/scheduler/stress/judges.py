"""Checks of the final state, once all actors have stopped."""

from __future__ import annotations

import collections
import datetime as dt
from collections.abc import Iterator, Sequence

from django.db.models import Max, Sum
from django.utils import timezone

from dstackweb.accounts.models import Membership
from dstackweb.backends.models import Gpu, Host
from dstackweb.runs import attempts, recurrence, services
from dstackweb.runs.models import Allocation, Job, Move, Queue, QueueCount, QueueHour, Run, RunEvent, Verdict
from dstackweb.runs.recount import differences
from dstackweb.runs.recurrence import BY_PEOPLE
from dstackweb.runs.rows import queue_rows
from dstackweb.runs.states import ACTIVE, ENDED, JOB_ACTIVE, PLACED, RUN_MOVES, JobStatus, Reason, RunStatus
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes import placement_pass
from tests.scheduler.stress.acts import MANAGER
from tests.scheduler.stress.referee import placed_above_limits, wrong_ranks

ENTERS = {"retry": RunStatus.PENDING, "requeued": RunStatus.SUBMITTED, "came_round": RunStatus.SUBMITTED,
          "returned": RunStatus.SUBMITTED, "displaced": RunStatus.TERMINATING}  # fmt: skip
"""What a run is after events that are not called so."""


def judge(claimed: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Everything that is wrong now that nobody moves. `claimed` are the jobs that runners were given, with nonces."""
    yield from (str(difference) for difference in differences())
    yield from placed_above_limits()
    yield from wrong_ranks()
    yield from (f"job {job} was claimed by several" for job, n in collections.Counter(j for j, _ in claimed).items()
                if n > 1)  # fmt: skip
    yield from _hosts()
    yield from _jobs()
    yield from _queues()
    yield from _verdicts()
    yield from _moves()
    yield from _occurrences()
    for run in Run.objects.all():
        yield from _run(run)


def judge_after_a_pass() -> Iterator[str]:
    """What the next pass must have put right at the latest."""
    placement_pass.run_passes()
    for reservation in Reservation.kept():
        if reservation.run.status != RunStatus.SUBMITTED:
            yield f"capacity is reserved for {reservation.run}, which is {reservation.run.status}"


def _hosts() -> Iterator[str]:
    for host in Host.objects.all():
        if host.cpus_used > host.cpus or host.memory_used_mib > host.memory_mib:
            yield f"{host.name}: {host.cpus_used} of {host.cpus} CPUs are taken"


def _jobs() -> Iterator[str]:
    for job in Job.objects.filter(status__in=JOB_ACTIVE).select_related("run"):
        rows = Allocation.objects.filter(job=job)
        held = sorted(Gpu.objects.filter(allocation__job=job).values_list("uuid", flat=True))
        if held != sorted(job.gpus) or rows.aggregate(n=Sum("cpus"))["n"] != job.cpus:
            yield f"{job} has {job.gpus} and {job.cpus} CPUs, but holds {held}"
        if job.attempt != job.run.attempt:
            yield f"{job} is {job.status}, of an attempt that is over"


def _queues() -> Iterator[str]:
    for queue in Queue.objects.all():
        rows = queue_rows(queue, 10_000)
        in_order = Run.objects.filter(queue=queue, status="submitted").order_by("rank", "id")
        if [row.id for row in rows] != [str(uid) for uid in in_order.values_list("uid", flat=True)]:
            yield f"{queue}: the page is not in the order of the ranks"
        if [row.position for row in rows] != list(range(1, QueueCount.objects.get(queue=queue).submitted + 1)):
            yield f"{queue}: the page shows other positions than 1 to its length"
    counted = QueueHour.objects.aggregate(n=Sum("placed"))["n"] or 0
    placed = RunEvent.objects.filter(kind="provisioning", data__from="submitted").count()
    if counted != placed:
        yield f"hours count {counted} placements, events {placed}"


def _verdicts() -> Iterator[str]:
    """A shape that was placed has no reason any more that is older."""
    for verdict in Verdict.objects.exclude(shape="").select_related("queue"):
        placed = Job.objects.filter(run__queue=verdict.queue, run__shape=verdict.shape, run__status__in=PLACED)
        last = placed.aggregate(at=Max("placed_at"))["at"]
        if last is not None and last > verdict.at:
            yield f"{verdict} stayed when its shape was placed"


def _moves() -> Iterator[str]:
    """Members change their own runs alone, and never to more priority than members may ask for."""
    roles = {(seat.project_id, seat.user_id): seat.role for seat in Membership.objects.all()}
    owners = dict(Run.objects.values_list("pk", "user"))
    for move in Move.objects.select_related("queue__project", "user"):
        if roles[move.queue.project_id, move.user_id] != "member":
            continue
        most = move.queue.project.member_max_priority
        for run, (_, before, _), (_, after, _), *_ in move.changes:
            if owners[run] != move.user_id:
                yield f"move {move.pk}: {move.user} changed run {run} of somebody else"
            if after > max(most, before):
                yield f"move {move.pk}: {move.user} gave run {run} priority {after}"
    left = set()
    for event in RunEvent.objects.filter(kind="priority").select_related("run__project").order_by("pk"):
        role = roles[event.run.project_id, event.actor_id or 0]
        left.add((event.run_id, event.actor_id, event.data["from"]))
        # What a manager gave and a member took away, the member may give back by taking that back.
        undone = (event.run_id, event.actor_id, event.data["to"]) in left
        most = max(event.run.project.member_max_priority, event.data["from"])
        if role == "member" and event.data["to"] > most and not undone:
            yield f"a member gave {event.run} priority {event.data['to']}"


def _occurrences() -> Iterator[str]:
    """Of each run with a schedule that ended by itself there is one following run, or it is noted when that is due."""
    following = collections.Counter(event.data["previous"] for event in RunEvent.objects.filter(kind="scheduled"))
    for run in Run.objects.filter(status__in=ENDED).exclude(spec__schedule=None):
        by_people = run.termination_reason in BY_PEOPLE or run.stop_reason in BY_PEOPLE
        if following[str(run.uid)] + (run.retry_at is not None) != (not by_people):
            yield f"{run.name}: {run.termination_reason}, {following[str(run.uid)]} follow, noted {run.retry_at}"


def _run(run: Run) -> Iterator[str]:
    events = RunEvent.objects.filter(run=run, node=None).order_by("id").values_list("kind", "data")
    status = RunStatus.PENDING if run.spec["schedule"] else RunStatus.SUBMITTED
    for kind, data in events:
        if "from" in data and (new := ENTERS.get(kind, kind)) in list(RunStatus):
            if data["from"] != status or RunStatus(new) not in RUN_MOVES[status]:
                yield f"{run.name}: {data['from']} → {new} after {status}"
            status = RunStatus(new)
    if status != run.status:
        yield f"{run.name} is {run.status}, its events say {status}"
    jobs = list(Job.objects.filter(run=run))
    complete = {job.attempt for job in jobs} - {job.attempt for job in jobs if job.status != JobStatus.DONE}
    if complete != ({run.attempt} if run.status == RunStatus.DONE else set()):
        yield f"{run.name} is {run.status} in attempt {run.attempt}; complete are {complete}"
    if run.status in ENDED and any(job.status in JOB_ACTIVE for job in jobs):
        yield f"{run.name} is {run.status} and has active jobs"
    placed = [job for job in jobs if job.attempt == run.attempt]
    if placed and len(placed) != run.spec["nodes"]:
        yield f"{run.name}: {len(placed)} of {run.spec['nodes']} nodes were placed"


def end_all() -> Iterator[str]:
    """Let the rest run for a few rounds, then stop it; says what doesn't end."""
    Host.objects.update(draining=False, held_back_at=None, start_failures=0)
    for _ in range(3):
        recurrence.create_occurrences(timezone.now())
        attempts.requeue_due(timezone.now() + dt.timedelta(hours=1))
        placement_pass.run_passes()
        for job in Job.objects.filter(status__in=JOB_ACTIVE):
            attempts.claim_job(job.pk, job.claim_nonce or "last", "here")
            attempts.start_job(job.pk)
            attempts.end_job(job.pk, Reason.DONE_BY_RUNNER, exit_code=0)
    boss = Membership.objects.filter(user__username=MANAGER).select_related("user")[0].user
    for run in Run.objects.filter(status__in=ACTIVE).select_related("project", "queue", "user"):
        services.stop(run, boss, "manager", abort=True)
    yield from (f"{run.name} is still {run.status}" for run in Run.objects.filter(status__in=ACTIVE))
    if Allocation.objects.exists():
        yield "something is still held"
