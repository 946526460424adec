"""What a policy would have done: applied to the last day's real samples of a project's runs.

Nothing is changed by it, and the runs' own policies don't matter. The work is bounded: the runs placed last are looked
at first, up to `MOST_SAMPLES` samples, and the answer says how many were left out.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from django.db.models import Q

from dstackweb.accounts.models import Project
from dstackweb.gpus.clock import interval_ms, to_moment, to_ms
from dstackweb.gpus.models import GpuSample, GpuSeries
from dstackweb.gpus.policy.simulation import Stop, first_stop
from dstackweb.gpus.policy.window import Window
from dstackweb.lib.errors import FieldError, Invalid
from dstackweb.runs.models import Job, Run
from dstackweb.spec.effective import UtilizationPolicy
from dstackweb.spec.run_file import parse_profile_settings

LOOKS_BACK = dt.timedelta(hours=24)
"""For so long single samples are kept."""
MOST_SAMPLES = 1_000_000
"""So many samples are looked at, at most: those of 115 GPUs in a day."""
MOST_RUNS = 2000
_AT_ONCE = 100_000
"""Samples in memory at a time; one run may have more."""
_SERIES_AT_ONCE = 500


@dataclass(frozen=True)
class WouldStop:
    """A run that would have been stopped, and what the rest of its time took.

    `gpu_hours` and `usd` are of all its nodes and attempts from then until they ended, or until now; `gpu_index` is
    NVML's index of the unused GPU on its machine, None with the scope `all`.
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
    """The answer: which runs, the earliest first, and what was looked at to know that.

    `runs` of the project had GPUs and samples in that time, with `gpus` GPU places and `gpu_hours` in all;
    `left_out` more had too many samples, and `holds` are never stopped by a policy.
    """

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
        """GPU-hours of all those runs after their stops."""
        return sum(stop.gpu_hours for stop in self.stops)

    @property
    def saved_usd(self) -> float:
        """What these GPU-hours cost, with the machines around them."""
        return sum(stop.usd for stop in self.stops)


def policy_asked(given: Mapping[str, Any]) -> UtilizationPolicy:
    """The policy of a run file's `utilization_policy`. Raises Invalid with each fault's key as its place."""
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
    """Apply a policy to what the project's runs did in the last 24 hours."""
    since = now - LOOKS_BACK
    by_run = _jobs(project, policy, since, now)
    runs = Run.objects.filter(pk__in=by_run).select_related("user").defer("provenance", "config_text").order_by("-pk")
    chosen = _choose(runs, by_run, since)
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
    """A job with the series of its GPUs, and those that are worth reading: none where it did not last long enough."""

    job: Job
    series: list[GpuSeries]
    judged: list[GpuSeries]


def _jobs(project: Project, policy: UtilizationPolicy, since: dt.datetime, now: dt.datetime) -> dict[int, list[_Job]]:
    """By run, the jobs that have samples in that time, oldest first."""
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
class _Chosen:
    """The runs to look at, in batches whose samples are in memory together."""

    batches: list[list[Run]] = field(default_factory=list)
    left_out: int = 0
    holds: int = 0


def _choose(runs: Iterable[Run], by_run: Mapping[int, list[_Job]], since: dt.datetime) -> _Chosen:
    """As many of the runs as the bounds allow, in their order."""
    chosen, runs_left, samples_left, room, places = _Chosen(), MOST_RUNS, MOST_SAMPLES, 0, 0
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
        if not chosen.batches or samples > room or len(series) > places:
            chosen.batches.append([])
            room, places = _AT_ONCE, _SERIES_AT_ONCE
        chosen.batches[-1].append(run)
        room, places = room - samples, places - len(series)
    return chosen


def _lasted(job: Job, policy: UtilizationPolicy, since: dt.datetime, now: dt.datetime) -> bool:
    """Whether the policy's window fits into the time for which the job would have been judged."""
    assert job.started_at is not None
    judged_from = max(job.started_at + dt.timedelta(seconds=policy.warmup_s), since)
    interval = dt.timedelta(milliseconds=interval_ms())  # for which the first sample stands
    return (job.ended_at or now) - judged_from + interval >= dt.timedelta(seconds=policy.time_window_s)


def _samples_between(series: GpuSeries, since: dt.datetime) -> int:
    """How many samples a series may have from then on."""
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
    """The first stop of any of its jobs: that ends the whole run, and no attempt follows."""
    first: WouldStop | None = None
    for job in jobs:
        stop = _of_job(job, samples, policy)
        if stop is not None and (first is None or to_moment(stop.at_ms) < first.at):
            first = WouldStop(
                run=run,
                attempt=job.job.attempt,
                node=job.job.node,
                at=to_moment(stop.at_ms),
                low_since=to_moment(stop.low_since_ms),
                gpu_index=_index(job, stop.gpu),
                gpus=0,
                gpu_hours=0,
                usd=0,
            )
    if first is None:
        return None
    at = first.at
    after = [one.job for one in jobs if _hours(one.job, at, now) > 0]
    return replace(
        first,
        gpus=sum(len(job.gpus) for job in after),
        gpu_hours=sum(_gpu_hours(job, at, now) for job in after),
        usd=sum(float(job.price) * _hours(job, at, now) for job in after),
    )


def _of_job(job: _Job, samples: Mapping[int, Sequence[tuple[int, int]]], policy: UtilizationPolicy) -> Stop | None:
    """The stop of one job; `gpu` is a place in its GPUs. One that was never seen has no samples: it is unknown."""
    assert job.job.started_at is not None
    by_uuid = {series.uuid: series.pk for series in job.series}
    gpus = [samples.get(by_uuid.get(uuid, 0), ()) for uuid in job.job.gpus]
    from_ms = to_ms(job.job.started_at) + policy.warmup_s * 1000
    window = Window(policy.time_window_s * 1000, policy.scope, from_ms)
    return first_stop(gpus, policy.min_gpu_utilization, window, interval_ms())


def _index(job: _Job, place: int | None) -> int | None:
    """NVML's index of a GPU of the job."""
    indexes = {series.uuid: series.index for series in job.series}
    return None if place is None else indexes.get(job.job.gpus[place])


def _gpu_hours(job: Job, since: dt.datetime, now: dt.datetime) -> float:
    return len(job.gpus) * _hours(job, since, now)


def _hours(job: Job, since: dt.datetime, now: dt.datetime) -> float:
    """For how long the job held its place after a moment."""
    held = (job.ended_at or now) - max(since, job.placed_at)
    return max(0.0, held.total_seconds() / 3600)
