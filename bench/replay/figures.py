"""What a replay shows: waiting time by size and member, GPU use, fairness between members, work lost to preemption."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.replay.deployment import WARM_UP, Deployment, Policy, Record
from bench.replay.jobs import HOUR, MEMBERS, SIZES, Job

QUANTILES = (50, 90, 99)
GROUPS = {"2 busiest members": (1, 2), "next 8": (3, 10), "other 30": (11, MEMBERS)}
"""A twentieth of the members, the rest of the first quarter, all others."""


@dataclass(frozen=True)
class Figures:
    """Waiting times are hours, by quantile; shares are 0 to 1."""

    by_size: dict[str, tuple[float, ...]]
    by_member: dict[str, tuple[float, ...]]
    gpu_use: float
    fairness: float
    displaced: int
    lost: float
    """Of the GPU time of all jobs: what displaced ones had done, and do again."""
    passes: int


def replayed(policy: Policy, jobs: Sequence[Job], hosts: int) -> Figures:
    """Replay the jobs and add up."""
    deployment = Deployment(policy, hosts)
    records = deployment.replay(jobs)[len(jobs) // WARM_UP :]
    begin, end = deployment.window
    gpus = sum(len(host.gpus) for host in deployment.hosts.values())
    return Figures(
        by_size={size: waits(records, lambda job, size=size: job.size == size) for size in SIZES},
        by_member={
            name: waits(records, lambda job, first=first, last=last: first <= job.member <= last)
            for name, (first, last) in GROUPS.items()
        },
        gpu_use=deployment.held_s / ((end - begin) * gpus),
        fairness=jain(progress_of_members(records).values()),
        displaced=sum(one.displaced for one in records),
        lost=sum(one.lost_s * one.job.all_gpus for one in records) / sum(one.job.work_s for one in records),
        passes=deployment.passes,
    )  # fmt: skip


def waits(records: Iterable[Record], counts: Callable[[Job], bool]) -> tuple[float, ...]:
    """The quantiles of the hours that these jobs waited, those after a preemption included."""
    hours = sorted(one.queued_s / HOUR for one in records if counts(one.job))
    return tuple(hours[len(hours) * share // 100] if hours else math.nan for share in QUANTILES)


def progress_of_members(records: Iterable[Record]) -> dict[int, float]:
    """By member, weighted by GPUs: of the time from submission to end, the share in which their jobs did their work."""
    work: defaultdict[int, float] = defaultdict(float)
    whole: defaultdict[int, float] = defaultdict(float)
    for one in records:
        work[one.job.member] += one.job.work_s
        whole[one.job.member] += one.job.all_gpus * (one.ended - one.job.at)
    return {member: work[member] / whole[member] for member in work}


def jain(values: Iterable[float]) -> float:
    """Jain's index: 1 if all have the same, 1/n if one of n has all."""
    each = list(values)
    return sum(each) ** 2 / (len(each) * sum(value * value for value in each))
