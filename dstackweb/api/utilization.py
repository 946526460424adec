"""GPU metrics of runs, and utilization policies: their ledger, simulations, and keeping a run. Money is USD."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from ninja import Field, P, Path, QueryEx, Router, Schema
from pydantic import BeforeValidator

from dstackweb.accounts.models import Project
from dstackweb.api.app import (
    REFUSALS,
    Body,
    Id,
    Name,
    Username,
    UsernameOrNull,
    caller,
    project_of,
    ready,
    refusals,
    run_of,
)
from dstackweb.gpus.exemptions import exempt, policies_of, set_observe_only
from dstackweb.gpus.models import GpuSeries
from dstackweb.gpus.policy_status import PolicyStatus, policy_status
from dstackweb.gpus.savings import StopEntry, WhatIf, ledger, parse_policy, what_if as apply_policy
from dstackweb.gpus.selectors import MEASURED, Columns, samples_of
from dstackweb.lib.errors import Invalid
from dstackweb.lib.times import to_moment, to_ms
from dstackweb.runs.models import Job, Run
from dstackweb.runs.run_places import job_place
from dstackweb.spec.codes import UtilizationAction, UtilizationScope

router = Router(tags=["utilization"])
of_runs = Router(tags=["utilization"])


class TermsOut(Schema):
    """What a policy requires."""

    min_gpu_utilization: int = Field(description="Percent; equal to it counts as used")
    time_window_s: int
    scope: UtilizationScope
    warmup_s: int


class PolicyOut(TermsOut):
    """A placed run's utilization policy, and the run's state under it.

    `verdict` is `keep`, `unknown` (samples are missing) or `stop`. `low_since` is when it fell below the minimum,
    `stops_at` when it will be stopped if it stays low. `gpu_index` is NVML's index of the low GPU on `node`, null where
    all are low. `kept_until` is set while a user keeps it from being stopped.
    """

    action: UtilizationAction
    source: dict[str, Any] = Field(description="Its source, as in `provenance`")
    verdict: Literal["keep", "unknown", "stop"]
    low_since: dt.datetime | None
    stops_at: dt.datetime | None
    node: int
    gpu_index: int | None
    badge: bool = Field(description="It has been low for at least half the window")
    noticed: bool = Field(description="A notice was sent for the current low stretch")
    kept_until: dt.datetime | None
    kept_by: UsernameOrNull
    kept_because: str | None
    keeps_left: int
    observe_only: bool = Field(description="The project's policies stop no runs for now")

    @classmethod
    def of(cls, status: PolicyStatus | None) -> PolicyOut | None:
        if status is None:
            return None
        exemption = status.exemption
        own = {
            "verdict": status.verdict.kind,
            "kept_until": status.paused_until,
            "kept_by": exemption and exemption.by,
            "kept_because": exemption and exemption.reason,
            "keeps_left": status.exemptions_left,
        }
        return cls.from_orm(status.policy.model_dump() | vars(status) | own)


class KeepIn(Body):
    """Why the run should continue; `minutes` defaults to the project's usual time."""

    reason: str
    minutes: int | None = Field(None, strict=True)


class KeepOut(Schema):
    """Until when the policy does not stop the run."""

    run: str
    until: dt.datetime
    reason: str
    keeps_left: int


class WhatIfIn(Body):
    """A policy, in the notation of a run file's `utilization_policy`."""

    min_gpu_utilization: int = Field(strict=True, ge=0, le=100, examples=[10])
    time_window: str | int = Field(description="At least 1m", examples=["30m"])
    scope: UtilizationScope = UtilizationScope.ANY
    warmup: str | int = Field("0s", examples=["10m"])


class WouldStopOut(Schema):
    """A run that would have been stopped at `at`; hours and money are those that it used after that."""

    run: Name
    id: Id = Field(validation_alias="run.uid")
    user: Username = Field(validation_alias="run.user")
    status: str = Field(validation_alias="run.status")
    attempt: int
    node: int
    at: dt.datetime
    low_since: dt.datetime
    gpu_index: int | None
    gpus: int
    gpu_hours: float
    usd: float


class WhatIfOut(Schema):
    """The runs that the policy would have stopped between `since` and `until`, and the data that it was applied to.

    `left_out` runs had too many samples to be included; `holds` are never stopped.
    """

    policy: TermsOut
    since: dt.datetime
    until: dt.datetime
    runs: int
    gpus: int
    samples: int
    gpu_hours: float
    left_out: int
    holds: int
    saved_gpu_hours: float
    saved_usd: float
    stops: list[WouldStopOut]


