"""What a simulation of starts needs, read from rows, and what it says of each waiting run."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ValidationError

from dstackweb.backends.hosts.fit import HostView
from dstackweb.runs import learned_durations
from dstackweb.runs.codes import StartBasis, StartData, WaitReason, is_permanent
from dstackweb.runs.learned_durations import Learned
from dstackweb.runs.models import Queue, Run, Verdict
from dstackweb.runs.prefix_counters import prefix_and_group
from dstackweb.runs.states import PLACED, RunStatus
from dstackweb.scheduler.passes import loading
from dstackweb.scheduler.placement.forecast import NEVER, Lengths, StartWindow, windows
from dstackweb.scheduler.placement.hosts import may_use_hosts
from dstackweb.scheduler.placement.reservation import MARGIN_S, JobUsage
from dstackweb.scheduler.placement.scenario import Demand, Holding, HoldingRun, QueuedRun, QueueView, Scenario, Site
from dstackweb.spec.effective import EffectiveSpec

MOST = 20_000
"""Waiting runs of a queue that are simulated; those behind have no estimate."""
READ_AT_ONCE = 500
MISSING = (WaitReason.NO_QUOTA, WaitReason.BUDGET_LIMIT, WaitReason.BACKEND_UNAVAILABLE)


class DurationSource(NamedTuple):
    """What a run's duration rests on: of how many runs of which prefix, or its limit (`runs` 0), or nothing."""

    basis: StartBasis
    prefix: str = ""
    runs: int = 0


@dataclass(frozen=True)
class Estimate:
    """When a run starts, in seconds from now: None where that is not known."""

    run_id: int
    queue_id: int
    basis: StartBasis
    data: StartData
    raw50_s: float | None = None
    raw90_s: float | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting run, as far as an estimate needs it."""

    id: int
    queue_id: int
    user_id: int
    rank: int
    seniority_us: int
    shape: str
    name: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A placed run, with the seconds that it has lasted, and its limit with all that comes on top."""

    id: int
    queue_id: int
    user_id: int
    project_id: int
    name: str
    gpus: int
    lasted_s: float
    limit_s: float | None


