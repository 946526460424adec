"""The placement pass: takes waiting runs in order and places each where it fits (DESIGN 5).

One at a time, by generation; best effort; decided once per shape. Reads rows only, never a cloud.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from django.db import transaction
from django.db.models import Count, F, Q, Sum
from django.utils import timezone
from pydantic import ValidationError

from dstackweb.backends.hosts.registration import ensure_embedded_backend
from dstackweb.backends.hosts.views import host_views
from dstackweb.runs import hints
from dstackweb.runs.allocations import Claim, Taken, claim_all
from dstackweb.runs.models import Allocation, Job, Queue, Run, Verdict
from dstackweb.runs.selectors import in_order, without_texts
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import move_run, touch
from dstackweb.scheduler.models import PassState
from dstackweb.scheduler.placement import Placed, Waits, place
from dstackweb.spec.effective import EffectiveSpec

log = logging.getLogger(__name__)

PASS_EXPIRES_S = 10.0
"""A pass that was killed holds up the next one this long at most."""
RENEW_EVERY_S = 2.0
WORK_S = 20.0
"""How long one task goes from pass to pass; far below django-q's timeout, which would kill it with its claim."""
BATCH = 100
MAX_NAMED = 1000
"""Shapes that a query names to skip them; more are skipped in what it returns."""
MAX_PLACED = 500
"""Runs placed by one pass; the next one is asked for at once when there may be more."""


class Outdated(Exception):
    """A newer pass has begun: this one must not write any more."""


class Closed(Exception):
    """The queue was paused after this pass had read it."""


def request() -> bool:
    """Note that a pass is wanted; True when the caller should enqueue it, False when one is queued already."""
    PassState.objects.get_or_create(pk=1)
    return bool(PassState.objects.filter(pk=1, requested=False).update(requested=True))


def run_passes() -> int:
    """Pass until nobody asks for another, or for WORK_S; returns how many runs were placed.

    Leaves at once when a pass is at work elsewhere: its holder sees the request when it ends.
    """
    placed, began = 0, time.monotonic()
    while (generation := _claim(timezone.now())) is not None:
        done = _run_one(generation)
        placed += done
        wanted = done >= MAX_PLACED or PassState.objects.filter(pk=1, requested=True).exists()
        if not wanted or time.monotonic() - began > WORK_S:
            break
    return placed


def _run_one(generation: int) -> int:
    """One pass, whose claim is given back however it ends."""
    began, done = time.monotonic(), 0
    try:
        done = Pass(generation).run()
    finally:
        PassState.objects.filter(pk=1, generation=generation).update(
            expires_at=None, ended_at=timezone.now(), duration_ms=(time.monotonic() - began) * 1000, placed=done
        )
    return done


def _claim(now: dt.datetime) -> int | None:
    """Make this the one pass; None while another is at work.

    A claim whose end lies further ahead than it could have been set (the clock was put back) is void. What is a
    little too far ahead was renewed since `now` was read, or by a clock that is a little fast.
    """
    PassState.objects.get_or_create(pk=1)
    until = now + dt.timedelta(seconds=PASS_EXPIRES_S)
    free = Q(expires_at=None) | Q(expires_at__lte=now) | Q(expires_at__gt=until + dt.timedelta(seconds=PASS_EXPIRES_S))
    with transaction.atomic():
        won = PassState.objects.filter(free, pk=1).update(
            generation=F("generation") + 1, expires_at=until, requested=False
        )
        if not won:
            # The holder looks at this when it ends, so what the caller came for isn't missed.
            PassState.objects.filter(pk=1).update(requested=True)
            return None
        return PassState.objects.values_list("generation", flat=True).get(pk=1)


@dataclass
class Line:
    """A queue being walked in order; runs of shapes that don't fit are skipped, in the query and in the batch."""

    queue: Queue
    blocked: set[str] = field(default_factory=set)
    batch: list[Run] = field(default_factory=list)
    at: tuple[int, int] | None = None
    over: bool = False

    def head(self) -> Run | None:
        """The next run to decide on; None at the end of the queue."""
        while True:
            while self.batch and self.batch[0].shape in self.blocked:
                self.batch.pop(0)
            if self.batch:
                return self.batch[0]
            if self.over:
                return None
            self._fetch()

    def close(self) -> None:
        """Nothing more of this queue."""
        self.batch, self.over = [], True

    def _fetch(self) -> None:
        waiting = in_order(self.queue)
        if len(self.blocked) <= MAX_NAMED:
            waiting = waiting.exclude(shape__in=self.blocked)
        if self.at is not None:
            rank, pk = self.at
            waiting = waiting.filter(rank__gte=rank).exclude(rank=rank, pk__lte=pk)
        # The index alone answers this, also where it has to pass over very many.
        found = list(waiting.values_list("rank", "pk", "shape")[:BATCH])
        self.over = len(found) < BATCH
        if found:
            self.at = found[-1][:2]
        news = [pk for _, pk, shape in found if shape not in self.blocked]
        # Asked as waiting again: a run may have been stopped or moved since the first question.
        self.batch = list(without_texts(in_order(self.queue).filter(pk__in=news))) if news else []


