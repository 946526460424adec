"""The placement pass (docs/design.md#scheduling): takes waiting runs in order and places each where it fits, one pass
at a time. It reads rows only, never a cloud; decisions are made one by one in memory, and written in batches."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from django.db.models import Count, Sum
from django.utils import timezone

from dstackweb.backends.hosts.fit import HOSTS
from dstackweb.backends.hosts.inventory import ensure_embedded_backend
from dstackweb.lib import sql
from dstackweb.runs import dependencies
from dstackweb.runs.codes import Unavailable, WaitReason
from dstackweb.runs.models import Allocation, Job, Queue, Run, Verdict
from dstackweb.runs.past_log import StoredWait
from dstackweb.runs.sweeps import creation as sweeps
from dstackweb.scheduler import restored, utilization
from dstackweb.scheduler.cloud.backend_offers import OfferReader
from dstackweb.scheduler.models import ClaimLost, PassRequest, PassState
from dstackweb.scheduler.passes import apply, loading
from dstackweb.scheduler.passes.apply import STALE, Displacement, Placement, ReservationChange
from dstackweb.scheduler.passes.loading import StoredReservation
from dstackweb.scheduler.passes.queue_scan import QueueScan
from dstackweb.scheduler.placement.displacing import Displacer
from dstackweb.scheduler.placement.hosts import HostPlacement, Wait, by_permanence
from dstackweb.scheduler.placement.limits import ProjectUsage, fair_share_key, gpus_requested

log = logging.getLogger(__name__)

Pause = Callable[[float], object]
"""Waits so many seconds: `time.sleep` in a worker, which does nothing else meanwhile; tests pass another."""
ALL_SHAPES = ""
"""The shape of a wait reason that applies to a whole queue."""
RENEW_EVERY_S = 2.0
WRITE_EVERY_S = 0.2
"""A placement waits this long at most for its batch."""
MAX_WRITTEN = 50
"""Runs placed by one transaction."""
GATHER_S, LOOK_S = 0.25, 0.05
"""Runs that are added to full queues share a pass for so long; how often an urgent request is looked for meanwhile."""
WORK_S = 20.0
"""How long one task runs passes, far below django-q's timeout."""
MAX_REVIEWED = 200
"""Shapes decided in a queue that is paused or at its limit, so that runs that can never start show it."""
MAX_PLACED = 500
"""Runs placed by one pass; the next one follows at once when there may be more."""


def run_passes(pause: Pause = time.sleep) -> int:
    """Run passes while they are requested, for WORK_S at most; returns how many runs were placed. While another process
    runs a pass, that one sees the request."""
    placed, began = 0, time.monotonic()
    while (generation := PassState.claim(timezone.now())) is not None:
        done = _run_one(generation)
        placed += done
        wanted = done >= MAX_PLACED or PassRequest.is_waiting()
        if not wanted or time.monotonic() - began > WORK_S:
            break
        _gather(pause)
    return placed


def run_requested(pause: Pause = time.sleep) -> int:
    """`run_passes`, unless a pass that began after the request has done its work: many requests make few passes."""
    if not PassRequest.is_waiting():
        return 0
    _gather(pause)
    return run_passes(pause)


def _gather(pause: Pause) -> None:
    """Until GATHER_S after a pass that left all waiting, wait for more runs to decide on, or for an urgent request."""
    ended = PassState.objects.filter(pk=1, is_full=True).values_list("ended_at", flat=True).first()
    since = (timezone.now() - ended).total_seconds() if ended else GATHER_S
    for _look in range(math.ceil((GATHER_S - since) / LOOK_S) if since >= 0 else 0):
        if PassRequest.is_urgent():
            return
        pause(LOOK_S)


def _run_one(generation: int) -> int:
    """Run one pass, and release its claim however it ends."""
    began, done, has_work = time.monotonic(), 0, False
    try:
        if not restored.settle(timezone.now()):
            return 0
        sweeps.settle(timezone.now())
        dependencies.settle(timezone.now())
        if has_work := bool(sql.rows(_HAS_WORK, ())):
            done = PlacementPass(generation).run()
    finally:
        PassState.release(generation, (time.monotonic() - began) * 1000, done, is_full=has_work and not done)
    if done:
        sweeps.settle(timezone.now())
        utilization.record_next_runs(timezone.now())
    return done