@dataclass
class Forecast:
    """All that is simulated."""

    queues: dict[int, Queue]
    hosts: Sequence[HostView]
    usage: Sequence[JobUsage]
    waiting: dict[int, list[Waiting]]
    """By queue, in order."""
    placed: list[Placed]
    specs: dict[str, EffectiveSpec]
    verdicts: dict[tuple[int, str], tuple[str, dict[str, Any]]]
    learned: dict[tuple[int, str], Learned]
    _known: dict[tuple[int, str, int, float | None], tuple[Lengths, DurationSource]] = field(default_factory=dict)

    @classmethod
    def load(cls, queues: Sequence[Queue], hosts: Sequence[HostView], now: dt.datetime) -> Forecast:
        """Read it from rows, in a fixed number of statements for each queue."""
        by_id = {queue.pk: queue for queue in queues}
        waiting = {queue.pk: _waiting(queue) for queue in queues}
        usage = loading.job_usage(now)
        since: dict[int, dt.datetime] = {}
        for used in usage:
            since[used.job[0]] = min(used.since, since.get(used.job[0], used.since))
        placed = _placed(since, now)
        firsts = {run.shape: run.id for runs in waiting.values() for run in reversed(runs)}
        names = [(by_id[run.queue_id].project_id, run.name) for runs in waiting.values() for run in runs]
        names += [(run.project_id, run.name) for run in placed]
        return cls(
            queues=by_id,
            hosts=hosts,
            usage=usage,
            waiting=waiting,
            placed=placed,
            specs=_specs(firsts),
            verdicts={
                (queue_id, shape): (reason, data)
                for queue_id, shape, reason, data in Verdict.objects.filter(queue__in=queues).values_list(
                    "queue", "shape", "reason", "data"
                )
            },
            learned=learned_durations.load(
                {project_id for project_id, _name in names}, {prefix_and_group(name)[0] for _project, name in names}
            ),
        )

    def estimate(self) -> list[Estimate]:
        """The estimate of each waiting run."""
        site = Site(self.hosts, self.usage)
        numbers: dict[tuple[str, int], int] = {}
        demands: list[Demand] = []
        views, found, simulated = [], [], []
        lengths: list[Lengths] = []
        sources: list[DurationSource] = []
        limits = loading.limits_without_cohorts(list(self.queues.values()))
        for queue_id, runs in self.waiting.items():
            queue = self.queues[queue_id]
            open_ = []
            for run in runs:
                spec = self.specs.get(run.shape)
                why = self._why_none(run, queue, spec)
                if spec is None or why is not None:
                    found.append(Estimate(run.id, queue_id, *(why or (StartBasis.UNAVAILABLE, StartData()))))
                    continue
                key = run.shape, queue.project_id
                if key not in numbers:
                    numbers[key] = len(demands)
                    project = queue.project
                    demands.append(site.demand(spec.of_project(project.name, project.least_isolation)))
                open_.append(QueuedRun(run.id, run.rank, run.seniority_us, run.user_id, numbers[key]))
                simulated.append(run)
                limit_s = None if spec.max_duration_s is None else spec.max_duration_s + spec.stop_duration_s + MARGIN_S
                each, source = self._length(queue.project_id, run.name, run.user_id, limit_s)
                lengths.append(each)
                sources.append(source)
            views.append(QueueView(queue_id, queue.project_id, queue.project.weight, limits[queue_id], open_))
        ends = [self._left(run) for run in self.placed]
        scenario = Scenario(site, demands, self._holdings(site), views)
        found_windows = windows(scenario, lengths, [each for each, _source in ends])
        place = _Results(self, scenario, simulated, lengths, sources, ends)
        return found + [place.estimate(index, window) for index, window in enumerate(found_windows)]

    def _why_none(self, run: Waiting, queue: Queue, spec: EffectiveSpec | None) -> tuple[StartBasis, StartData] | None:
        """Why a run is not simulated; None if it is."""
        for shape in ("", run.shape):
            reason, data = self.verdicts.get((run.queue_id, shape), ("", {}))
            if is_permanent(reason, data):
                return StartBasis.IMPOSSIBLE, {}
        if queue.paused:
            return StartBasis.PAUSED, {}
        if spec is None:
            return StartBasis.UNAVAILABLE, {"reason": WaitReason.BACKEND_UNAVAILABLE}
        return None if may_use_hosts(spec) else (StartBasis.ELSEWHERE, {})

    def _holdings(self, site: Site) -> list[HoldingRun]:
        held: defaultdict[int, list[Holding]] = defaultdict(list)
        for used in self.usage:
            if (holding := site.holding(used)) is not None:
                held[used.job[0]].append(holding)
        return [
            HoldingRun(run.id, run.queue_id, run.user_id, run.project_id, run.gpus, tuple(held[run.id]))
            for run in self.placed
        ]

    def _length(
        self, project_id: int, name: str, user_id: int, limit_s: float | None
    ) -> tuple[Lengths, DurationSource]:
        """How long a waiting run will last."""
        prefix = prefix_and_group(name)[0]
        key = project_id, prefix, user_id, limit_s
        if key not in self._known:
            self._known[key] = self._read_length(project_id, prefix, user_id, limit_s, 0.0)
        return self._known[key]

    def _left(self, run: Placed) -> tuple[Lengths, DurationSource]:
        """How much longer a placed run will last."""
        prefix = prefix_and_group(run.name)[0]
        lengths, source = self._read_length(run.project_id, prefix, run.user_id, run.limit_s, run.lasted_s)
        return tuple(max(0.0, each - run.lasted_s) for each in lengths), source

    def _read_length(
        self, project_id: int, prefix: str, user_id: int, limit_s: float | None, lasted_s: float
    ) -> tuple[Lengths, DurationSource]:
        counts, runs = self.learned.get((project_id, prefix), Learned()).of(user_id)
        found = learned_durations.equal_parts(counts, lasted_s)
        if limit_s is not None:
            limit_s = max(limit_s, lasted_s + MARGIN_S)
        if found:
            return tuple(min(each, limit_s or NEVER) for each in found), DurationSource(
                StartBasis.LEARNED, prefix, runs
            )
        if limit_s is not None:
            return (limit_s,), DurationSource(StartBasis.MAX_DURATION)
        return (NEVER,), DurationSource(StartBasis.NO_END)


