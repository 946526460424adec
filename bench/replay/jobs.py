"""Jobs drawn from the published distributions of two traces of GPU clusters, the same for the same seed.

Philly: Jeon et al., Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads, USENIX ATC 2019.
Helios: Hu et al., Characterization and Prediction of Deep Learning Workloads in Large-Scale GPU Datacenters, SC 2021.

Run times by number of GPUs are read from the figure of Philly's public notebook (github.com/msr-fiddle/philly-traces),
numbers of GPUs and how jobs end from the summary beside the Acme trace (github.com/InternLM/AcmeTrace), which covers
the same jobs. Philly's submissions by member and hour aren't published: those are Helios' (its figures of users, and of
the cluster Venus by hour). ASSUMED has what neither publishes.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
GPUS_OF_HOST = 8
SHARES_BY_GPUS = {1: 0.824, 2: 0.021, 4: 0.076, 8: 0.068, 16: 0.009, 32: 0.002}
"""Philly: 1.93 GPUs on average, one in the median."""
SIZES = {"1": (1, 1), "2–4": (2, 4), "8": (5, 8), "16–32": (9, 128)}
"""The classes of Philly's figure, by the jobs that are in them here: GPUs from, to."""
RUN_TIMES = {
    "1": ((0.1, 0), (0.3, 2), (0.6, 5), (1, 12), (1.2, 21), (2, 24), (4, 29), (7, 34), (10, 39), (20, 52), (30, 59),
          (45, 71), (60, 75), (100, 82), (200, 88), (500, 93), (1000, 96), (3000, 98), (10_000, 99.5), (20_160, 100)),
    "2–4": ((0.1, 0), (0.2, 4), (0.3, 10), (0.5, 18), (1, 24), (2, 27), (4, 31), (10, 37), (20, 46), (50, 53),
            (100, 56), (230, 60), (260, 64), (500, 70), (1000, 76), (2000, 84), (3000, 88), (5000, 92.5), (10_000, 97),
            (20_160, 100)),
    "8": ((0.1, 0), (0.3, 2), (0.6, 5), (1, 8), (2, 11), (4, 14), (10, 22), (20, 29), (50, 36), (100, 42), (230, 50),
          (270, 55), (500, 61), (1000, 69), (2000, 77), (3000, 83), (5000, 89), (10_000, 94.5), (20_160, 100)),
    "16–32": ((0.1, 0), (0.3, 2), (0.6, 6), (1, 11), (2, 15), (4, 18), (7, 23), (14, 27), (20, 31), (50, 41),
              (100, 47), (220, 53), (260, 59), (500, 66), (1000, 77), (2000, 85.5), (3000, 90), (5000, 92),
              (10_000, 97), (20_160, 100)),
}  # fmt: skip
"""Philly: minutes, and the percentage of jobs that take at most so long. Longer ones end after two weeks here."""
FAILED = 0.305
"""Philly: the share of jobs that fail."""
BY_HOUR = (25, 18, 15, 10, 7, 6, 5, 6, 10, 22, 36, 41, 33, 36, 44, 47, 50, 49, 37, 37, 38, 38, 33, 29)
"""Helios: GPU jobs submitted to Venus in each hour of the day, from midnight."""
SKEW = 1.4
"""Of Zipf's law for the members' jobs: as in Helios, the first twentieth has about half, the first quarter 85 %."""
MEMBERS = 40

ASSUMED = """\
priority 50, and 30 and 70 for one prefix of seven each; what has 30, and half of what has 50, is preemptible
a prefix of names has 30 jobs on average, and half of the variance of run times (as a normal score) is between prefixes
the max_duration of a prefix is the next of some usual ones above its longest job"""
JOBS_OF_PREFIX = 30
BETWEEN_PREFIXES = 0.5
PRIORITIES = (30, 50, 50, 50, 50, 50, 70)
LIMITS_H = (1, 4, 12, 24, 72, 168, 336)


@dataclass(frozen=True, slots=True)
class Job:
    """A job: submitted `at`, running for `took_s` without a break, both in seconds; `gpus` are those of each node."""

    id: int
    at: float
    member: int
    prefix: str
    nodes: int
    gpus: int
    took_s: float
    limit_s: int
    priority: int
    preemptible: bool
    fails: bool

    @property
    def name(self) -> str:
        return f"{self.prefix}-{self.id}"

    @property
    def all_gpus(self) -> int:
        return self.nodes * self.gpus

    @property
    def size(self) -> str:
        """Its class in SIZES."""
        return size_of(self.all_gpus)

    @property
    def work_s(self) -> float:
        """GPU-seconds."""
        return self.all_gpus * self.took_s


