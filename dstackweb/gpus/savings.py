"""What utilization policies save: the ledger of the runs that they stopped, or would have, and what another policy
would have stopped in the last day."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from django.db.models import Q

from dstackweb.accounts.models import Project
from dstackweb.gpus.models import GpuSample, GpuSeries, PolicyStop, interval_ms
from dstackweb.gpus.window import MAX_GAP, Stretch, VerdictKind, Window, judge
from dstackweb.lib.errors import FieldError, Invalid
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.runs.models import Job, Run
from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.spec.run_file import parse_profile_settings

DAYS = 30
SHOWN = 50
MOST_STOPS = 5000
"""Newest entries that are summed up."""
LOOKS_BACK = dt.timedelta(hours=24)
"""As long as single samples are kept."""
MOST_SAMPLES = 1_000_000
"""Samples read at most: those of 115 GPUs in a day."""
MOST_RUNS = 2000
_AT_ONCE = 100_000
"""Samples in memory at a time; a single run may have more."""
_SERIES_AT_ONCE = 500


@dataclass(frozen=True)
class StopEntry:
    """One stop, with the hours for which its GPUs were, or would have been, free for others; None if unknown."""

    stop: PolicyStop
    hours: float | None

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * len(self.stop.gpus)

    @property
    def usd(self) -> float | None:
        return None if self.hours is None else self.hours * float(self.stop.price)


@dataclass(frozen=True)
class Total:
    """Sums of entries; the hours and money of `unknown` entries are not included."""

    runs: int
    gpu_hours: float
    usd: float
    unknown: int

    @classmethod
    def of(cls, entries: Sequence[StopEntry]) -> Total:
        return cls(
            runs=len(entries),
            gpu_hours=sum(entry.gpu_hours or 0 for entry in entries),
            usd=sum(entry.usd or 0 for entry in entries),
            unknown=sum(entry.hours is None for entry in entries),
        )


@dataclass(frozen=True)
class Ledger:
    """The last `days`: the newest entries, and the totals of stopped and of only observed runs."""

    days: int
    entries: list[StopEntry]
    stopped: Total
    observed: Total


def ledger(project: Project, now: dt.datetime, days: int = DAYS) -> Ledger:
    """The project's ledger. A run that was only observed counts once: its first stop would have ended it."""
    since = now - dt.timedelta(days=days)
    rows = PolicyStop.objects.filter(project=project, at__gte=since).select_related("run", "next_run", "user")
    seen: set[int] = set()
    entries = []
    for stop in reversed(rows[:MOST_STOPS]):
        if stop.observed and stop.run_id is not None:
            if stop.run_id in seen:
                continue
            seen.add(stop.run_id)
        entries.append(StopEntry(stop, _reclaimed_hours(stop, now)))
    entries.reverse()
    return Ledger(
        days=days,
        entries=entries[:SHOWN],
        stopped=Total.of([entry for entry in entries if not entry.stop.observed]),
        observed=Total.of([entry for entry in entries if entry.stop.observed]),
    )


def _reclaimed_hours(stop: PolicyStop, now: dt.datetime) -> float | None:
    """Hours so far that others got, or would have got, the GPUs instead of the run; None if unknown.

    For a stopped run they end with its `max_duration`; without one they are unknown. A run that was only observed held
    its GPUs until it ended, which is known while its row exists.
    """
    until = stop.until
    if stop.observed:
        until = (stop.run.ended_at or now) if stop.run else None
    return None if until is None else max(0.0, (min(until, now) - stop.at).total_seconds() / 3600)


@dataclass(frozen=True)
class WouldStop:
    """A run that would have been stopped, and what it used after that.

    `gpu_hours` and `usd` are those of all its nodes and attempts from then until they ended, or until now; `gpu_index`
    is NVML's index of the idle GPU, None with the scope `all`.
    """

    run: Run
    attempt: int
    node: int
    at: dt.datetime
    low_since: dt.datetime
    gpu_index: int | None
    gpus: int
    gpu_hours: float
    usd: float


@dataclass(frozen=True)
class WhatIf:
    """The stopped runs, earliest first, and the data that the policy was applied to: `runs` of the project with `gpus`
    GPUs and samples; `left_out` more had too many, and `holds` are never stopped by a policy."""

    policy: UtilizationPolicy
    since: dt.datetime
    until: dt.datetime
    runs: int
    gpus: int
    samples: int
    gpu_hours: float
    left_out: int
    holds: int
    stops: list[WouldStop]

    @property
    def saved_gpu_hours(self) -> float:
        return sum(stop.gpu_hours for stop in self.stops)

    @property
    def saved_usd(self) -> float:
        """The price of the machines for these hours."""
        return sum(stop.usd for stop in self.stops)


