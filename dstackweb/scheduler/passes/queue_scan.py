"""The next runs of a queue for a pass, without those whose shape fits nowhere: once a shape is blocked, the rest is
merged from one ordered list per shape, so a run behind a hundred thousand that don't fit is found as fast."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Set
from itertools import islice

from django.db.models import QuerySet

from dstackweb.runs.models import Queue, Run
from dstackweb.runs.selectors import heads_of_shapes, in_order
from dstackweb.scheduler.passes.loading import read_specs
from dstackweb.spec.effective import EffectiveSpec

BATCH = 50
"""Runs per query."""
COLUMNS = (
    "queue", "project", "user", "name", "status", "attempt", "priority", "seniority_us", "rank", "shape", "queued_at",
    "sweep",
)  # fmt: skip
"""Columns that a pass reads: any other would cost a query per run. Specs are read once per shape."""
MAX_KEPT = 2000
READS = 20
"""The heads of very many shapes are read in so many steps: each step looks at all of them."""

_specs: dict[str, EffectiveSpec] = {}
"""Specs by shape, cached across passes, the oldest first. A shape hashes everything that decisions depend on: never
stale."""


class QueueScan:
    """The waiting runs of one queue. `head` is the next one; `pop` and `block` move past it."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.blocked: set[str] = set()
        self._batch: deque[Run] = deque()
        self._at: tuple[int, int] | None = None
        self._over = False
        self._shapes: _Shapes | None = None
        self._unreadable: set[str] = set()

    def head(self) -> Run | None:
        """The next run to decide on; None at the end of the queue."""
        while True:
            while self._batch and self._batch[0].shape in self.blocked:
                self._batch.popleft()
            if self._batch:
                return self._batch[0]
            if self._over:
                return None
            if self._at is not None and self.blocked:
                self._shapes = self._shapes or _Shapes(self.queue, self._at)
                return self._shapes.head(self.blocked)
            self._fetch()

    def pop(self) -> None:
        """Move past the head, which was placed."""
        if self._batch:
            self._batch.popleft()
        elif self._shapes is not None:
            self._shapes.pop()

    def block(self, shape: str) -> None:
        """Skip further runs of this shape."""
        self.blocked.add(shape)

    def close(self) -> None:
        """Skip the rest of the queue."""
        self._batch, self._over = deque(), True

    def spec(self, run: Run) -> EffectiveSpec | None:
        """The spec of the run's shape; None if this version cannot read it."""
        if run.shape not in _specs and run.shape not in self._unreadable:
            upcoming = self._shapes.upcoming() if self._shapes else ()
            self._read_specs([run, *self._batch, *islice(upcoming, BATCH)])
        return _specs.get(run.shape)

    def _fetch(self) -> None:
        found = list(_behind(in_order(self.queue), self._at)[:BATCH])
        self._over = len(found) < BATCH
        if found:
            self._at = found[-1].rank, found[-1].pk
        self._batch.extend(found)

    def _read_specs(self, runs: list[Run]) -> None:
        first = {run.shape: run.pk for run in reversed(runs) if run.shape not in _specs}
        for shape in list(islice(_specs, max(0, len(_specs) + len(first) - MAX_KEPT))):
            del _specs[shape]
        _specs.update(read_specs(first))
        self._unreadable |= first.keys() - _specs.keys()


class _Shapes:
    """The runs behind a position, merged from one ordered list per shape, each read only as needed."""

    def __init__(self, queue: Queue, after: tuple[int, int]) -> None:
        self._queue = queue
        self._heads = heads_of_shapes(queue, after)
        heapq.heapify(self._heads)
        self._read: dict[int, Run | None] = {}
        self._following: defaultdict[str, deque[Run]] = defaultdict(deque)

    def head(self, blocked: Set[str]) -> Run | None:
        """The next run of a shape that is not blocked."""
        while self._heads:
            _, pk, shape = self._heads[0]
            if shape in blocked:
                heapq.heappop(self._heads)
                self._read.pop(pk, None)
                continue
            if pk not in self._read:
                self._read_heads(blocked)
            if (run := self._read[pk]) is not None:
                return run
            self.pop()
        return None

    def pop(self) -> None:
        """Move to the next run of the head's shape."""
        rank, pk, shape = heapq.heappop(self._heads)
        self._read.pop(pk, None)
        following = self._following[shape]
        if not following:
            following.extend(_behind(in_order(self._queue).filter(shape=shape), (rank, pk))[:BATCH])
        if following:
            run = following.popleft()
            self._read[run.pk] = run
            heapq.heappush(self._heads, (run.rank, run.pk, shape))

    def upcoming(self) -> Iterator[Run]:
        """Runs that were read already, and not passed yet."""
        return (run for run in self._read.values() if run is not None)

    def _read_heads(self, blocked: Set[str]) -> None:
        unread = (head for head in self._heads if head[2] not in blocked and head[1] not in self._read)
        keys = [pk for _, pk, _ in heapq.nsmallest(max(BATCH, len(self._heads) // READS), unread)]
        # Filtered as waiting again: a run may have been stopped or moved since the first query.
        self._read |= dict.fromkeys(keys)
        self._read |= {run.pk: run for run in in_order(self._queue).filter(pk__in=keys).only(*COLUMNS)}


def _behind(waiting: QuerySet[Run], place: tuple[int, int] | None) -> QuerySet[Run]:
    """The runs behind a position (rank, id), with COLUMNS."""
    if place is not None:
        rank, pk = place
        waiting = waiting.filter(rank__gte=rank).exclude(rank=rank, pk__lte=pk)
    return waiting.only(*COLUMNS)
