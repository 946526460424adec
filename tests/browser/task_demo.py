"""Tasks in every state, as the pages of progress show them: many prefixes, many groups, failures."""

from __future__ import annotations

import random
import time

from django.db import transaction

from dstackweb.progress import counter_rows, counters
from dstackweb.progress.counters import Delta
from dstackweb.progress.models import Scope, TaskFailure, TaskPrefix
from dstackweb.progress.states import TaskState
from dstackweb.runs.models import Run

S = TaskState
GROUPS = 120
WORK: dict[str, dict[TaskState, int]] = {
    "train-baseline": {S.MEMORY: 41_210, S.ERRED: 12, S.PROCESSING: 640, S.QUEUED: 8_138},
    "evaluate-checkpoint": {S.MEMORY: 3_120, S.PROCESSING: 64, S.QUEUED: 800, S.NO_WORKER: 16},
    "shuffle": {S.MEMORY: 1_700, S.ERRED: 12, S.PROCESSING: 300, S.QUEUED: 1_280, S.WAITING: 20_000},
    "tokenize-shard": {S.MEMORY: 8_000, S.FORGOTTEN: 4_000},
    "sweep-lr": {S.MEMORY: 210, S.ERRED: 41, S.PROCESSING: 11, S.QUEUED: 138},
    "export-onnx": {S.NO_WORKER: 40},
    "ablate-the-attention-heads-of-the-long-named-experiment": {S.MEMORY: 900, S.PROCESSING: 20, S.WAITING: 4_080},
    "getitem": {S.FORGOTTEN: 6_000, S.RELEASED: 1_200, S.MEMORY: 300},
    "report": {S.WAITING: 1},
    "read-parquet": {S.MEMORY: 512},
    "reindex": {S.RELEASED: 250, S.ERRED: 6},
}
MESSAGE = """RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity)
  File "/work/train.py", line 214, in step
    loss.backward()"""


def fill(run: Run) -> None:
    """Some eighty thousand tasks inside the first attempt of a run."""
    scope = counters.ensure_scope(run.project_id, run.pk, 1)
    now = time.time_ns() // 1_000_000
    chance = random.Random(7)
    late = {prefix: states.get(S.MEMORY, 0) // 8 for prefix, states in WORK.items() if S.PROCESSING in states}
    for prefix, states in WORK.items():
        then = late.get(prefix, 0)
        before = states | {S.MEMORY: states.get(S.MEMORY, 0) - then, S.PROCESSING: states.get(S.PROCESSING, 0) + then}
        shift(scope, {(prefix, f"{prefix}-{n}"): one for n, one in enumerate(_groups(before, chance))}, now - 300_000)
    for prefix, finished in late.items():
        each, rest = divmod(finished, GROUPS)
        lately = {(prefix, f"{prefix}-{n}"): each + (n < rest) for n in range(GROUPS)}
        moved = {place: Delta({S.MEMORY: n, S.PROCESSING: -n}) for place, n in lately.items() if n}
        shift(scope, moved, now - 20_000)
    fail(scope, "sweep-lr", 14, now)


def _groups(states: dict[TaskState, int], chance: random.Random) -> list[Delta]:
    """These tasks in at most so many groups."""
    groups = [Delta() for _ in range(min(GROUPS, sum(states.values())))]
    for state, count in states.items():
        each, rest = divmod(count, len(groups))
        for place, group in enumerate(groups):
            there = each + (place < rest)
            if there:
                group.states[state] = there
                if state is S.MEMORY:
                    group.duration_n += there
                    group.duration_s += there * chance.uniform(0.4, 3)
    return groups


def shift(scope_id: int, deltas: dict[tuple[str, str], Delta], now_ms: int | None = None) -> None:
    """Counters change, as if tasks had."""
    with transaction.atomic():
        scope = counter_rows.lock_scope(scope_id)
        counters.shift(scope, deltas, now_ms if now_ms is not None else time.time_ns() // 1_000_000)


def fail(scope_id: int, prefix: str, n: int, now_ms: int) -> None:
    """What so many failed tasks said."""
    row = TaskPrefix.objects.get(scope_id=scope_id, name=prefix)
    TaskFailure.objects.bulk_create(
        TaskFailure(
            scope_id=scope_id, prefix=row, key=f"{prefix}-{i}-{i * 7919 % 97}", group=f"{prefix}-{i}",
            message=MESSAGE if i % 3 else "", seq=i, at_ms=now_ms - i * 47_000,
        )
        for i in range(n)
    )  # fmt: skip


def ensure_scope(run: Run) -> int:
    """Where its tasks are counted."""
    return int(Scope.objects.get(run_id=run.pk).pk)