class Pass:
    """One walk over all queues. `generation` is this pass's claim."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.hosts = tuple(host_views())
        self.lines = [Line(queue) for queue in _open_queues()]
        self.held = _held_by_project()
        self.backend = ensure_embedded_backend()
        self.renewed = time.monotonic()
        self.known = {
            (v.queue_id, v.shape): (v.reason, v.data)
            for v in Verdict.objects.filter(queue__in=[line.queue for line in self.lines])
        }

    def run(self) -> int:
        """Place what fits; returns how many runs that were."""
        placed = 0
        try:
            for line, run in self._next():
                if time.monotonic() > self.renewed + RENEW_EVERY_S:
                    self._keep()
                placed += self._decide(line, run)
                if placed >= MAX_PLACED:
                    break
        except Outdated:
            log.warning("pass %s was overtaken by a newer one after placing %s runs", self.generation, placed)
        except Taken as taken:
            # Going on would place the runs behind before this one: another pass looks again from the start.
            log.info("pass %s: %s; looking again", self.generation, taken)
            PassState.objects.filter(pk=1).update(requested=True)
        return placed

    def _keep(self) -> None:
        """Renew this pass's claim. Call first in each transaction that writes; raises Outdated when it is lost."""
        until = timezone.now() + dt.timedelta(seconds=PASS_EXPIRES_S)
        if not PassState.objects.filter(pk=1, generation=self.generation).update(expires_at=until):
            raise Outdated
        self.renewed = time.monotonic()

    def _next(self) -> Iterator[tuple[Line, Run]]:
        """The next head of a queue, weighted fair between projects (ranks of queues are never compared)."""
        while True:
            heads = [(line, run) for line in self.lines if (run := line.head()) is not None]
            if not heads:
                return
            yield min(heads, key=lambda head: self._turn(*head))

    def _turn(self, line: Line, run: Run) -> tuple[float, int]:
        """Who goes first: the project that holds the least per weight, then the earlier submit."""
        gpus, cpus = self.held[line.queue.project_id]
        asks_gpus = run.spec.get("requirements", {}).get("gpu_count_min", 0) > 0
        return (gpus if asks_gpus else cpus) / line.queue.project.weight, run.seniority_us

    def _decide(self, line: Line, run: Run) -> bool:
        """Place one run, or say why its shape waits. True when it was placed."""
        outcome = self._place(run)
        if isinstance(outcome, Waits):
            line.blocked.add(run.shape)
            self._tell(line.queue, run.shape, outcome)
            return False
        line.batch.pop(0)
        try:
            won = self._apply(run, outcome)
        except Closed:
            line.close()
            return False
        if won:
            self.known.pop((line.queue.pk, run.shape), None)
            self.hosts = outcome.hosts
            gpus, cpus = self.held[line.queue.project_id]
            self.held[line.queue.project_id] = (
                gpus + sum(len(made.gpu_uuids) for made in outcome.fits),
                cpus + sum(made.cpus for made in outcome.fits),
            )
        return won

    def _place(self, run: Run) -> Placed | Waits:
        """Where it fits. A spec that an earlier version stored and this one can't read holds up nobody else."""
        try:
            spec = EffectiveSpec.model_validate(run.spec)
        except ValidationError:
            return Waits("backend_unavailable", {"code": "unreadable"})
        return place(spec, self.hosts)

    def _apply(self, run: Run, outcome: Placed) -> bool:
        """Write a placement: all nodes or none. False when the run has moved on.

        Raises Taken, Closed or Outdated, having written nothing.
        """
        now = timezone.now()
        with transaction.atomic():
            self._keep()
            if not Queue.objects.filter(pk=run.queue_id, paused=False).update(paused=False):
                raise Closed
            where = [
                {"node": node, "host": made.host_name, "gpus": len(made.gpu_uuids)}
                for node, made in enumerate(outcome.fits)
            ]
            if not move_run(run, RunStatus.PROVISIONING, now=now, data={"nodes": where}):
                return False
            jobs = [
                Job(
                    run=run,
                    attempt=run.attempt,
                    node=node,
                    backend=self.backend,
                    host_id=made.host_id,
                    cpus=made.cpus,
                    memory_mib=made.memory_mib,
                    gpus=list(made.gpu_uuids),
                    placed_at=now,
                )
                for node, made in enumerate(outcome.fits)
            ]
            Job.objects.bulk_create(jobs)
            claim_all(
                [
                    (job, Claim(made.host_id, made.cpus, made.memory_mib, made.gpu_uuids))
                    for job, made in zip(jobs, outcome.fits, strict=True)
                ]
            )
            if (run.queue_id, run.shape) in self.known:
                # A verdict ends with its reason; lists hear of it with the run's move. The next run is decided anew.
                Verdict.objects.filter(queue=run.queue_id, shape=run.shape).delete()
            hints.want_look(Job.objects.select_related("host").filter(pk__in=[job.pk for job in jobs]))
        return True

    def _tell(self, queue: Queue, shape: str, waits: Waits) -> None:
        """Keep the verdict on a shape, written only when it changes."""
        if self.known.get((queue.pk, shape)) == (waits.reason, waits.data):
            return
        with transaction.atomic():
            self._keep()
            Verdict.objects.update_or_create(
                queue=queue,
                shape=shape,
                defaults={"reason": waits.reason, "data": waits.data, "at": timezone.now()},
            )
            touch(queue.pk)


def _open_queues() -> list[Queue]:
    """Queues that have somebody waiting and aren't paused."""
    return list(Queue.objects.select_related("project").filter(paused=False, count__submitted__gt=0).order_by("pk"))


def _held_by_project() -> defaultdict[int, tuple[int, int]]:
    """GPUs and CPUs that each project's jobs hold now."""
    held: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    rows = Allocation.objects.values_list("job__run__project").annotate(cpus=Sum("cpus"), gpus=Count("gpu"))
    for project_id, cpus, gpus in rows:
        held[project_id] = (gpus, cpus)
    return held
