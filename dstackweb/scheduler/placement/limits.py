"""A queue's limits and what its runs use of them, from their placement to their end, with the GPUs that their specs
request; budgets and fair shares of projects (docs/design.md#scheduling)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal

from dstackweb.runs.codes import BudgetData, LimitCode, LimitData, Reclaim, WaitReason
from dstackweb.scheduler.placement.hosts import Wait
from dstackweb.spec.effective import EffectiveSpec


@dataclass(frozen=True)
class QueueLimits:
    """Limits of one queue; None is no limit, 0 lets nothing start."""

    max_running: int | None = None
    max_gpus: int | None = None
    max_running_per_user: int | None = None
    max_gpus_per_user: int | None = None
    cohort: tuple[int, str] | None = None
    """Project and name, of a queue with `max_gpus` that lends and borrows."""
    borrow_gpus: int | None = None
    lend_gpus: int | None = None
    reclaim: Reclaim = Reclaim.NEVER

    @property
    def lends(self) -> int:
        """GPUs that other queues of its cohort may use while its own runs don't."""
        return min(self.max_gpus or 0, self.max_gpus or 0 if self.lend_gpus is None else self.lend_gpus)

    @property
    def keeps(self) -> int:
        """GPUs that only its own runs may use."""
        return (self.max_gpus or 0) - self.lends


@dataclass
class Cohort:
    """Queues that lend each other GPUs: each queue's limits by id, and how many of the lent ones are in use. A queue's
    runs use what it keeps first, then the shared ones, which are what all lend."""

    queues: dict[int, QueueLimits] = field(default_factory=dict)
    shared: int = 0
    used: int = 0

    @classmethod
    def all(cls, limits: Mapping[int, QueueLimits]) -> dict[int, Cohort]:
        """The cohorts by the ids of their queues."""
        found: defaultdict[tuple[int, str], Cohort] = defaultdict(cls)
        for queue_id, each in limits.items():
            if each.cohort is not None and each.max_gpus is not None:
                found[each.cohort].queues[queue_id] = each
                found[each.cohort].shared += each.lends
        return {queue_id: cohort for cohort in found.values() for queue_id in cohort.queues}

    def most(self, queue_id: int) -> int:
        """The most GPUs that a queue's runs may hold while the others hold none."""
        limits = self.queues[queue_id]
        possible = limits.keeps + self.shared
        if limits.borrow_gpus is None:
            return possible
        return min(possible, (limits.max_gpus or 0) + limits.borrow_gpus)

    def of_shared(self, queue_id: int, gpus: int) -> int:
        """How many shared GPUs a queue uses whose runs hold so many."""
        return max(0, gpus - self.queues[queue_id].keeps)


