"""What starts are simulated on: the team's hosts with GPUs as counts instead of one by one, and the runs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dstackweb.backends.hosts.fit import GpuView, HostView, could_ever_fit
from dstackweb.backends.matching import gpu_matches, is_part
from dstackweb.scheduler.placement.hosts import may_use_host
from dstackweb.scheduler.placement.limits import QueueLimits
from dstackweb.scheduler.placement.reservation import JobUsage
from dstackweb.spec.effective import EffectiveSpec

GpuModel = tuple[int, str]
"""Memory (MiB) and name: GPUs alike in these are interchangeable, and a job gets the smallest first."""


class Holding(NamedTuple):
    """What one node holds of a host: `gpus` are (index of the model on the host, number)."""

    host: int
    cpus: int
    memory_mib: int
    gpus: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """What each node of a run needs. `hosts` are those that could hold one: index to its matching GPU models."""

    nodes: int
    cpus: int
    memory_mib: int
    gpus: int
    hosts: Mapping[int, tuple[int, ...]]

    @property
    def gpus_of_run(self) -> int:
        return self.nodes * self.gpus


class Site:
    """The free capacity of the hosts that take jobs, by index; hosts are in the order of their ids."""

    def __init__(self, hosts: Iterable[HostView], usage: Iterable[JobUsage] = ()) -> None:
        self.hosts = sorted(hosts, key=lambda host: host.id)
        self.models: list[list[GpuModel]] = [sorted({_model(gpu) for gpu in host.gpus}) for host in self.hosts]
        self.gpus = [
            [sum(gpu.free and _model(gpu) == model for gpu in host.gpus) for model in models]
            for host, models in zip(self.hosts, self.models, strict=True)
        ]
        held: dict[int, list[int]] = {host.id: [0, 0] for host in self.hosts}
        for used in usage:
            if used.host_id in held:
                held[used.host_id][0] += used.cpus
                held[used.host_id][1] += used.memory_mib
        # A host that came back smaller may be overcommitted: less than nothing is free then.
        self.cpus = [min(host.cpus_free, host.cpus - held[host.id][0]) for host in self.hosts]
        self.memory_mib = [min(host.memory_free_mib, host.memory_mib - held[host.id][1]) for host in self.hosts]
        self._index = {host.id: index for index, host in enumerate(self.hosts)}

    def demand(self, spec: EffectiveSpec) -> Demand:
        """What a run needs, and where it could get that."""
        needs = spec.requirements
        usable = {
            index: tuple(
                number
                for number, (memory_mib, name) in enumerate(self.models[index])
                if needs.gpu_count_min
                and gpu_matches(name, memory_mib, needs)
                and (needs.gpu_count_min == 1 or not is_part(name))
            )
            for index, host in enumerate(self.hosts)
            if host.takes_jobs and host.isolation != "none" and may_use_host(spec, host) and could_ever_fit(host, needs)
        }
        return Demand(spec.nodes, needs.cpu_min, needs.memory_min_mib, needs.gpu_count_min, usable)

    def holding(self, used: JobUsage) -> Holding | None:
        """What a job will give back of its host; None if the host is gone. A GPU that strangers use stays theirs."""
        index = self._index.get(used.host_id)
        if index is None:
            return None
        gpus = [gpu for gpu in self.hosts[index].gpus if gpu.uuid in used.gpus and gpu.stranger is None]
        counts = Counter(self.models[index].index(_model(gpu)) for gpu in gpus)
        return Holding(index, used.cpus, used.memory_mib, tuple(sorted(counts.items())))


def _model(gpu: GpuView) -> GpuModel:
    return gpu.memory_mib, gpu.name


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


Head = tuple[int, int, int, int]
"""Rank, id and index of a run, and its line."""


@dataclass(slots=True)
class Line:
    """Runs that a pass would skip together, in order: of one queue (and member, if it has limits), needing the same."""

    queue: int
    demand: int
    runs: list[Head] = field(default_factory=list)


class Scenario:
    """Placed and waiting runs on a site, to be simulated with one set of durations after the other."""

    def __init__(
        self, site: Site, demands: Sequence[Demand], placed: Sequence[HoldingRun], queues: Sequence[QueueView]
    ) -> None:
        self.site, self.demands, self.placed, self.queues = site, demands, placed, queues
        self.runs = [run for queue in queues for run in queue.runs]
        self.queue_of = [index for index, queue in enumerate(queues) for _run in queue.runs]
        self.first_of = [sum(len(queue.runs) for queue in queues[:index]) for index in range(len(queues))]
        self.lines: list[Line] = []
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
                self.lines.append(Line(queue, run.demand))
            self.lines[found[key]].runs.append((run.rank, run.id, index, found[key]))
        for number, lines in enumerate(self.lines_of):
            for host in self.demands[number].hosts if lines else ():
                self.demands_at[host].append(number)
