"""All kept counters and sums beside a recount (docs/design.md, rule 7)."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Iterator
from math import isclose

from django.db.models import Count, F, Sum
from django.db.models.functions import TruncHour
from django.utils import timezone

from dstackweb.backends.models import Host
from dstackweb.progress import recount
from dstackweb.progress.models import Scope, TaskGroup
from dstackweb.progress.recount import Difference
from dstackweb.progress.states import TaskState
from dstackweb.runs import learned_durations, prefix_counters, usage
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.history import KEPT_DAYS, hour_of
from dstackweb.runs.models import (
    Allocation,
    Artifact,
    Job,
    LearnedDuration,
    ProjectArtifacts,
    ProjectLogs,
    QueueCount,
    QueueHour,
    Run,
    RunArtifacts,
    RunEvent,
    SweepCount,
    UsageDay,
)
from dstackweb.runs.states import ENDED, JOB_ENDED, RunStatus
from dstackweb.runs.wait_stats import BUCKETS


def differences() -> Iterator[Difference]:
    """Everything that disagrees. Consistent only while nothing moves, or inside one snapshot."""
    yield from _queues()
    yield from _sweeps()
    yield from _hosts()
    yield from _hours()
    yield from recount.differences()
    yield from _runs_by_name()
    yield from _logs()
    yield from _artifacts()
    yield from _durations()
    yield from _usage()
    orphans = Allocation.objects.filter(job__status__in=JOB_ENDED).count()
    if orphans:
        yield Difference("allocations of ended jobs", orphans, 0)
    missing = Job.objects.exclude(status__in=JOB_ENDED).filter(allocations=None, host__isnull=False).count()
    if missing:
        yield Difference("active jobs that hold nothing", missing, 0)


def _queues() -> Iterator[Difference]:
    counted = {
        (row["queue"], row["status"]): row["n"]
        for row in Run.objects.order_by().values("queue", "status").annotate(n=Count("pk"))
    }
    for row in QueueCount.objects.select_related("queue__project"):
        for status in RunStatus:
            kept, real = getattr(row, status.value), counted.get((row.queue_id, status.value), 0)
            if kept != real:
                yield Difference(f"queue {row.queue} {status.value}", kept, real)


def _sweeps() -> Iterator[Difference]:
    of_runs = Run.objects.filter(sweep__isnull=False).order_by()
    counted = {
        (row["sweep"], row["status"]): row["n"] for row in of_runs.values("sweep", "status").annotate(n=Count("pk"))
    }
    for row in SweepCount.objects.select_related("sweep"):
        for status in RunStatus:
            kept, real = getattr(row, status.value), counted.get((row.sweep_id, status.value), 0)
            if kept != real:
                yield Difference(f"sweep {row.sweep} {status.value}", kept, real)


def _hosts() -> Iterator[Difference]:
    sums = Host.objects.annotate(cpus_real=Sum("allocations__cpus"), memory_real=Sum("allocations__memory_mib"))
    for host in sums:
        if host.cpus_used != (host.cpus_real or 0):
            yield Difference(f"host {host.name} CPUs", host.cpus_used, host.cpus_real or 0)
        if host.memory_used_mib != (host.memory_real or 0):
            yield Difference(f"host {host.name} memory (MiB)", host.memory_used_mib, host.memory_real or 0)


def _hours() -> Iterator[Difference]:
    """Placements per hour, compared with their events.

    By project: a run may have changed its queue or priority since, and takes its events with it. Those of removed runs
    are counted apart.
    """
    since = hour_of(timezone.now()) - dt.timedelta(days=KEPT_DAYS - 1)
    hours = QueueHour.objects.filter(hour__gte=since)
    kept = {
        (row["queue__project__name"], row["hour"]): row["n"]
        for row in hours.order_by()
        .values("queue__project__name", "hour")
        .annotate(n=Sum(F("placed") - F("placed_removed")))
    }
    events = RunEvent.objects.filter(
        kind=RunEventKind.PROVISIONING, data__from=RunStatus.SUBMITTED.value, at__gte=since
    )
    by_hour = events.order_by().values("run__project__name", begun=TruncHour("at", tzinfo=dt.UTC))
    counted = {(row["run__project__name"], row["begun"]): row["n"] for row in by_hour.annotate(n=Count("pk"))}
    for project, hour in sorted(kept.keys() | counted.keys()):
        was, real = kept.get((project, hour), 0), counted.get((project, hour), 0)
        if was != real:
            yield Difference(f"placed in {project} in the hour of {hour:%Y-%m-%d %H:%M} UTC", was, real)
    for row in hours.select_related("queue__project"):
        waits = sum(getattr(row, bucket) for bucket in BUCKETS)
        if waits != row.placed:
            yield Difference(f"waits counted in {row}", waits, row.placed)


def _logs() -> Iterator[Difference]:
    sums = Job.objects.order_by().values_list("run__project").annotate(bytes=Sum("log_counted")).filter(bytes__gt=0)
    real, kept = dict(sums), dict(ProjectLogs.objects.exclude(bytes=0).values_list("project", "bytes"))
    for project in sorted(real.keys() | kept.keys()):
        if kept.get(project, 0) != real.get(project, 0):
            yield Difference(f"bytes of logs of project {project}", kept.get(project, 0), real.get(project, 0))


def _artifacts() -> Iterator[Difference]:
    sums = Artifact.objects.order_by().values_list("job__run").annotate(files=Count("pk"), bytes=Sum("size"))
    real = {run: (files, size) for run, files, size in sums}
    kept = {run: (files, size) for run, files, size in RunArtifacts.objects.values_list("run", "files", "bytes")}
    for run in sorted(real.keys() | kept.keys()):
        for what, was, counted in zip(("files", "bytes"), kept.get(run, (0, 0)), real.get(run, (0, 0)), strict=True):
            if was != counted:
                yield Difference(f"{what} of artifacts of run {run}", was, counted)
    by_project = Artifact.objects.order_by().values_list("job__run__project").annotate(bytes=Sum("size"))
    real_bytes, kept_bytes = dict(by_project), dict(ProjectArtifacts.objects.values_list("project", "bytes"))
    for project in sorted(real_bytes.keys() | kept_bytes.keys()):
        if kept_bytes.get(project, 0) != real_bytes.get(project, 0):
            was, counted = kept_bytes.get(project, 0), real_bytes.get(project, 0)
            yield Difference(f"bytes of artifacts of project {project}", was, counted)


def _durations() -> Iterator[Difference]:
    """Learned durations beside ended runs. Those that are not counted by prefix are among the rest."""
    real: Counter[learned_durations.DurationKey] = Counter()
    ended = Run.objects.filter(status__in=ENDED, started_at__isnull=False, ended_at__isnull=False)
    for run in ended.only("project", "user", "name", "attempt", "started_at", "ended_at").iterator():
        if (key := learned_durations.key_of(run, run.ended_at)) is not None:
            real[key] += 1
    columns = ("project", "prefix", "user", "bin", "runs")
    kept = Counter(
        {learned_durations.DurationKey(*key): runs for *key, runs in LearnedDuration.objects.values_list(*columns)}
    )
    for key in sorted(kept):
        if key.prefix and kept[key] > real[key]:
            yield Difference(f"runs of {key}", kept[key], real[key])
    kept_in_all, real_in_all = (_without_prefix(each) for each in (kept, real))
    for whole in sorted(kept_in_all.keys() | real_in_all.keys()):
        if kept_in_all[whole] != real_in_all[whole]:
            yield Difference(f"durations of {whole}", kept_in_all[whole], real_in_all[whole])


def _usage() -> Iterator[Difference]:
    """Usage beside ended jobs and runs. By member: a retried run may have changed its queue since.

    An instance's launch may become known after the end of its job, which then had cost nothing.
    """
    kept, real = usage.kept(), usage.of_ended()
    for key in sorted(kept.keys() | real.keys()):
        for name in (*usage.OF_JOBS, *usage.OUTCOMES):
            was, counted = kept.get(key, Counter())[name], real.get(key, Counter())[name]
            if was > counted or (was < counted and name != "micro_usd"):
                project, day, user = key
                yield Difference(f"{name} of user {user} in project {project} on {day}", was, counted)
    for row in UsageDay.objects.filter(idle_ms__gt=F("measured_ms")):
        yield Difference(f"idle ms of {row}", row.idle_ms, row.measured_ms)


def _without_prefix(counted: Counter[learned_durations.DurationKey]) -> Counter[learned_durations.DurationKey]:
    found: Counter[learned_durations.DurationKey] = Counter()
    for key, runs in counted.items():
        found[key._replace(prefix="")] += runs
    return found


def _runs_by_name() -> Iterator[Difference]:
    """A project's progress beside its runs: each is a task in the group of its name."""
    counted: Counter[tuple[int, str, str, TaskState]] = Counter()
    rows = Run.objects.order_by().values_list("project", "name", "status").annotate(n=Count("pk"))
    for project, name, status, number in rows:
        counted[project, *prefix_counters.prefix_and_group(name), prefix_counters.STATE[RunStatus(status)]] += number
    kept: Counter[tuple[int, str, str, TaskState]] = Counter()
    for group in TaskGroup.objects.filter(prefix__scope__run_id=0).select_related("prefix__scope"):
        for state in TaskState:
            kept[group.prefix.scope.project_id, group.prefix.name, group.name, state] += getattr(group, state)
    for key in sorted(kept.keys() | counted.keys()):
        if kept[key] != counted[key]:
            yield Difference(f"{key[3]} among runs called {key[2]!r}", kept[key], counted[key])
    timed = Run.objects.filter(status__in=prefix_counters.TIMED, started_at__isnull=False, ended_at__isnull=False)
    took: defaultdict[int, float] = defaultdict(float)
    number_of: Counter[int] = Counter()
    for project, started, ended in timed.values_list("project", "started_at", "ended_at").iterator():
        number_of[project] += 1
        took[project] += prefix_counters.took_s(started, ended) or 0.0
    for scope in Scope.objects.filter(run_id=0).select_related("project"):
        if scope.duration_n != number_of[scope.project_id]:
            yield Difference(f"timed {scope}", scope.duration_n, number_of[scope.project_id])
        elif not isclose(scope.duration_s, took[scope.project_id], rel_tol=1e-6, abs_tol=1e-3):
            yield Difference(f"seconds of {scope}", scope.duration_s, took[scope.project_id])
