"""When waiting runs will start: passes simulated as jobs end, repeated with other durations for a range.

Pure. Times are seconds from now. A pass happens at each end, as in a deployment. Capacity is that of the team's hosts:
what clouds could give is not known ahead. Rationale: docs/decisions/0020-when-a-run-starts.md.

Durations are drawn by Latin hypercube: in the samples of a tier, each run's duration takes each of as many equal parts
of what it may last once. A part is represented by its mean, so that sums of many durations are right on average however
few samples there are. What a run draws follows from its id, so an estimate changes only because something has happened.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dstackweb.scheduler.placement.limits import QueueUsage, exceeded_limits
from dstackweb.scheduler.placement.scenario import Demand, Head, Holding, Scenario

NEVER = math.inf
"""The time of what does not happen."""
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


@dataclass(frozen=True)
class SimulatedStarts:
    """`at` has each run's start, NEVER where it does not start; `cause` the run whose end made room.

    Both are by index: waiting runs from 0 in the order of the queues, placed runs from -1 downwards. A run that starts
    at once has no cause. `is_whole`: nothing else starts; otherwise NEVER may also be later.
    """

    at: list[float]
    cause: list[int | None]
    is_whole: bool


def simulate(
    scenario: Scenario,
    lengths: Sequence[float],
    ends: Sequence[float],
    first: int | None = None,
    most: float = NEVER,
) -> SimulatedStarts:
    """The starts if waiting runs last `lengths` and placed ones end at `ends`; NEVER for what has no end. It ends once
    `first` runs of each queue have started, or `most` at all."""
    return _Simulation(scenario, lengths, ends, first).run(most)


class _Simulation:
    """One walk through the ends. Between them, nothing that a run waits for fits anywhere, unless a limit is met."""

    def __init__(self, scenario: Scenario, lengths: Sequence[float], ends: Sequence[float], first: int | None) -> None:
        self.scenario, self.lengths = scenario, lengths
        site = scenario.site
        self.cpus, self.memory_mib, self.gpus = list(site.cpus), list(site.memory_mib), [list(n) for n in site.gpus]
        self.gpus_free = [sum(numbers) for numbers in site.gpus]
        self.next_in = [0] * len(scenario.lines)
        self.waiting = [sum(len(scenario.lines[line].runs) for line in lines) for lines in scenario.lines_of]
        """Runs that wait, by demand."""
        self.at = [NEVER] * len(scenario.runs)
        self.cause: list[int | None] = [None] * len(scenario.runs)
        self.held: dict[int, Sequence[Holding]] = {-1 - n: one.holdings for n, one in enumerate(scenario.placed)}
        self.ends = [(end, -1 - n) for n, end in enumerate(ends) if end < NEVER]
        heapq.heapify(self.ends)
        self.usage = QueueUsage.of((one.queue_id, one.user_id, one.gpus) for one in scenario.placed)
        self.project_gpus: Counter[int] = Counter()
        self.project_cpus: Counter[int] = Counter()
        for one in scenario.placed:
            self._count_project(one.project_id, one.holdings, 1)
        self.untested = [True] * len(scenario.demands)
        """Demands of which limits alone hold up all runs: they may fit on hosts where nothing has ended since."""
        self.limited: set[int] = set()
        """Lines that a limit holds up."""
        sizes = [len(queue.runs) for queue in scenario.queues]
        wanted = [size if first is None else min(size, first) for size in sizes]
        self.left = sum(wanted)
        self.started = 0
        self.last = [begin + number for begin, number in zip(scenario.first_of, wanted, strict=True)]
        """By queue, the index behind the last run whose start is wanted."""

    def run(self, most: float) -> SimulatedStarts:
        """Simulate until all starts that are wanted are known, or `most` have happened, or nothing ends any more."""
        ends, now, cause = self.ends, 0.0, None
        dirty: Collection[int] = range(len(self.scenario.site.hosts))
        freed: set[int] = set()
        while True:
            self._place(now, cause, dirty, freed)
            if not ends or not self.left or self.started >= most:
                return SimulatedStarts(self.at, self.cause, is_whole=not ends or self.started == len(self.at))
            now, cause = ends[0]
            dirty, freed = set(), set()
            while ends and ends[0][0] == now:
                cause = heapq.heappop(ends)[1]
                self._end(cause, dirty, freed)

    def _end(self, ended: int, dirty: set[int], freed: set[int]) -> None:
        """Give back what a run holds, and note its hosts and its queue."""
        holdings = self.held.pop(ended)
        for holding in holdings:
            self._take(holding, -1)
            dirty.add(holding.host)
        scenario = self.scenario
        if ended < 0:
            one = scenario.placed[-1 - ended]
            queue_id, user_id, project_id, gpus = one.queue_id, one.user_id, one.project_id, one.gpus
        else:
            run, queue = scenario.runs[ended], scenario.queues[scenario.queue_of[ended]]
            queue_id, user_id, project_id = queue.id, run.user_id, queue.project_id
            gpus = scenario.demands[run.demand].gpus_of_run
        if any(scenario.is_limited):
            self.usage.remove(queue_id, user_id, gpus)
        freed.add(queue_id)
        self._count_project(project_id, holdings, -1)

    def _count_project(self, project_id: int, holdings: Iterable[Holding], sign: int) -> None:
        if self.scenario.is_shared:
            for holding in holdings:
                self.project_cpus[project_id] += sign * holding.cpus
                self.project_gpus[project_id] += sign * sum(number for _model, number in holding.gpus)

    def _place(self, now: float, cause: int | None, dirty: Collection[int], freed: set[int]) -> None:
        """A pass: what fits now starts, queue by queue in their order."""
        scenario = self.scenario
        heads = self._heads(dirty, freed)
        full: set[int] = set()
        while heads:
            queue = next(iter(heads)) if len(heads) == 1 else min(heads, key=lambda one: self._turn(one, heads))
            waiting = heads[queue]
            _rank, _id, index, line = waiting[0]
            number = scenario.lines[line].demand
            demand = scenario.demands[number]
            holdings = None
            if number not in full:
                if scenario.is_limited[queue] and self._exceeds_limit(queue, scenario.runs[index].user_id, demand):
                    self.limited.add(line)
                    self.untested[number] = True
                else:
                    self.limited.discard(line)
                    here = demand.nodes == 1 and not self.untested[number]
                    if not here or any(host in demand.hosts and self._fits(demand, host) for host in dirty):
                        holdings = self._fit(demand, dirty if here else demand.hosts)
                    if holdings is None:
                        full.add(number)
                        self.untested[number] = False
            if holdings is not None:
                self._start(index, now, cause, holdings, queue, demand)
                self.waiting[number] -= 1
                self.next_in[line] += 1
                runs = scenario.lines[line].runs
                if self.next_in[line] < len(runs):
                    heapq.heapreplace(waiting, runs[self.next_in[line]])
                    continue
            heapq.heappop(waiting)
            if not waiting:
                del heads[queue]

    def _heads(self, dirty: Collection[int], freed: set[int]) -> dict[int, list[Head]]:
        """The first runs of the lines that may start after these ends: a heap for each queue."""
        scenario, fits = self.scenario, self._fits
        demands = scenario.demands
        if len(dirty) == 1:
            (host,) = dirty
            maybe = [
                number
                for number in scenario.demands_at[host]
                if self.waiting[number] and fits(demands[number], host)
            ]  # fmt: skip
        else:
            maybe = list(
                {
                    number
                    for host in dirty
                    for number in scenario.demands_at[host]
                    if self.waiting[number] and fits(demands[number], host)
                }
            )
        lines = [line for number in maybe for line in scenario.lines_of[number]]
        for line in self.limited:
            of = scenario.lines[line]
            if of.demand not in maybe and scenario.queues[of.queue].id in freed:
                lines.append(line)
        heads: dict[int, list[Head]] = {}
        for line in lines:
            of, place = scenario.lines[line], self.next_in[line]
            if place < len(of.runs):
                heads.setdefault(of.queue, []).append(of.runs[place])
        for waiting in heads.values():
            heapq.heapify(waiting)
        return heads

    def _turn(self, queue_index: int, heads: Mapping[int, Sequence[Head]]) -> tuple[float, int]:
        """As `limits.fair_share_key`."""
        queue, run = self.scenario.queues[queue_index], self.scenario.runs[heads[queue_index][0][2]]
        held = self.project_gpus if self.scenario.demands[run.demand].gpus else self.project_cpus
        return held[queue.project_id] / queue.weight, run.seniority_us

    def _exceeds_limit(self, queue_index: int, user_id: int, demand: Demand) -> bool:
        queue = self.scenario.queues[queue_index]
        return bool(exceeded_limits(queue.limits, self.usage, queue.id, user_id, demand.gpus_of_run))

    def _fits(self, demand: Demand, host: int) -> bool:
        """Whether one node fits."""
        gpus = demand.gpus
        if self.gpus_free[host] < gpus or self.cpus[host] < demand.cpus or self.memory_mib[host] < demand.memory_mib:
            return False
        if not gpus:
            return True
        free, models = self.gpus[host], demand.hosts[host]
        return free[models[0]] >= gpus or (len(models) > 1 and sum([free[model] for model in models]) >= gpus)

    def _fit(self, demand: Demand, hosts: Iterable[int]) -> list[Holding] | None:
        """Take what all nodes need on these hosts, as `hosts.fit_nodes`; None, taking nothing, if that is not free."""
        gpus_free, gpus, cpus, usable = self.gpus_free, demand.gpus, self.cpus, demand.hosts
        free = [
            (gpus_free[host], cpus[host], host)
            for host in hosts
            if gpus_free[host] >= gpus and host in usable and self._fits(demand, host)
        ]
        taken: list[Holding] = []
        while free:
            best = min(free)
            host = best[2]
            holding = self._choose(demand, host)
            self._take(holding, 1)
            taken.append(holding)
            if len(taken) == demand.nodes:
                return taken
            free.remove(best)
            if self._fits(demand, host):
                free.append((gpus_free[host], cpus[host], host))
        for holding in taken:
            self._take(holding, -1)
        return None

    def _choose(self, demand: Demand, host: int) -> Holding:
        """The GPUs that one node gets: the smallest, all of one model if possible."""
        models, free, missing = demand.hosts[host], self.gpus[host], demand.gpus
        gpus: list[tuple[int, int]] = []
        if missing:
            alike = next((model for model in models if free[model] >= missing), None)
            for model in models if alike is None else (alike,):
                if missing and (number := min(missing, free[model])):
                    gpus.append((model, number))
                    missing -= number
        return Holding(host, demand.cpus, demand.memory_mib, tuple(gpus))

    def _take(self, holding: Holding, sign: int) -> None:
        host, cpus, memory_mib, gpus = holding
        self.cpus[host] -= sign * cpus
        self.memory_mib[host] -= sign * memory_mib
        for model, number in gpus:
            self.gpus[host][model] -= sign * number
            self.gpus_free[host] -= sign * number

    def _start(
        self, index: int, now: float, cause: int | None, holdings: list[Holding], queue_index: int, demand: Demand
    ) -> None:
        self.at[index], self.cause[index] = now, cause
        self.held[index] = holdings
        queue = self.scenario.queues[queue_index]
        if self.scenario.is_limited[queue_index]:
            self.usage.add(queue.id, self.scenario.runs[index].user_id, demand.gpus_of_run)
        self._count_project(queue.project_id, holdings, 1)
        if (length := self.lengths[index]) < NEVER:
            heapq.heappush(self.ends, (now + length, index))
        self.left -= index < self.last[queue_index]
        self.started += 1


@dataclass(frozen=True, slots=True)
class StartWindow:
    """Half of what may happen starts the run by `p50`, nine tenths by `p90`; NEVER if it then does not start. `cause`
    is the run whose end makes room in the middle case."""

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
            simulate(
                scenario,
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