def parse_policy(given: Mapping[str, Any]) -> UtilizationPolicy:
    """The policy in the notation of a run file's `utilization_policy`. Raises Invalid with the key of each fault."""
    try:
        fields = parse_profile_settings({"utilization_policy": dict(given)}).utilization_policy
    except Invalid as error:
        faults: list[FieldError] = [
            {"loc": fault["loc"][1:], "line": None, "msg": _bare(fault["msg"])} for fault in error.errors
        ]
        raise Invalid(_bare(error.detail), faults) from None
    assert fields is not None
    return UtilizationPolicy.of(fields)


def _bare(text: str) -> str:
    return text.replace("`utilization_policy.", "`")


def what_if(project: Project, policy: UtilizationPolicy, now: dt.datetime) -> WhatIf:
    """Apply a policy, instead of their own, to what the project's runs did in the last 24 hours: the newest first, up
    to MOST_SAMPLES samples. Changes nothing."""
    since = now - LOOKS_BACK
    by_run = _jobs(project, policy, since, now)
    runs = Run.objects.filter(pk__in=by_run).select_related("user").defer("provenance", "config_text").order_by("-pk")
    chosen = _select(runs, by_run, since)
    stops, read = [], 0
    for batch in chosen.batches:
        of_series = _samples([one for run in batch for job in by_run[run.pk] for one in job.judged], since, now)
        read += sum(map(len, of_series.values()))
        stops += [stop for run in batch if (stop := _stop_of(run, by_run[run.pk], of_series, policy, now))]
    everything = [job for batch in chosen.batches for run in batch for job in by_run[run.pk]]
    return WhatIf(
        policy=policy,
        since=since,
        until=now,
        runs=sum(map(len, chosen.batches)),
        gpus=sum(len(job.series) for job in everything),
        samples=read,
        gpu_hours=sum(_gpu_hours(job.job, since, now) for job in everything),
        left_out=chosen.left_out,
        holds=chosen.holds,
        stops=sorted(stops, key=lambda stop: stop.at),
    )


@dataclass(frozen=True)
class _Job:
    """A job with the series of its GPUs, and those to read: none where the job was too short for the window."""

    job: Job
    series: list[GpuSeries]
    judged: list[GpuSeries]


def _jobs(project: Project, policy: UtilizationPolicy, since: dt.datetime, now: dt.datetime) -> dict[int, list[_Job]]:
    series = GpuSeries.objects.filter(
        Q(job__ended_at=None) | Q(job__ended_at__gt=since),
        job__run__project=project,
        job__started_at__isnull=False,
        last_ms__gte=to_ms(since),
    )
    by_job: dict[Any, list[GpuSeries]] = defaultdict(list)
    for one in series.select_related("job").defer("processes").order_by("job_id", "index", "id"):
        by_job[one.job_id].append(one)
    by_run: dict[int, list[_Job]] = defaultdict(list)
    for of_job in by_job.values():
        job = of_job[0].job
        assert job is not None
        by_run[job.run_id].append(_Job(job, of_job, of_job if _lasted(job, policy, since, now) else []))
    for jobs in by_run.values():
        jobs.sort(key=lambda one: (one.job.attempt, one.job.node))
    return by_run


@dataclass
class _Selection:
    """The runs to simulate, in batches whose samples are in memory together."""

    batches: list[list[Run]] = field(default_factory=list)
    left_out: int = 0
    holds: int = 0


def _select(runs: Iterable[Run], by_run: Mapping[int, list[_Job]], since: dt.datetime) -> _Selection:
    """As many of the runs as the bounds allow, in order."""
    chosen, runs_left, samples_left, room, series_room = _Selection(), MOST_RUNS, MOST_SAMPLES, 0, 0
    for run in runs:
        if run.is_hold:
            chosen.holds += 1
            continue
        series = [one for job in by_run[run.pk] for one in job.judged]
        samples = sum(_samples_between(one, since) for one in series)
        if samples > samples_left or not runs_left:
            chosen.left_out += 1
            continue
        runs_left, samples_left = runs_left - 1, samples_left - samples
        if not chosen.batches or samples > room or len(series) > series_room:
            chosen.batches.append([])
            room, series_room = _AT_ONCE, _SERIES_AT_ONCE
        chosen.batches[-1].append(run)
        room, series_room = room - samples, series_room - len(series)
    return chosen


def _lasted(job: Job, policy: UtilizationPolicy, since: dt.datetime, now: dt.datetime) -> bool:
    """Whether the job ran long enough after its warm-up for the policy's window."""
    assert job.started_at is not None
    judged_from = max(job.started_at + dt.timedelta(seconds=policy.warmup_s), since)
    return (job.ended_at or now) - judged_from >= dt.timedelta(seconds=policy.time_window_s)


def _samples_between(series: GpuSeries, since: dt.datetime) -> int:
    """The most samples that a series can have from then on."""
    last_ms = series.last_ms or 0
    first_ms = max(to_ms(since), last_ms if series.first_ms is None else series.first_ms)
    return max(0, last_ms - first_ms) // interval_ms() + 1