@dataclass
class _Results:
    """Turns windows into estimates, with what they rest on."""

    forecast: Forecast
    scenario: Scenario
    waiting: Sequence[Waiting]
    lengths: Sequence[Lengths]
    sources: Sequence[DurationSource]
    ends: Sequence[tuple[Lengths, DurationSource]]

    def estimate(self, index: int, window: StartWindow) -> Estimate:
        run = self.waiting[index]
        if window.p50 == NEVER:
            return Estimate(run.id, run.queue_id, *self._why_never(index, run))
        raw90 = None if window.p90 == NEVER else window.p90
        if window.cause is None:
            return Estimate(run.id, run.queue_id, StartBasis.NOW, {}, window.p50, raw90)
        source = self.sources[window.cause] if window.cause >= 0 else self.ends[-1 - window.cause][1]
        data = self._named(run, window.cause)
        if source.basis == StartBasis.LEARNED:
            data |= {"prefix": source.prefix, "runs": source.runs}
        return Estimate(run.id, run.queue_id, source.basis, data, window.p50, raw90)

    def _named(self, run: Waiting, index: int) -> StartData:
        """The name of a run, unless it is another project's."""
        queues = self.forecast.queues
        if index >= 0:
            other = self.waiting[index]
            name, project_id = other.name, queues[other.queue_id].project_id
        else:
            placed = self.forecast.placed[-1 - index]
            name, project_id = placed.name, placed.project_id
        return {"run": name} if project_id == queues[run.queue_id].project_id else {}

    def _why_never(self, index: int, run: Waiting) -> tuple[StartBasis, StartData]:
        reason, _data = self.forecast.verdicts.get((run.queue_id, run.shape), ("", {}))
        if reason in MISSING:
            return StartBasis.UNAVAILABLE, {"reason": reason}
        hosts = self.scenario.demands[self.scenario.runs[index].demand].hosts
        if not hosts:
            return StartBasis.UNAVAILABLE, {"reason": WaitReason.BACKEND_UNAVAILABLE}
        for number, (one, (lengths, _source)) in enumerate(zip(self.scenario.placed, self.ends, strict=True)):
            if lengths[-1] == NEVER and any(holding.host in hosts for holding in one.holdings):
                return StartBasis.NO_END, self._named(run, -1 - number)
        for number in range(index):
            if self.lengths[number][-1] == NEVER:
                return StartBasis.NO_END, self._named(run, number)
        return StartBasis.LIMIT, {}


def _waiting(queue: Queue) -> list[Waiting]:
    columns = ("pk", "queue_id", "user_id", "rank", "seniority_us", "shape", "name")
    runs = Run.objects.filter(queue=queue, status=RunStatus.SUBMITTED).order_by("rank", "id")
    return [Waiting(*row) for row in runs.values_list(*columns)[:MOST]]


def _placed(since: dict[int, dt.datetime], now: dt.datetime) -> list[Placed]:
    columns = (
        "pk", "queue_id", "user_id", "project_id", "name", "started_at", "extended_s", "spec__max_duration_s",
        "spec__stop_duration_s", "spec__nodes", "spec__requirements__gpu_count_min",
    )  # fmt: skip
    found = []
    for row in Run.objects.filter(status__in=PLACED).order_by("pk").values_list(*columns):
        pk, queue_id, user_id, project_id, name, started_at, extended_s, limit_s, stop_s, nodes, gpus = row
        began = since.get(pk) or started_at or now
        whole_s = None if limit_s is None else float(limit_s + extended_s + (stop_s or 0) + MARGIN_S)
        lasted_s = max(0.0, (now - began).total_seconds())
        found.append(Placed(pk, queue_id, user_id, project_id, name, (nodes or 1) * (gpus or 0), lasted_s, whole_s))
    return found


def _specs(firsts: dict[str, int]) -> dict[str, EffectiveSpec]:
    """The spec of each shape that this version can read."""
    found = {}
    keys = list(firsts.values())
    for first in range(0, len(keys), READ_AT_ONCE):
        part = Run.objects.filter(pk__in=keys[first : first + READ_AT_ONCE]).values_list("shape", "spec")
        for shape, stored in part:
            try:
                found[shape] = EffectiveSpec.model_validate(stored)
            except ValidationError:
                continue
    return found
