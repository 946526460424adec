"""GPU metrics of a run: samples per job and GPU over time, newest samples, and the state of its policy."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Field, P, Path, QueryEx, Router, Schema

from dstackweb.api.app import ready, refusals, run_of
from dstackweb.api.utilization import PolicyOut
from dstackweb.gpus.models import GpuSeries
from dstackweb.gpus.policy_status import policy_status
from dstackweb.gpus.selectors import MEASURED, Columns, samples_of
from dstackweb.lib.errors import Invalid
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.runs.models import Job, Run
from dstackweb.runs.run_places import job_place

router = Router(tags=["utilization"])
REFUSALS = refusals(404, 422)
RANGE = dt.timedelta(hours=1)
"""The default time range."""
LONGEST = dt.timedelta(days=30)
MOST_POINTS = 2000
MOST_NUMBERS = 100_000
"""The most points of all GPUs together in one answer."""

From = QueryEx[dt.datetime | None, P(alias="from", description="Default: an hour before `to`")]
To = QueryEx[dt.datetime | None, P(alias="to", description="Default: now, or the run's end")]
Points = QueryEx[int, P(ge=2, le=MOST_POINTS, description="Maximum number of points; fewer for many GPUs")]
Attempt = QueryEx[int | None, P(ge=1, le=2**31 - 1, description="Default: the newest")]


class LatestSampleOut(Schema):
    """The newest sample."""

    at: dt.datetime
    utilization: int | None = Field(description="Percent")
    memory_used_mib: int | None
    power_w: int | None
    temperature_c: int | None
    throttle: int | None = Field(description="NVML's bits for throttled clocks")
    processes: list[dict[str, Any]] = Field(description="With `pid`, `user` and `memory_mib`")


class GpuMetricsOut(Schema):
    """A GPU or MIG device. The lists have a value for each of `times`, null without a sample."""

    uuid: str
    index: int | None = Field(description="NVML's index; null for a GPU without samples")
    name: str
    memory_mib: int | None
    power_limit_w: int | None
    last: LatestSampleOut | None
    low_since: dt.datetime | None = Field(description="Start of the time below the policy's minimum")
    utilization: list[float | None]
    memory_used_mib: list[float | None]
    power_w: list[float | None]
    temperature_c: list[float | None]


class NodeMetricsOut(Schema):
    """A job."""

    node: int
    status: str
    where: str = Field(description="A host, or a cloud instance")
    gpus: list[GpuMetricsOut]


class MetricsOut(Schema):
    """An attempt of a run. `times` are the starts of spans of `step_s` seconds; null without a sample."""

    run: str
    id: str
    status: str
    attempt: int
    step_s: float | None
    times: list[dt.datetime]
    policy: PolicyOut | None = Field(description="As in the run, for the newest attempt")
    jobs: list[NodeMetricsOut]


@router.get("/{name}/metrics", response={200: MetricsOut, **REFUSALS}, summary="GPU metrics of a run")
def metrics(
    request: HttpRequest,
    project: Path[str],
    name: str,
    since: From = None,
    until: To = None,
    points: Points = 240,
    attempt: Attempt = None,
) -> HttpResponse:
    """Per job and GPU, at most 30 days: samples of the last 24 hours, averages of five minutes before."""
    run, now = run_of(request, project, name)[0], timezone.now()
    since, until = _range(run, since, until, now)
    attempt = attempt or run.attempt
    jobs = list(Job.objects.filter(run=run, attempt=attempt).select_related("host", "backend").order_by("node"))
    gpus = sum(len(job.gpus) for job in jobs)
    room = max(2, MOST_NUMBERS // max(1, gpus))
    columns = samples_of(jobs, to_ms(since), to_ms(until), min(points, room))
    times = [to_moment(at_ms) for at_ms in columns[0].at_ms] if columns else []
    of_jobs = defaultdict[Any, list[Columns]](list)
    for one in columns:
        of_jobs[one.series.job_id].append(one)
    policy = PolicyOut.of(policy_status(run, now))
    return ready(
        request,
        {
            "run": run.name,
            "id": str(run.uid),
            "status": run.status,
            "attempt": attempt,
            "step_s": columns[0].step_ms / 1000 if columns else None,
            "times": times,
            "policy": policy.dict() if policy else None,
            "jobs": [_node(job, of_jobs[job.pk], len(times)) for job in jobs],
        },
    )


def _range(
    run: Run, since: dt.datetime | None, until: dt.datetime | None, now: dt.datetime
) -> tuple[dt.datetime, dt.datetime]:
    """The requested time range. Raises Invalid if it is empty or too long."""
    until = _aware(until or min(run.ended_at or now, now))
    try:
        since = _aware(since or until - RANGE)
        span = until - since
        to_ms(since), to_ms(until)
    except (OverflowError, ValueError, OSError):
        raise Invalid.at("from", msg=_("the time range is out of bounds")) from None
    if not dt.timedelta(0) < span <= LONGEST:
        raise Invalid.at("from", msg=_("`from` is before `to`, by %(days)s days at most") % {"days": LONGEST.days})
    return since, until


def _aware(moment: dt.datetime) -> dt.datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def _node(job: Job, columns: Sequence[Columns], points: int) -> dict[str, Any]:
    unseen = set(job.gpus) - {one.series.uuid for one in columns}
    gpus = [_gpu(one) for one in columns] + [_unseen(uuid, points) for uuid in job.gpus if uuid in unseen]
    return {"node": job.node, "status": job.status, "where": job_place(job), "gpus": gpus}


def _gpu(one: Columns) -> dict[str, Any]:
    series = one.series
    own = ("uuid", "index", "name", "memory_mib", "power_limit_w")
    return {
        **{name: getattr(series, name) for name in own},
        "last": _last(series),
        "low_since": None if series.low_since_ms is None else to_moment(series.low_since_ms),
        **{name: getattr(one, name) for name in MEASURED},
    }


def _last(series: GpuSeries) -> dict[str, Any] | None:
    if series.last_ms is None:
        return None
    seen = ("throttle", "processes", *MEASURED)
    return {"at": to_moment(series.last_ms), **{name: getattr(series, name) for name in seen}}


def _unseen(uuid: str, points: int) -> dict[str, Any]:
    empty = dict.fromkeys(("index", "memory_mib", "power_limit_w", "last", "low_since"))
    return {"uuid": uuid, "name": "", **empty, **dict.fromkeys(MEASURED, [None] * points)}
