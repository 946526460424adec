"""Utilization policies: their state, their ledger, simulations, and keeping a run. Money is USD."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from django.utils import timezone
from ninja import Field, Path, Router, Schema
from pydantic import BeforeValidator

from dstackweb.accounts.models import Project
from dstackweb.api.app import Id, Name, Username, UsernameOrNull, caller, project_of, refusals, run_of
from dstackweb.gpus.exemptions import exempt, policies_of, set_observe_only
from dstackweb.gpus.policy_status import PolicyStatus
from dstackweb.gpus.savings import StopEntry, WhatIf, ledger, parse_policy
from dstackweb.gpus.savings import what_if as apply_policy
from dstackweb.spec.codes import UtilizationAction, UtilizationScope

router = Router(tags=["utilization"])
of_runs = Router(tags=["utilization"])
REFUSALS = refusals(403, 404, 422)


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


class KeepIn(Schema):
    """Why the run should continue; `minutes` defaults to the project's usual time."""

    model_config = {"extra": "forbid"}

    reason: str
    minutes: int | None = Field(None, strict=True)


class KeepOut(Schema):
    """Until when the policy does not stop the run."""

    run: str
    until: dt.datetime
    reason: str
    keeps_left: int


class WhatIfIn(Schema):
    """A policy, in the notation of a run file's `utilization_policy`."""

    model_config = {"extra": "forbid"}

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


class ObserveIn(Schema):
    """Whether the project's policies report what they would stop without stopping it."""

    model_config = {"extra": "forbid"}

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
