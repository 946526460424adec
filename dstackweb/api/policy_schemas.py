"""Schemas of utilization policies. Times are ISO 8601 in UTC; money is USD."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from typing import Any, Literal

from ninja import Field, Schema

from dstackweb.gpus.policy.ledger import Entry, Ledger
from dstackweb.gpus.policy.policy_status import PolicyStatus
from dstackweb.gpus.policy.simulation_store import WhatIf, WouldStop

Scope = Literal["any", "all"]


class TermsOut(Schema):
    """What a policy requires."""

    min_gpu_utilization: int = Field(description="Percent; equal to it counts as used")
    time_window_s: int
    scope: Scope
    warmup_s: int


class PolicyOut(TermsOut):
    """A placed run's utilization policy, and the run's state under it.

    `verdict` is `keep`, `unknown` (samples are missing) or `stop`. `low_since` is when it fell below the minimum,
    `stops_at` when it will be stopped if it stays low. `gpu_index` is NVML's index of the low GPU on `node`, null where
    all are low. `kept_until` is set while a user keeps it from being stopped.
    """

    action: Literal["terminate", "notify"]
    source: dict[str, Any] = Field(description="Its source, as in `provenance`")
    verdict: Literal["keep", "unknown", "stop"]
    low_since: dt.datetime | None
    stops_at: dt.datetime | None
    node: int
    gpu_index: int | None
    badge: bool = Field(description="It has been low for at least half the window")
    noticed: bool = Field(description="A notice was sent for the current low stretch")
    kept_until: dt.datetime | None
    kept_by: str | None
    kept_because: str | None
    keeps_left: int
    observe_only: bool = Field(description="The project's policies stop no runs for now")

    @classmethod
    def of(cls, status: PolicyStatus | None) -> PolicyOut | None:
        if status is None:
            return None
        exemption = status.exemption
        own = status.policy.model_dump() | {
            "verdict": status.verdict.kind.value,
            "kept_until": status.paused_until,
            "kept_by": exemption.by.get_username() if exemption and exemption.by else None,
            "kept_because": exemption.reason if exemption else None,
            "keeps_left": status.exemptions_left,
        }
        return cls(**own, **_attributes(status, cls, own))


def _attributes(source: object, schema: type[Schema], other: Collection[str]) -> dict[str, Any]:
    """The schema's fields of an object, without the `other` ones."""
    return {name: getattr(source, name) for name in schema.model_fields if name not in other}


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
    scope: Scope = "any"
    warmup: str | int = Field("0s", examples=["10m"])


class WouldStopOut(Schema):
    """A run that would have been stopped at `at`; hours and money are those that it used after that."""

    run: str
    id: str
    user: str
    status: str
    attempt: int
    node: int
    at: dt.datetime
    low_since: dt.datetime
    gpu_index: int | None
    gpus: int
    gpu_hours: float
    usd: float

    @classmethod
    def of(cls, stop: WouldStop) -> WouldStopOut:
        run = stop.run
        own: dict[str, Any] = {
            "run": run.name,
            "id": str(run.uid),
            "user": run.user.get_username(),
            "status": run.status,
        }
        return cls(**own, **_attributes(stop, cls, own))


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

    @classmethod
    def of(cls, result: WhatIf) -> WhatIfOut:
        own: dict[str, Any] = {
            "policy": TermsOut.from_orm(result.policy),
            "stops": [WouldStopOut.of(stop) for stop in result.stops],
        }
        return cls(**own, **_attributes(result, cls, own))


class TotalOut(Schema):
    """Sums; the hours and money of `unknown` more runs are not included."""

    runs: int
    gpu_hours: float
    usd: float
    unknown: int


class StopOut(Schema):
    """A run that its policy stopped, or (`observed`) would have. Hours and money are so far; null: unknown."""

    run: str
    user: str | None
    at: dt.datetime
    observed: bool
    low_since: dt.datetime
    node: int
    gpu_index: int | None
    gpus: int
    min_gpu_utilization: int
    time_window_s: int
    scope: Scope
    gpu_hours: float | None
    usd: float | None
    next_run: str | None = Field(description="The run of this project that got the first of its GPUs, at `next_at`")
    next_at: dt.datetime | None

    @classmethod
    def of(cls, entry: Entry) -> StopOut:
        stop = entry.stop
        own: dict[str, Any] = {
            "run": stop.run_name,
            "user": stop.user.get_username() if stop.user else None,
            "gpus": len(stop.gpus),
            "gpu_hours": entry.gpu_hours,
            "usd": entry.usd,
            "next_run": stop.next_run.name if stop.next_run and stop.next_run.project_id == stop.project_id else None,
        }
        return cls(**own, **_attributes(stop, cls, own))


class LedgerOut(Schema):
    """The project's policies in the last `days`: what they stopped, what they would have, and the time that saved."""

    observe_only: bool
    days: int
    stopped: TotalOut
    observed: TotalOut
    stops: list[StopOut] = Field(description="The newest stops")

    @classmethod
    def of(cls, ledger: Ledger, observe_only: bool) -> LedgerOut:
        return cls(
            observe_only=observe_only,
            days=ledger.days,
            stopped=TotalOut.from_orm(ledger.stopped),
            observed=TotalOut.from_orm(ledger.observed),
            stops=[StopOut.of(entry) for entry in ledger.entries],
        )


class ObserveIn(Schema):
    """Whether the project's policies report what they would stop without stopping it."""

    model_config = {"extra": "forbid"}

    observe_only: bool = Field(strict=True)
