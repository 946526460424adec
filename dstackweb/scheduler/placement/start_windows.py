"""When each waiting run starts, as a range: the simulation repeated with other durations.

Pure. Times are seconds from now. Durations are drawn by Latin hypercube: in the samples of a tier, each run's duration
takes each of as many equal parts of what it may last once. A part is represented by its mean, so that sums of many
durations are right on average however few samples there are. What a run draws follows from its id, so an estimate
changes only because something has happened.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dstackweb.scheduler.placement.forecast import NEVER, Scenario

Lengths = tuple[float, ...]
"""Equally likely durations in rising order; one alone is known for certain. NEVER: it has no end."""

TIERS = ((100, 31), (1000, 7), (None, 3))
"""So many first runs of each queue are simulated so many times. Numbers of samples are prime; further back, what few
runs do matters less."""
STARTS_MOST = 5
"""A simulation of the first runs ends after so many times as many starts; what starts later has the next tier's."""
FACTORS = {3: 1.886 * math.sqrt(1 + 1 / 3), 7: 1.440 * math.sqrt(1 + 1 / 7)}
"""By how many standard deviations of so few samples P90 is above their mean: the one-sided prediction interval of
Student's t. Far back a start is the sum of many durations, so this fits."""


@dataclass(frozen=True, slots=True)
class StartWindow:
    """Half of what may happen starts the run by `p50`, nine tenths by `p90`; NEVER if it then does not start.

    `cause` is the run whose end makes room in the middle case, as in `forecast.Starts`.
    """

    p50: float
    p90: float
    cause: int | None


def windows(
    scenario: Scenario,
    lengths: Sequence[Lengths],
    ends: Sequence[Lengths],
    tiers: Sequence[tuple[int | None, int]] = TIERS,
) -> list[StartWindow]:
    """The window of each waiting run. `lengths` are theirs, `ends` what the placed ones still last."""
    found: list[StartWindow | None] = [None] * len(scenario.runs)
    sizes = [len(queue.runs) for queue in scenario.queues]
    seeds = [seed_of(run.id) for run in scenario.runs]
    end_seeds = [seed_of(run.id) for run in scenario.placed]
    for depth, samples in tiers:
        open_ = [
            begin + place
            for begin, size in zip(scenario.first_of, sizes, strict=True)
            for place in range(size if depth is None else min(depth, size))
            if found[begin + place] is None
        ]
        if not open_:
            continue
        drawn = [parts(each, samples) for each in lengths]
        drawn_ends = [parts(each, samples) for each in ends]
        starts = [
            scenario.simulate(
                [each[part_of(seed, sample, samples)] for each, seed in zip(drawn, seeds, strict=True)],
                [each[part_of(seed, sample, samples)] for each, seed in zip(drawn_ends, end_seeds, strict=True)],
                depth,
                NEVER if depth is None else STARTS_MOST * depth * len(sizes),
            )
            for sample in range(samples)
        ]
        for index in open_:
            if any(each.at[index] == NEVER and not each.is_whole for each in starts):
                continue
            p50, p90 = _range([each.at[index] for each in starts])
            middle = min(starts, key=lambda each: abs(each.at[index] - p50)) if p50 < NEVER else starts[0]
            found[index] = StartWindow(p50, p90, middle.cause[index])
    return [window or StartWindow(NEVER, NEVER, None) for window in found]


def _range(starts: Sequence[float]) -> tuple[float, float]:
    """P50 and P90 of sampled starts."""
    factor, ordered = FACTORS.get(len(starts)), sorted(starts)
    if ordered[0] == ordered[-1]:
        return ordered[0], ordered[0]
    if factor is None or ordered[-1] == NEVER:
        return ordered[math.ceil(len(starts) * 0.5) - 1], ordered[math.ceil(len(starts) * 0.9) - 1]
    mean = sum(starts) / len(starts)
    deviation = math.sqrt(sum((start - mean) ** 2 for start in starts) / (len(starts) - 1))
    return mean, mean + factor * deviation


@functools.lru_cache(1024)
def _cached_parts(lengths: tuple[float, ...], samples: int) -> tuple[float, ...]:
    count = len(lengths)
    bounds = [(part * count // samples, max(part * count // samples + 1, -(-(part + 1) * count // samples)))
              for part in range(samples)]  # fmt: skip
    return tuple(sum(lengths[first:last]) / (last - first) for first, last in bounds)


def parts(lengths: Lengths, samples: int) -> Sequence[float]:
    """The mean of each of `samples` equal parts of what a run may last."""
    return lengths * samples if len(lengths) == 1 else _cached_parts(lengths, samples)


def part_of(seed: int, sample: int, samples: int) -> int:
    """Which part a run draws in a sample: in `samples` samples, a prime number, each part once."""
    return ((1 + seed % (samples - 1)) * sample + seed // samples) % samples


def seed_of(run_id: int) -> int:
    """A number that looks random and belongs to the run (the mixing of SplitMix64)."""
    mixed = (run_id * 0x9E3779B97F4A7C15) & _64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return mixed ^ (mixed >> 31)


_64_BITS = 2**64 - 1
