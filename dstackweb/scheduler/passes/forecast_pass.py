"""Estimates of when waiting runs start: made by a periodic job, and written where they have changed."""

from __future__ import annotations

import datetime as dt
import hashlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db import IntegrityError, transaction
from django.db.models import Min
from django.utils import timezone

from dstackweb.backends.hosts.fit import HostView
from dstackweb.backends.hosts.inventory import host_views
from dstackweb.lib import sql
from dstackweb.runs import learned_durations, start_estimates
from dstackweb.runs.codes import StartBasis, StartData, WaitReason, is_permanent
from dstackweb.runs.learned_durations import Learned
from dstackweb.runs.models import Job, Queue, QueueCount, StartEstimate, Verdict
from dstackweb.runs.prefix_counters import prefix_and_group
from dstackweb.runs.queue.queues import LIMITS
from dstackweb.runs.shared_rows import touch
from dstackweb.runs.start_estimates import Records, ShownEstimate
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.models import ForecastState
from dstackweb.scheduler.passes import loading
from dstackweb.scheduler.placement.forecast import NEVER, Lengths, StartWindow, windows
from dstackweb.scheduler.placement.hosts import may_use_hosts
from dstackweb.scheduler.placement.reservation import MARGIN_S, JobUsage
from dstackweb.scheduler.placement.scenario import Demand, Holding, HoldingRun, QueuedRun, QueueView, Scenario, Site
from dstackweb.spec.effective import EffectiveSpec

AGAIN_S = 120.0
"""Estimates are made anew after this time even if nothing happened: what runs has lasted longer since."""
STEP = 0.05
"""An estimate is replaced when it has moved by this share of the time ahead, and by LEAST_STEP_S."""
LEAST_STEP_S = 60.0
AT_ONCE = 500
"""Rows that one transaction writes."""
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