class PlacementPass:
    """One pass over all queues. `generation` is its claim."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.stored = loading.load_reservations()
        queues = list(Queue.objects.select_related("project").filter(count__submitted__gt=0).order_by("pk"))
        self.scans = [QueueScan(queue) for queue in queues if not queue.paused]
        self.paused = [QueueScan(queue) for queue in queues if queue.paused]
        reader = OfferReader()
        self.backends = {HOSTS: ensure_embedded_backend(), **reader.backends}
        beside = loading.cohort_queues(queues)
        self.queues = {queue.pk: queue for queue in (*queues, *beside)}
        self.capacity = loading.load_capacity(queues, reader, timezone.now(), self.stored, beside)
        self.displacer = Displacer(self.capacity)
        self.held = _usage_by_project()
        self.known: apply.KnownWaits = {
            (v.queue_id, v.shape): StoredWait(v.reason, v.data, v.logged_at)
            for v in Verdict.objects.filter(queue__in=queues)
        }
        self.written, self.written_at = 0, time.monotonic()
        self.placements: list[Placement] = []
        self.displacements: list[Displacement] = []
        self.verdicts: dict[tuple[Queue, str], Wait | None] = {}

    def run(self) -> int:
        """Place what fits; returns how many runs were placed."""
        try:
            self.capacity.review_reservations()
            for scan, run in self._next():
                self._decide(scan, run)
                if self._write_is_due():
                    self._write()
                if self.written + len(self.placements) >= MAX_PLACED:
                    break
            for scan in self.paused:
                self._review(scan, Wait(WaitReason.QUEUE_PAUSED))
            if self.placements or self.verdicts or self.displacements or self._changes():
                self._write()
        except ClaimLost:
            log.warning("pass %s lost its claim to a newer one after placing %s runs", self.generation, self.written)
        except STALE as stale:
            # Continuing would place later runs before this one: another pass starts over.
            log.info("pass %s: %s, starting over", self.generation, stale)
            PassRequest.make()
        return self.written

    def _next(self) -> Iterator[tuple[QueueScan, Run]]:
        """The queues' first runs in fair-share order between projects. Ranks of queues are never compared."""
        while True:
            heads = [(scan, run) for scan in self.scans if (run := self._head(scan)) is not None]
            if not heads:
                return
            yield min(heads, key=lambda head: self._turn(*head))

    def _head(self, scan: QueueScan) -> Run | None:
        """The next run of a queue, unless a limit blocks all of it."""
        run = scan.head()
        if run is None:
            return None
        waits = self.capacity.queue_wait(scan.queue.pk)
        if waits is None:
            self._clear_wait(scan.queue, ALL_SHAPES)
            return run
        self._note_wait(scan.queue, ALL_SHAPES, waits)
        self._review(scan, waits)
        scan.close()
        return None

    def _review(self, scan: QueueScan, whole: Wait) -> None:
        """Note which shapes of a queue that starts nothing now wait for something more permanent than that."""
        for _shape in range(MAX_REVIEWED):
            if (run := scan.head()) is None:
                return
            spec = scan.spec(run)
            outcome = self.capacity.decide(loading.waiting_run(run, scan.queue, spec)) if spec else None
            if isinstance(outcome, Wait) and by_permanence([whole, outcome])[0] is outcome:
                self._note_wait(scan.queue, run.shape, outcome)
            else:
                self._clear_wait(scan.queue, run.shape)
            scan.block(run.shape)

    def _turn(self, scan: QueueScan, run: Run) -> tuple[float, bool, int]:
        """The fair-share key of a queue's first run."""
        queue, spec = scan.queue, scan.spec(run)
        gpus = gpus_requested(spec) if spec is not None else 0
        borrows = gpus > 0 and self.capacity.queue_usage.would_borrow(queue.pk, gpus)
        held = self.held[queue.project_id]
        return fair_share_key(held, queue.project.weight, gpus > 0, run.seniority_us, borrows=borrows)

    def _decide(self, scan: QueueScan, run: Run) -> None:
        """Place one run, or note why its shape waits."""
        spec = scan.spec(run)
        if spec is None:
            # A spec that this version cannot read blocks no other run.
            self._skip(scan, run, Wait(WaitReason.BACKEND_UNAVAILABLE, {"code": Unavailable.UNREADABLE}))
            return
        waiting = loading.waiting_run(run, scan.queue, spec)
        outcome = self.capacity.decide(waiting)
        if isinstance(outcome, Wait):
            self._skip(scan, run, outcome)
            if victims := self.displacer.displace_for(waiting, run.priority, outcome):
                others = [self.queues[queue_id] for queue_id in sorted({one.queue_id for one in victims})]
                self.displacements.append(Displacement(run, scan.queue, victims, others))
            else:
                self.capacity.reserve_for(waiting, outcome)
            return
        scan.pop()
        self.placements.append(Placement(run, scan.queue, outcome))
        # Deleted in the transaction that places the run; the next run of the shape is decided anew.
        self._clear_wait(scan.queue, run.shape)
        self.capacity.take(waiting, outcome)
        if isinstance(outcome, HostPlacement):
            self.held[scan.queue.project_id] = self.held[scan.queue.project_id].plus(
                gpus=sum(len(fit.gpu_uuids) for fit in outcome.fits), cpus=sum(fit.cpus for fit in outcome.fits)
            )

    def _skip(self, scan: QueueScan, run: Run, waits: Wait) -> None:
        scan.block(run.shape)
        self._note_wait(scan.queue, run.shape, waits)

    def _note_wait(self, queue: Queue, shape: str, waits: Wait) -> None:
        """Note a wait reason, unless it is known."""
        now = self._wait(queue, shape)
        if now is None or (now.reason, now.data) != (waits.reason, waits.data):
            self.verdicts[queue, shape] = waits

    def _clear_wait(self, queue: Queue, shape: str) -> None:
        if self._wait(queue, shape) is not None:
            self.verdicts[queue, shape] = None

    def _wait(self, queue: Queue, shape: str) -> Wait | StoredWait | None:
        """The wait reason to be written, or else the one of its row."""
        return self.verdicts.get((queue, shape), self.known.get((queue.pk, shape)))

    def _changes(self) -> list[ReservationChange]:
        """The reservations that differ from the rows, in the order of runs."""
        stored, rows, found = {row.run_id: row for row in self.stored}, self.capacity.turns.rows, []
        queues = {run_id: reserved.run.queue_id for run_id, reserved in rows.items()}
        queues |= {row.run_id: row.queue_id for row in self.stored}
        for run_id, queue_id in sorted(queues.items()):
            before, after = stored.get(run_id), rows.get(run_id)
            if before is None or after is None or before.reserved != after:
                why = self.capacity.turns.why.get(run_id) or (before.why if before else "")
                found.append(ReservationChange(run_id, queue_id, before, after, why))
        return found

    def _write_is_due(self) -> bool:
        waited = time.monotonic() - self.written_at
        return len(self.placements) >= MAX_WRITTEN or waited > (WRITE_EVERY_S if self.placements else RENEW_EVERY_S)

    def _write(self) -> None:
        """Write what was decided since the last write, which also renews the claim. If something has changed since it
        was read, all placements before it are written, and one of STALE raised."""
        placements, verdicts, displacements = self.placements, self.verdicts, self.displacements
        making_room, everything = {one.run.pk for one in displacements}, self._changes()
        changes = [change for change in everything if change.run_id not in making_room]
        reserved = [change for change in everything if change.run_id in making_room]
        self.placements, self.verdicts, self.displacements = [], {}, []
        try:
            beside = self._lenders(placements)
            apply.write_decisions(self.generation, self.backends, placements, verdicts, self.known, changes, beside)
        except STALE:
            for one in placements:
                ended = {key: None for key, waits in verdicts.items() if key == (one.queue, one.run.shape)}
                ends = [change for change in changes if change.run_id == one.run.pk]
                beside = self._lenders([one])
                apply.write_decisions(self.generation, self.backends, [one], ended, self.known, ends, beside)
                self.written += 1
            raise
        self.written += len(placements)
        if displacements:
            apply.write_displacements(self.generation, displacements, reserved)
        self.written_at = time.monotonic()
        self.stored = [StoredReservation.of(row) for row in self.capacity.turns.rows.values()]

    def _lenders(self, placements: Sequence[Placement]) -> list[Queue]:
        """The queues of their cohorts, on whose limits and bounds placements depend."""
        cohorts = {(one.queue.project_id, one.queue.cohort) for one in placements if one.queue.cohort}
        return [queue for queue in self.queues.values() if (queue.project_id, queue.cohort) in cohorts]


_HAS_WORK = """
SELECT 1 FROM runs_queue queue JOIN runs_queuecount count ON count.queue_id = queue.id
WHERE count.submitted > 0
UNION ALL SELECT 1 FROM scheduler_reservation
LIMIT 1
"""
"""Whether a run waits, or a reservation is to be reviewed: most passes are requested by ends, and find neither."""


def _usage_by_project() -> defaultdict[int, ProjectUsage]:
    """GPUs and CPUs that each project's jobs hold now. Not joined: SQLite would scan all jobs, and PostgreSQL with old
    statistics all runs."""
    of_job = {
        job_id: (gpus, cpus)
        for job_id, gpus, cpus in Allocation.objects.values_list("job_id").annotate(gpus=Count("gpu"), cpus=Sum("cpus"))
    }
    run_of = dict(Job.objects.filter(pk__in=of_job).values_list("pk", "run_id"))
    project_of = dict(Run.objects.filter(pk__in=set(run_of.values())).values_list("pk", "project_id"))
    held: defaultdict[int, ProjectUsage] = defaultdict(ProjectUsage)
    for job_id, run_id in run_of.items():
        if (project_id := project_of.get(run_id)) is not None:
            held[project_id] = held[project_id].plus(*of_job[job_id])
    return held
