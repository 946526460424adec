"""All kept counters and sums beside a recount (docs/design.md, rule 7)."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isclose
from typing import Any

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
    yield from _runs("queue", QueueCount.objects.select_related("queue__project"))
    yield from _runs("sweep", SweepCount.objects.select_related("sweep"))
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
    # One whose commands had ended when it was taken back after a restore needs nothing of its host.
    running = Job.objects.exclude(status__in=JOB_ENDED).filter(exited_at=None)
    missing = running.filter(allocations=None, host__isnull=False).count()
    if missing:
        yield Difference("active jobs that hold nothing", missing, 0)


def _compare(label: Callable[[Any], str], kept: Mapping[Any, float], real: Mapping[Any, float]) -> Iterator[Difference]:
    """Where two sets of numbers by key differ; one that is missing is 0."""
    for key in sorted(kept.keys() | real.keys()):
        if (was := kept.get(key, 0)) != (counted := real.get(key, 0)):
            yield Difference(label(key), was, counted)


def _runs(what: str, counts: Iterable[QueueCount] | Iterable[SweepCount]) -> Iterator[Difference]:
    """The runs of each queue or sweep by status."""
    of_runs = Run.objects.exclude(**{what: None}).order_by().values_list(what, "status")
    real = {(owner, status): n for owner, status, n in of_runs.annotate(n=Count("pk"))}
    for row in counts:
        for status in RunStatus:
            kept, counted = getattr(row, status.value), real.get((row.pk, status.value), 0)
            if kept != counted:
                yield Difference(f"{what} {getattr(row, what)} {status.value}", kept, counted)


def _hosts() -> Iterator[Difference]:
    sums = Host.objects.annotate(cpus_real=Sum("allocations__cpus"), memory_real=Sum("allocations__memory_mib"))
    for host in sums:
        if host.cpus_used != (host.cpus_real or 0):
            yield Difference(f"host {host.name} CPUs", host.cpus_used, host.cpus_real or 0)
        if host.memory_used_mib != (host.memory_real or 0):
            yield Difference(f"host {host.name} memory (MiB)", host.memory_used_mib, host.memory_real or 0)


def _hours() -> Iterator[Difference]:
    """Placements per hour beside their events, by project: a run may have changed its queue or priority since."""
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
    placed = "placed in {0[0]} in the hour of {0[1]:%Y-%m-%d %H:%M} UTC".format
    yield from _compare(placed, kept, counted)
    for row in hours.select_related("queue__project"):
        waits = sum(getattr(row, bucket) for bucket in BUCKETS)
        if waits != row.placed:
            yield Difference(f"waits counted in {row}", waits, row.placed)


def _logs() -> Iterator[Difference]:
    sums = Job.objects.order_by().values_list("run__project").annotate(bytes=Sum("log_counted"))
    kept = ProjectLogs.objects.values_list("project", "bytes")
    yield from _compare("bytes of logs of project {}".format, dict(kept), dict(sums))


def _artifacts() -> Iterator[Difference]:
    found = Artifact.objects.order_by()
    of_runs = found.values_list("job__run")
    kept = RunArtifacts.objects.values_list
    files, sizes = of_runs.annotate(n=Count("pk")), of_runs.annotate(n=Sum("size"))
    yield from _compare("files of artifacts of run {}".format, dict(kept("run", "files")), dict(files))
    yield from _compare("bytes of artifacts of run {}".format, dict(kept("run", "bytes")), dict(sizes))
    by_project = found.values_list("job__run__project").annotate(n=Sum("size"))
    of_projects = ProjectArtifacts.objects.values_list("project", "bytes")
    yield from _compare("bytes of artifacts of project {}".format, dict(of_projects), dict(by_project))


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
    yield from _compare("durations of {}".format, _without_prefix(kept), _without_prefix(real))


def _usage() -> Iterator[Difference]:
    """Usage beside ended jobs and runs, by member. A job whose instance's launch was unknown at its end is free."""
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
    yield from _compare("{0[3]} among runs called {0[2]!r}".format, kept, counted)
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