class TotalOut(Schema):
    """Sums; the hours and money of `unknown` more runs are not included."""

    runs: int
    gpu_hours: float
    usd: float
    unknown: int


class StopOut(Schema):
    """A run that its policy stopped, or (`observed`) would have. Hours and money are so far; null: unknown."""

    run: str = Field(validation_alias="stop.run_name")
    user: UsernameOrNull = Field(validation_alias="stop.user")
    at: dt.datetime = Field(validation_alias="stop.at")
    observed: bool = Field(validation_alias="stop.observed")
    low_since: dt.datetime = Field(validation_alias="stop.low_since")
    node: int = Field(validation_alias="stop.node")
    gpu_index: int | None = Field(validation_alias="stop.gpu_index")
    gpus: Annotated[int, BeforeValidator(len)] = Field(validation_alias="stop.gpus")
    min_gpu_utilization: int = Field(validation_alias="stop.min_gpu_utilization")
    time_window_s: int = Field(validation_alias="stop.time_window_s")
    scope: UtilizationScope = Field(validation_alias="stop.scope")
    gpu_hours: float | None
    usd: float | None
    next_run: str | None = Field(description="The run of this project that got the first of its GPUs, at `next_at`")
    next_at: dt.datetime | None = Field(validation_alias="stop.next_at")

    @staticmethod
    def resolve_next_run(entry: StopEntry) -> str | None:
        stop = entry.stop
        return stop.next_run.name if stop.next_run and stop.next_run.project_id == stop.project_id else None


class LedgerOut(Schema):
    """The project's policies in the last `days`: what they stopped, what they would have, and the time that saved."""

    observe_only: bool
    days: int
    stopped: TotalOut
    observed: TotalOut
    stops: list[StopOut] = Field(description="The newest stops", validation_alias="entries")


class ObserveIn(Body):
    """Whether the project's policies report what they would stop without stopping it."""

    observe_only: bool = Field(strict=True)


@router.get("", response={200: LedgerOut, **REFUSALS}, summary="Stopped runs and savings")
def index(request: HttpRequest, project: Path[str]) -> dict[str, Any]:
    """Of the last 30 days. A stopped run saves what it would have held until its `max_duration`."""
    found, _role = project_of(request, project)
    return _ledger(found, policies_of(found).observe_only)


@router.patch("", response={200: LedgerOut, **REFUSALS}, summary="Turn observe-only on or off")
def change(request: HttpRequest, project: Path[str], body: ObserveIn) -> dict[str, Any]:
    """For managers. In observe-only mode violations are reported and no runs are stopped."""
    found, role = project_of(request, project)
    policies = set_observe_only(found, role, body.observe_only)
    return _ledger(found, policies.observe_only)


@router.post("/what-if", response={200: WhatIfOut, **REFUSALS}, summary="Simulate a policy")
def what_if(request: HttpRequest, project: Path[str], body: WhatIfIn) -> WhatIf:
    """Apply a policy to the samples of the last 24 hours, ignoring the runs' own policies. Changes nothing."""
    found, _role = project_of(request, project)
    return apply_policy(found, parse_policy(body.dict()), timezone.now())


def _ledger(project: Project, observe_only: bool) -> dict[str, Any]:
    return {"observe_only": observe_only, **vars(ledger(project, timezone.now()))}


@of_runs.post("/{name}/keep", response={200: KeepOut, **REFUSALS, **refusals(409)}, summary="Keep an idle run")
def keep(request: HttpRequest, project: Path[str], name: str, body: KeepIn) -> KeepOut:
    """Its policy will not stop it for a while. For its owner and managers, as often as the project allows."""
    run, role = run_of(request, project, name, "member")
    exemption = exempt(run, caller(request), role, body.reason, minutes=body.minutes)
    left = max(0, policies_of(run.project).max_exemptions - run.policy_exemptions.count())
    return KeepOut(run=run.name, until=exemption.until, reason=exemption.reason, keeps_left=left)


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


@of_runs.get(
    "/{name}/metrics",
    response={200: MetricsOut, **refusals(404, 422)},
    summary="GPU metrics of a run",
    operation_id="dstackweb_api_metrics_metrics",
)
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
