"""The placement pass: takes waiting runs in order and places each where it fits (DESIGN 5).

One at a time, by generation; best effort; decided once per shape. Reads rows only, never a cloud. Decisions are made
one by one in memory, and written many at a time.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator

from django.db.models import Count, Sum
from django.utils import timezone

from dstackweb.backends.hosts.registration import ensure_embedded_backend
from dstackweb.backends.hosts.views import host_views
from dstackweb.runs.models import Allocation, Queue, Run, Verdict
from dstackweb.scheduler import apply, pass_claim
from dstackweb.scheduler.apply import STALE, Placement
from dstackweb.scheduler.lines import Line
from dstackweb.scheduler.pass_claim import Outdated
from dstackweb.scheduler.placement import Waits, place

log = logging.getLogger(__name__)

RENEW_EVERY_S = 2.0
WRITE_EVERY_S = 0.1
"""A placement waits this long at most for others to be written with."""
AT_ONCE = 50
"""Runs placed by one transaction."""
WORK_S = 20.0
"""How long one task goes from pass to pass; far below django-q's timeout, which would kill it with its claim."""
MAX_PLACED = 500
"""Runs placed by one pass; the next one is asked for at once when there may be more."""


def run_passes() -> int:
    """Pass until nobody asks for another, or for WORK_S; returns how many runs were placed.

    Leaves at once when a pass is at work elsewhere: its holder sees the request when it ends.
    """
    placed, began = 0, time.monotonic()
    while (generation := pass_claim.claim(timezone.now())) is not None:
        done = _run_one(generation)
        placed += done
        wanted = done >= MAX_PLACED or pass_claim.is_wanted()
        if not wanted or time.monotonic() - began > WORK_S:
            break
    return placed


def _run_one(generation: int) -> int:
    """One pass, whose claim is given back however it ends."""
    began, done = time.monotonic(), 0
    try:
        done = Pass(generation).run()
    finally:
        pass_claim.give_back(generation, (time.monotonic() - began) * 1000, done)
    return done


class Pass:
    """One walk over all queues. `generation` is this pass's claim."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.hosts = tuple(host_views())
        self.lines = [Line(queue) for queue in _open_queues()]
        self.held = _held_by_project()
        self.backend = ensure_embedded_backend()
        self.known = {
            (v.queue_id, v.shape): (v.reason, v.data)
            for v in Verdict.objects.filter(queue__in=[line.queue for line in self.lines])
        }
        self.written, self.written_at = 0, time.monotonic()
        self.placements: list[Placement] = []
        self.verdicts: dict[tuple[Queue, str], Waits | None] = {}

    def run(self) -> int:
        """Place what fits; returns how many runs that were."""
        try:
            for line, run in self._next():
                self._decide(line, run)
                if self._write_is_due():
                    self._write()
                if self.written + len(self.placements) >= MAX_PLACED:
                    break
            if self.placements or self.verdicts:
                self._write()
        except Outdated:
            log.warning("pass %s was overtaken by a newer one after placing %s runs", self.generation, self.written)
        except STALE as stale:
            # Going on would place the runs behind before this one: another pass looks again from the start.
            log.info("pass %s: %s; looking again", self.generation, stale)
            pass_claim.request()
        return self.written

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
        spec = line.spec(run)
        asks_gpus = spec is not None and spec.requirements.gpu_count_min > 0
        return (gpus if asks_gpus else cpus) / line.queue.project.weight, run.seniority_us

    def _decide(self, line: Line, run: Run) -> None:
        """Find a place for one run, or note why its shape waits."""
        # A spec that an earlier version stored and this one can't read holds up nobody else.
        spec = line.spec(run)
        outcome = place(spec, self.hosts) if spec else Waits("backend_unavailable", {"code": "unreadable"})
        key = line.queue.pk, run.shape
        if isinstance(outcome, Waits):
            line.block(run.shape)
            if self.known.get(key) != (outcome.reason, outcome.data):
                self.known[key] = outcome.reason, outcome.data
                self.verdicts[line.queue, run.shape] = outcome
            return
        line.pop()
        self.placements.append(Placement(run, line.queue, outcome.fits))
        if self.known.pop(key, None) is not None:
            # A verdict ends with its reason, in the transaction that places its shape. The next run is decided anew.
            self.verdicts[line.queue, run.shape] = None
        self.hosts = outcome.hosts
        gpus, cpus = self.held[line.queue.project_id]
        self.held[line.queue.project_id] = (
            gpus + sum(len(fit.gpu_uuids) for fit in outcome.fits),
            cpus + sum(fit.cpus for fit in outcome.fits),
        )

    def _write_is_due(self) -> bool:
        waited = time.monotonic() - self.written_at
        return len(self.placements) >= AT_ONCE or waited > (WRITE_EVERY_S if self.placements else RENEW_EVERY_S)

    def _write(self) -> None:
        """Write what was decided since the last time, which renews this pass's claim too.

        When something is no longer as it was read, all up to that placement is written, and one of STALE raised.
        """
        placements, verdicts = self.placements, self.verdicts
        self.placements, self.verdicts = [], {}
        try:
            apply.write(self.generation, self.backend, placements, verdicts)
        except STALE:
            for one in placements:
                ended = {key: None for key, waits in verdicts.items() if key == (one.queue, one.run.shape)}
                apply.write(self.generation, self.backend, [one], ended)
                self.written += 1
            raise
        self.written += len(placements)
        self.written_at = time.monotonic()


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