@dataclass
class QueueUsage:
    """Placed runs and their GPUs, per (queue, user); the user None is the whole queue."""

    runs: defaultdict[tuple[int, int | None], int] = field(default_factory=lambda: defaultdict(int))
    gpus: defaultdict[tuple[int, int | None], int] = field(default_factory=lambda: defaultdict(int))
    cohorts: dict[int, Cohort] = field(default_factory=dict)
    """By queue id; their `used` is kept with the counts."""

    @classmethod
    def of(cls, placed: Iterable[tuple[int, int, int]], limits: Mapping[int, QueueLimits] | None = None) -> QueueUsage:
        """Add up placed runs: (queue, user, GPUs) of each; `limits` are those of all queues of the cohorts."""
        tally = cls(cohorts=Cohort.all(limits or {}))
        for counted in placed:
            tally.add(*counted)
        return tally

    def add(self, queue_id: int, user_id: int, gpus: int) -> None:
        self._count(queue_id, user_id, 1, gpus)

    def remove(self, queue_id: int, user_id: int, gpus: int) -> None:
        """Count a run less, which has ended."""
        self._count(queue_id, user_id, -1, -gpus)

    def _count(self, queue_id: int, user_id: int, runs: int, gpus: int) -> None:
        before = self.gpus[queue_id, None]
        for key in ((queue_id, None), (queue_id, user_id)):
            self.runs[key] += runs
            self.gpus[key] += gpus
        if (cohort := self.cohorts.get(queue_id)) is not None:
            cohort.used += cohort.of_shared(queue_id, before + gpus) - cohort.of_shared(queue_id, before)

    @contextmanager
    def without(self, ended: Sequence[tuple[int, int, int]]) -> Iterator[None]:
        """As it is once runs with these (queue, user, GPUs) have ended, for a `with` block."""
        for counted in ended:
            self.remove(*counted)
        try:
            yield
        finally:
            for counted in ended:
                self.add(*counted)

    def would_borrow(self, queue_id: int, gpus: int) -> bool:
        """Whether a queue's runs hold more than its own limit with one more run of so many GPUs, in a cohort."""
        cohort = self.cohorts.get(queue_id)
        return cohort is not None and self.gpus[queue_id, None] + gpus > (cohort.queues[queue_id].max_gpus or 0)

    def above_limits(self, queue_id: int) -> dict[int, int]:
        """By queue: how many GPUs above their own limits the other queues of its cohort hold, those that borrow."""
        cohort = self.cohorts[queue_id]
        held = {other: self.gpus[other, None] - (each.max_gpus or 0) for other, each in cohort.queues.items()}
        return {other: over for other, over in held.items() if over > 0 and other != queue_id}

    def borrowed(self, queue_id: int) -> tuple[int, list[int]]:
        """How many GPUs above its limit a queue's runs hold, and which queues of its cohort leave some of theirs."""
        cohort = self.cohorts.get(queue_id)
        if cohort is None:
            return 0, []
        over = max(0, self.gpus[queue_id, None] - (cohort.queues[queue_id].max_gpus or 0))
        idle = [
            other
            for other, limits in cohort.queues.items()
            if other != queue_id and limits.lends and self.gpus[other, None] < (limits.max_gpus or 0)
        ]
        return over, idle if over else []


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
    """The limits that one more run of this member with `gpus` GPUs would exceed, the most permanent first. `never` in
    the data: the run alone requests more."""
    mine, all_ = (queue_id, user_id), (queue_id, None)
    cohort, most = tally.cohorts.get(queue_id), limits.max_gpus
    if cohort is not None:
        most = cohort.most(queue_id)
    each = [
        (WaitReason.USER_LIMIT, LimitCode.MAX_RUNNING_PER_USER, limits.max_running_per_user, tally.runs[mine], 1),
        (WaitReason.USER_LIMIT, LimitCode.MAX_GPUS_PER_USER, limits.max_gpus_per_user, tally.gpus[mine], gpus),
        (WaitReason.QUEUE_LIMIT, LimitCode.MAX_RUNNING, limits.max_running, tally.runs[all_], 1),
        (WaitReason.QUEUE_LIMIT, LimitCode.MAX_GPUS, most, tally.gpus[all_], gpus),
    ]
    over = [
        _over(reason, code, limit, used, asked)
        for reason, code, limit, used, asked in each
        # A run without GPUs never exceeds a GPU limit, even where a lowered limit is exceeded already.
        if limit is not None and asked and used + asked > limit
    ]
    if cohort is not None and gpus and most is not None and gpus <= most:
        held = tally.gpus[all_]
        more = cohort.of_shared(queue_id, held + gpus) - cohort.of_shared(queue_id, held)
        if more and cohort.used + more > cohort.shared:
            shared = _over(WaitReason.QUEUE_LIMIT, LimitCode.COHORT_GPUS, cohort.shared, cohort.used, more)
            over.append(Wait(shared.reason, {**shared.data, "never": False}))
    return sorted(over, key=lambda waits: not waits.data["never"])


def waits_for_gpu_limit(waits: Wait) -> bool:
    """Whether it waits for a limit of GPUs of its queue or cohort, which runs that are stopping still count towards."""
    codes = (LimitCode.MAX_GPUS, LimitCode.COHORT_GPUS)
    return waits.reason == WaitReason.QUEUE_LIMIT and waits.data.get("code") in codes


def _over(reason: WaitReason, code: LimitCode, limit: int, used: int, asked: int) -> Wait:
    data: LimitData = {"code": code, "limit": limit, "used": used, "asked": asked, "never": asked > limit}
    return Wait(reason, data)


@dataclass(frozen=True)
class Budget:
    """A project's budget for this month and what it has spent, USD."""

    limit: Decimal
    spent: Decimal

    @property
    def is_spent(self) -> bool:
        """Whether it blocks further paid placements."""
        return self.spent >= self.limit


def budget_data(budget: Budget) -> BudgetData:
    """Budget and spending, the latter in steps of 1 % so that the reason changes rarely."""
    step = max(budget.limit / 100, Decimal("0.01"))
    return {"budget": str(budget.limit), "spent": str((budget.spent // step * step).quantize(Decimal("0.01")))}


@dataclass(frozen=True)
class ProjectUsage:
    """What a project's jobs hold on hosts."""

    gpus: int = 0
    cpus: int = 0

    def plus(self, gpus: int, cpus: int) -> ProjectUsage:
        return ProjectUsage(self.gpus + gpus, self.cpus + cpus)


def fair_share_key(
    held: ProjectUsage, weight: int, asks_gpus: bool, seniority_us: int, *, borrows: bool = False
) -> tuple[float, bool, int]:
    """Sort key, smallest first: GPUs per weight (CPUs for a run without GPUs), then a run that borrows nothing, then
    the earlier submission."""
    return (held.gpus if asks_gpus else held.cpus) / weight, borrows, seniority_us