@dataclass
class _Prefix:
    name: str
    score: float
    priority: int
    preemptible: bool


def size_of(gpus: int) -> str:
    """The class of a number of GPUs."""
    return next(size for size, (_least, most) in SIZES.items() if gpus <= most)


def generate(seed: int, count: int, gpus: int, load: float) -> list[Job]:
    """`count` jobs in the order of submission, which need `gpus` GPUs for the share `load` of the time they come in."""
    rnd = random.Random(seed)
    sizes = rnd.choices(list(SHARES_BY_GPUS), list(SHARES_BY_GPUS.values()), k=count)
    members = rnd.choices(range(1, MEMBERS + 1), [1 / rank**SKEW for rank in range(1, MEMBERS + 1)], k=count)
    of, scores = _prefixes(rnd, members, sizes)
    took = _run_times(sizes, scores)
    span_s = sum(map(math.prod, zip(sizes, took, strict=True))) / (gpus * load)
    starts = _arrivals(rnd, count, span_s)
    longest: dict[str, float] = {}
    for prefix, seconds in zip(of, took, strict=True):
        longest[prefix.name] = max(seconds, longest.get(prefix.name, 0))
    return [
        Job(
            id=number + 1,
            at=starts[number],
            member=members[number],
            prefix=prefix.name,
            nodes=max(1, sizes[number] // GPUS_OF_HOST),
            gpus=min(sizes[number], GPUS_OF_HOST),
            took_s=took[number],
            limit_s=next(round(hours * HOUR) for hours in LIMITS_H if hours * HOUR >= longest[prefix.name]),
            priority=prefix.priority,
            preemptible=prefix.preemptible,
            fails=rnd.random() < FAILED,
        )
        for number, prefix in enumerate(of)
    ]


def _prefixes(rnd: random.Random, members: Sequence[int], sizes: Sequence[int]) -> tuple[list[_Prefix], list[float]]:
    """The prefix of each job, and how long the job is among those of its size, as a normal score."""
    now: dict[tuple[int, int], _Prefix] = {}
    found, scores, made = [], [], 0
    for key in zip(members, sizes, strict=True):
        if key not in now or rnd.random() < 1 / JOBS_OF_PREFIX:
            made += 1
            priority = rnd.choice(PRIORITIES)
            preemptible = priority == 30 or (priority == 50 and rnd.random() < 0.5)
            now[key] = _Prefix(f"study{_letters(made)}", rnd.gauss(), priority, preemptible)
        found.append(now[key])
        apart = math.sqrt(BETWEEN_PREFIXES)
        scores.append(apart * now[key].score + math.sqrt(1 - BETWEEN_PREFIXES) * rnd.gauss())
    return found, scores


def _letters(number: int) -> str:
    """A number in letters: digits at the end of a name aren't part of its prefix."""
    return chr(ord("a") + number % 26) + (_letters(number // 26) if number >= 26 else "")


def _run_times(sizes: Sequence[int], scores: Sequence[float]) -> list[float]:
    """Seconds: by the place of a job's score among those of its class, so that each class is as published."""
    took = [0.0] * len(sizes)
    for size in SIZES:
        of = sorted((number for number, gpus in enumerate(sizes) if size_of(gpus) == size), key=scores.__getitem__)
        for place, number in enumerate(of):
            took[number] = run_time_s(size, (place + 0.5) / len(of))
    return took


def run_time_s(size: str, share: float) -> float:
    """The run time that this share of the jobs of a class do not exceed; even between the points, on a log scale."""
    points = RUN_TIMES[size]
    for (low, below), (high, above) in pairwise(points):
        if share * 100 <= above:
            part = (share * 100 - below) / (above - below)
            return MINUTE * math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
    return MINUTE * points[-1][0]


def _arrivals(rnd: random.Random, count: int, span_s: float) -> list[float]:
    """Independent submissions, by the hour of the day."""
    days = math.ceil(span_s / DAY)
    weights = [BY_HOUR[hour % 24] * min(1.0, max(0.0, span_s / HOUR - hour)) for hour in range(24 * days)]
    bounds = list(accumulate(weights))
    found = []
    for _ in range(count):
        hour = bisect_left(bounds, rnd.random() * bounds[-1])
        found.append((hour + rnd.random() * min(1.0, span_s / HOUR - hour)) * HOUR)
    return sorted(found)
