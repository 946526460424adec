"""When waiting runs will start: passes simulated as jobs end, with GPUs as counts instead of one by one.

Pure. Times are seconds from now. A pass happens at each end, as in a deployment. Capacity is that of the team's hosts:
what clouds could give is not known ahead. Rationale: docs/decisions/0020-when-a-run-starts.md.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dstackweb.scheduler.placement.limits import QueueLimits, QueueUsage, exceeded_limits
from dstackweb.scheduler.placement.site import Demand, Holding, Site

NEVER = math.inf
"""The time of what does not happen."""


@dataclass(frozen=True, slots=True)
class HoldingRun:
    """A run that is placed. `gpus` are those that it requests, on whichever backend."""

    id: int
    queue_id: int
    user_id: int
    project_id: int
    gpus: int
    holdings: tuple[Holding, ...] = ()


@dataclass(frozen=True, slots=True)
class QueuedRun:
    """A waiting run. `demand` is an index into the scenario's demands."""

    id: int
    rank: int
    seniority_us: int
    user_id: int
    demand: int


@dataclass(frozen=True)
class QueueView:
    """A queue that is not paused, with its runs in order."""

    id: int
    project_id: int
    weight: int
    limits: QueueLimits
    runs: Sequence[QueuedRun]


_Head = tuple[int, int, int, int]
"""Rank, id and index of a run, and its line."""


@dataclass(slots=True)
class _Line:
    """Runs that a pass would skip together, in order: of one queue (and member, if it has limits), needing the same."""

    queue: int
    demand: int
    runs: list[_Head] = field(default_factory=list)


@dataclass(frozen=True)
class SimulatedStarts:
    """`at` has each run's start, NEVER where it does not start; `cause` the run whose end made room.

    Both are by index: waiting runs from 0 in the order of the queues, placed runs from -1 downwards. A run that starts
    at once has no cause. `is_whole`: nothing else starts; otherwise NEVER may also be later.
    """

    at: list[float]
    cause: list[int | None]
    is_whole: bool


class Scenario:
    """Placed and waiting runs on a site, to be simulated with one set of durations after the other."""

    def __init__(
        self, site: Site, demands: Sequence[Demand], placed: Sequence[HoldingRun], queues: Sequence[QueueView]
    ) -> None:
        self.site, self.demands, self.placed, self.queues = site, demands, placed, queues
        self.runs = [run for queue in queues for run in queue.runs]
        self.queue_of = [index for index, queue in enumerate(queues) for _run in queue.runs]
        self.first_of = [sum(len(queue.runs) for queue in queues[:index]) for index in range(len(queues))]
        self.lines: list[_Line] = []
        self.lines_of: list[list[int]] = [[] for _ in demands]
        self.demands_at: list[list[int]] = [[] for _ in site.hosts]
        self.is_limited = [queue.limits != QueueLimits() for queue in queues]
        self.is_shared = len(queues) > 1
        """Whether several queues wait: then it matters what their projects hold."""
        self._make_lines()

    def _make_lines(self) -> None:
        found: dict[tuple[int, int, int | None], int] = {}
        for index, (queue, run) in enumerate(zip(self.queue_of, self.runs, strict=True)):
            key = queue, run.demand, run.user_id if self.is_limited[queue] else None
            if key not in found:
                found[key] = len(self.lines)
                self.lines_of[run.demand].append(len(self.lines))
                self.lines.append(_Line(queue, run.demand))
            self.lines[found[key]].runs.append((run.rank, run.id, index, found[key]))
        for number, lines in enumerate(self.lines_of):
            for host in self.demands[number].hosts if lines else ():
                self.demands_at[host].append(number)

    def simulate(
        self, lengths: Sequence[float], ends: Sequence[float], first: int | None = None, most: float = NEVER
    ) -> SimulatedStarts:
        """The starts if waiting runs last `lengths` and placed ones end at `ends`; NEVER for what has no end.

        With `first`, it ends once so many runs of each queue have started, and with `most` once so many have at all.
        """
        return _Simulation(self, lengths, ends, first).run(most)


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

    def _heads(self, dirty: Collection[int], freed: set[int]) -> dict[int, list[_Head]]:
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
        heads: dict[int, list[_Head]] = {}
        for line in lines:
            of, place = scenario.lines[line], self.next_in[line]
            if place < len(of.runs):
                heads.setdefault(of.queue, []).append(of.runs[place])
        for waiting in heads.values():
            heapq.heapify(waiting)
        return heads

    def _turn(self, queue_index: int, heads: Mapping[int, Sequence[_Head]]) -> tuple[float, int]:
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