def _samples(series: Iterable[GpuSeries], since: dt.datetime, now: dt.datetime) -> dict[int, list[tuple[int, int]]]:
    """By series, `(at_ms, utilization)` in that time, oldest first."""
    ids = [one.pk for one in series]
    rows = GpuSample.objects.filter(
        series__in=ids, at_ms__gte=to_ms(since), at_ms__lte=to_ms(now), utilization__isnull=False
    )
    samples: dict[int, list[tuple[int, int]]] = defaultdict(list)
    columns = rows.order_by("series_id", "at_ms").values_list("series_id", "at_ms", "utilization")
    for series_id, at_ms, used in columns.iterator():
        assert used is not None
        samples[series_id].append((at_ms, used))
    return samples


def _stop_of(
    run: Run,
    jobs: Sequence[_Job],
    samples: Mapping[int, Sequence[tuple[int, int]]],
    policy: UtilizationPolicy,
    now: dt.datetime,
) -> WouldStop | None:
    """The first stop of any of its jobs, which ends the whole run without another attempt."""
    stops = [(stop, job) for job in jobs if (stop := _of_job(job, samples, policy)) is not None]
    if not stops:
        return None
    stop, stopped = min(stops, key=lambda found: found[0].at_ms)
    at = to_moment(stop.at_ms)
    after = [one.job for one in jobs if _hours(one.job, at, now) > 0]
    indexes = {series.uuid: series.index for series in stopped.series}
    return WouldStop(
        run=run,
        attempt=stopped.job.attempt,
        node=stopped.job.node,
        at=at,
        low_since=to_moment(stop.low_since_ms),
        gpu_index=None if stop.gpu is None else indexes.get(stopped.job.gpus[stop.gpu]),
        gpus=sum(len(job.gpus) for job in after),
        gpu_hours=sum(_gpu_hours(job, at, now) for job in after),
        usd=sum(float(job.price) * _hours(job, at, now) for job in after),
    )


def _of_job(job: _Job, samples: Mapping[int, Sequence[tuple[int, int]]], policy: UtilizationPolicy) -> Stop | None:
    """The stop of one job; `gpu` is a place in `job.gpus`. A GPU without a series was never sampled: unknown."""
    assert job.job.started_at is not None
    by_uuid = {series.uuid: series.pk for series in job.series}
    gpus = [samples.get(by_uuid.get(uuid, 0), ()) for uuid in job.job.gpus]
    from_ms = to_ms(job.job.started_at) + policy.warmup_s * 1000
    window = Window(policy.time_window_s * 1000, policy.scope, from_ms)
    return first_stop(gpus, policy.min_gpu_utilization, window, interval_ms())


def _gpu_hours(job: Job, since: dt.datetime, now: dt.datetime) -> float:
    return len(job.gpus) * _hours(job, since, now)


def _hours(job: Job, since: dt.datetime, now: dt.datetime) -> float:
    """Hours for which the job held its GPUs after a moment."""
    held = (job.ended_at or now) - max(since, job.placed_at)
    return max(0.0, held.total_seconds() / 3600)


@dataclass(frozen=True, slots=True)
class Stop:
    """When the job would have been stopped, when its low stretch began, and its low GPU (None with the scope `all`)."""

    at_ms: int
    low_since_ms: int
    gpu: int | None


def first_stop(
    gpus: Sequence[Sequence[tuple[int, int]]], minimum: int, window: Window, interval_ms: int
) -> Stop | None:
    """The first moment at which the verdict is *stop*, if any. `gpus` has each GPU's `(at_ms, utilization)`, oldest
    first."""
    moments: Iterable[tuple[int, tuple[tuple[int, int, int], ...]]]
    if len(gpus) == 1:
        moments = ((at_ms, ((at_ms, 0, used),)) for at_ms, used in gpus[0])
    else:
        merged = sorted((at_ms, place, used) for place, samples in enumerate(gpus) for at_ms, used in samples)
        moments = ((at_ms, tuple(group)) for at_ms, group in groupby(merged, itemgetter(0)))
    gap_ms, window_ms, from_ms = MAX_GAP * interval_ms, window.window_ms, window.from_ms
    since: list[int | None] = [None] * len(gpus)
    last: list[int | None] = [None] * len(gpus)
    for at_ms, samples in moments:
        for _at_ms, place, used in samples:
            before = last[place]
            if used >= minimum:
                since[place] = None
            elif since[place] is None or before is None or at_ms - before > gap_ms:
                since[place] = at_ms
            last[place] = at_ms
        # Most samples come too early for any GPU: judge only where the verdict can be *stop*.
        began = min((low for low in since if low is not None), default=None)
        if began is None or at_ms < max(began, from_ms) + window_ms:
            continue
        verdict = judge(window, [Stretch(*of_gpu) for of_gpu in zip(since, last, strict=True)], at_ms, interval_ms)
        if verdict.kind is VerdictKind.STOP and verdict.low_since_ms is not None:
            return Stop(at_ms, verdict.low_since_ms, verdict.gpu)
    return None