@dataclass
class Forecast:
    """All that is simulated."""

    queues: dict[int, Queue]
    hosts: Sequence[HostView]
    usage: Sequence[JobUsage]
    waiting: dict[int, list[loading.Waiting]]
    """By queue, in order."""
    placed: list[loading.Placed]
    specs: dict[str, EffectiveSpec]
    verdicts: dict[tuple[int, str], tuple[str, dict[str, Any]]]
    learned: dict[tuple[int, str], Learned]
    _known: dict[tuple[int, str, int, float | None], tuple[Lengths, DurationSource]] = field(default_factory=dict)

    @classmethod
    def load(cls, queues: Sequence[Queue], hosts: Sequence[HostView], now: dt.datetime) -> Forecast:
        """Read it from rows, in a fixed number of statements for each queue."""
        by_id = {queue.pk: queue for queue in queues}
        waiting = {queue.pk: loading.waiting_of(queue) for queue in queues}
        usage = loading.job_usage(now)
        since: dict[int, dt.datetime] = {}
        for used in usage:
            since[used.job[0]] = min(used.since, since.get(used.job[0], used.since))
        placed = loading.placed(since, now)
        firsts = {run.shape: run.id for runs in waiting.values() for run in reversed(runs)}
        names = [(by_id[run.queue_id].project_id, run.name) for runs in waiting.values() for run in runs]
        names += [(run.project_id, run.name) for run in placed]
        return cls(
            queues=by_id,
            hosts=hosts,
            usage=usage,
            waiting=waiting,
            placed=placed,
            specs=loading.read_specs(firsts),
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

    def _why_none(
        self, run: loading.Waiting, queue: Queue, spec: EffectiveSpec | None
    ) -> tuple[StartBasis, StartData] | None:
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

    def _left(self, run: loading.Placed) -> tuple[Lengths, DurationSource]:
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
    waiting: Sequence[loading.Waiting]
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

    def _named(self, run: loading.Waiting, index: int) -> StartData:
        """The name of a run, unless it is another project's."""
        queues = self.forecast.queues
        if index >= 0:
            other = self.waiting[index]
            name, project_id = other.name, queues[other.queue_id].project_id
        else:
            placed = self.forecast.placed[-1 - index]
            name, project_id = placed.name, placed.project_id
        return {"run": name} if project_id == queues[run.queue_id].project_id else {}

    def _why_never(self, index: int, run: loading.Waiting) -> tuple[StartBasis, StartData]:
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


def has_work() -> bool:
    """Whether a run waits, or an estimate of one that did is left."""
    return bool(sql.rows(_HAS_WORK, ()))


def refresh() -> int:
    """Compare past estimates with the starts, and make new ones if something has changed; returns how many changed."""
    settle()
    now, began = timezone.now(), time.monotonic()
    with sql.snapshot():
        versions = dict(QueueCount.objects.order_by("queue").values_list("queue", "version"))
        hosts = host_views()
        queues = list(Queue.objects.select_related("project").filter(count__submitted__gt=0).order_by("pk"))
        state = ForecastState.objects.filter(pk=1).first()
        if not queues or (state and not _is_due(state, _fingerprint(versions, hosts, queues), now)):
            return 0
        forecast = Forecast.load(queues, hosts, now)
        stored = {row.run_id: row for row in StartEstimate.objects.filter(run__queue__in=queues)}
        records = start_estimates.load_records()
    estimates = forecast.estimate()
    changed = [row for one in estimates if (row := new_row(one, stored.get(one.run_id), records, now)) is not None]
    _write(changed)
    queue_of = {one.run_id: one.queue_id for one in estimates}
    for queue_id in sorted({queue_of[row.run_id] for row in changed}):
        touch(queue_id)  # lists show it
        versions[queue_id] += 1
    ForecastState.objects.update_or_create(
        pk=1,
        defaults={
            "fingerprint": _fingerprint(versions, hosts, queues),
            "at": now,
            "duration_ms": (time.monotonic() - began) * 1000,
            "waiting": len(estimates),
        },
    )
    return len(changed)


def settle() -> None:
    """Compare the estimates of runs that have left their queues with the starts, and delete them."""
    left = StartEstimate.objects.exclude(run__status=RunStatus.SUBMITTED).order_by("run")
    while rows := list(left[:AT_ONCE]):
        ids = [row.run_id for row in rows]
        placed = Job.objects.filter(run__in=ids).order_by().values("run").annotate(at=Min("placed_at"))
        started = dict(placed.values_list("run", "at"))
        with transaction.atomic():
            # Only what no other worker has settled meanwhile.
            mine = set(StartEstimate.objects.select_for_update().filter(pk__in=ids).values_list("pk", flat=True))
            start_estimates.score(
                (shown, at.timestamp())
                for row in rows
                if row.run_id in mine and (at := started.get(row.run_id)) is not None
                for shown in first_shown(row)
                if at.timestamp() >= shown.at
            )
            StartEstimate.objects.filter(pk__in=mine).delete()


def first_shown(row: StartEstimate) -> list[ShownEstimate]:
    """The first estimate at each horizon."""
    return [ShownEstimate(*one) for one in row.first_shown]


def _is_due(state: ForecastState, fingerprint: str, now: dt.datetime) -> bool:
    is_recent = state.at is not None and 0 <= (now - state.at).total_seconds() < AGAIN_S
    return not is_recent or state.fingerprint != fingerprint


def _fingerprint(versions: Mapping[int, int], hosts: Sequence[HostView], queues: Sequence[Queue]) -> str:
    """Of what estimates depend on, but for the time."""
    settings = [
        (queue.pk, queue.paused, queue.project.weight, *(getattr(queue, name) for name in LIMITS)) for queue in queues
    ]
    return hashlib.sha256(repr((sorted(versions.items()), hosts, settings)).encode()).hexdigest()


def new_row(made: Estimate, row: StartEstimate | None, records: Records, now: dt.datetime) -> StartEstimate | None:
    """The row to write for an estimate; None if the one that is shown is still right."""
    shown, first = None, row.first_shown if row else []
    if made.raw50_s is not None:
        shown = start_estimates.corrected(now, made.raw50_s, made.raw90_s, records)
        if shown.horizon not in {ShownEstimate(*one).horizon for one in first}:
            first = [*first, shown]
    new = StartEstimate(
        run_id=made.run_id,
        p50=_moment(shown.p50) if shown else None,
        p90=_moment(shown.p90) if shown else None,
        basis=made.basis.value,
        data=made.data,
        first_shown=first,
    )
    # Not for another cause alone: far back, that changes with each end.
    is_same = row is not None and row.basis == new.basis and len(row.first_shown) == len(first)
    if is_same and row and _is_near(row.p50, new.p50, now) and _is_near(row.p90, new.p90, now):
        return None
    return new


def _moment(at: float | None) -> dt.datetime | None:
    return None if at is None else dt.datetime.fromtimestamp(at, dt.UTC)


def _is_near(before: dt.datetime | None, after: dt.datetime | None, now: dt.datetime) -> bool:
    """Whether a new time differs so little that it is not worth showing."""
    if before is None or after is None:
        return before == after
    ahead_s = abs((after - now).total_seconds())
    return abs((after - before).total_seconds()) <= max(LEAST_STEP_S, STEP * ahead_s)


def _write(rows: Sequence[StartEstimate]) -> None:
    fields = ["p50", "p90", "basis", "data", "first_shown"]
    for first in range(0, len(rows), AT_ONCE):
        try:
            with transaction.atomic():
                sql.write(rows[first : first + AT_ONCE], ["run"], fields)
        except IntegrityError:
            continue  # a run was deleted meanwhile: the next estimate leaves it out


_HAS_WORK = """
SELECT 1 FROM runs_queuecount WHERE submitted > 0
UNION ALL SELECT 1 FROM runs_startestimate
LIMIT 1
"""
