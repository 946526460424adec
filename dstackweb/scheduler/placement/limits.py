"""A queue's limits and what its runs use of them, and fair shares between projects (docs/design.md#scheduling).

A run counts from its placement until it has ended, with the GPUs that its spec requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dstackweb.runs.codes import LimitCode, LimitData, WaitReason
from dstackweb.scheduler.placement.hosts import Wait
from dstackweb.spec.effective import EffectiveSpec


@dataclass(frozen=True)
class QueueLimits:
    """Limits of one queue; None is no limit, 0 lets nothing start."""

    max_running: int | None = None
    max_gpus: int | None = None
    max_running_per_user: int | None = None
    max_gpus_per_user: int | None = None


@dataclass
class QueueUsage:
    """Placed runs and their GPUs, per (queue, user); the user None is the whole queue."""

    runs: defaultdict[tuple[int, int | None], int] = field(default_factory=lambda: defaultdict(int))
    gpus: defaultdict[tuple[int, int | None], int] = field(default_factory=lambda: defaultdict(int))

    @classmethod
    def of(cls, placed: Iterable[tuple[int, int, int]]) -> QueueUsage:
        """Add up placed runs: (queue, user, GPUs) of each."""
        tally = cls()
        for counted in placed:
            tally.add(*counted)
        return tally

    def add(self, queue_id: int, user_id: int, gpus: int) -> None:
        """Count one more placed run and its GPUs."""
        self._count(queue_id, user_id, 1, gpus)

    def remove(self, queue_id: int, user_id: int, gpus: int) -> None:
        """Count a run less, which has ended."""
        self._count(queue_id, user_id, -1, -gpus)

    def _count(self, queue_id: int, user_id: int, runs: int, gpus: int) -> None:
        for key in ((queue_id, None), (queue_id, user_id)):
            self.runs[key] += runs
            self.gpus[key] += gpus


def gpus_requested(spec: EffectiveSpec) -> int:
    """The GPUs of all nodes of a run."""
    return spec.nodes * spec.requirements.gpu_count_min


def queue_wide_limit(limits: QueueLimits, tally: QueueUsage, queue_id: int) -> Wait | None:
    """Why nothing in the queue may start now; None when something may."""
    used = tally.runs[queue_id, None]
    if limits.max_running is None or used < limits.max_running:
        return None
    return _over(WaitReason.QUEUE_LIMIT, LimitCode.MAX_RUNNING, limits.max_running, used, 1)


def exceeded_limits(limits: QueueLimits, tally: QueueUsage, queue_id: int, user_id: int, gpus: int) -> list[Wait]:
    """The limits that one more run of this member with `gpus` GPUs would exceed, the most permanent first.

    `never` in the data: the run alone requests more than the limit.
    """
    mine, all_ = (queue_id, user_id), (queue_id, None)
    each = [
        (WaitReason.USER_LIMIT, LimitCode.MAX_RUNNING_PER_USER, limits.max_running_per_user, tally.runs[mine], 1),
        (WaitReason.USER_LIMIT, LimitCode.MAX_GPUS_PER_USER, limits.max_gpus_per_user, tally.gpus[mine], gpus),
        (WaitReason.QUEUE_LIMIT, LimitCode.MAX_RUNNING, limits.max_running, tally.runs[all_], 1),
        (WaitReason.QUEUE_LIMIT, LimitCode.MAX_GPUS, limits.max_gpus, tally.gpus[all_], gpus),
    ]
    over = [
        _over(reason, code, limit, used, asked)
        for reason, code, limit, used, asked in each
        # A run without GPUs never exceeds a GPU limit, even where a lowered limit is exceeded already.
        if limit is not None and asked and used + asked > limit
    ]
    return sorted(over, key=lambda waits: not waits.data["never"])


def _over(reason: WaitReason, code: LimitCode, limit: int, used: int, asked: int) -> Wait:
    data: LimitData = {"code": code, "limit": limit, "used": used, "asked": asked, "never": asked > limit}
    return Wait(reason, data)


@dataclass(frozen=True)
class ProjectUsage:
    """What a project's jobs hold on hosts."""

    gpus: int = 0
    cpus: int = 0

    def plus(self, gpus: int, cpus: int) -> ProjectUsage:
        """This usage plus more."""
        return ProjectUsage(self.gpus + gpus, self.cpus + cpus)


def fair_share_key(held: ProjectUsage, weight: int, asks_gpus: bool, seniority_us: int) -> tuple[float, int]:
    """Sort key, smallest first: GPUs per weight (CPUs for a run without GPUs), then the earlier submission."""
    return (held.gpus if asks_gpus else held.cpus) / weight, seniority_us
