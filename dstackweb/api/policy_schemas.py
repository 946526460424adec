"""Schemas of utilization policies. Times are ISO 8601 in UTC; money is USD."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from ninja import Field, Schema

from dstackweb.gpus.policy.ledger import Entry, Ledger, Total
from dstackweb.gpus.policy.policy_status import Standing
from dstackweb.gpus.policy.simulation_store import WhatIf, WouldStop
from dstackweb.spec.effective import UtilizationPolicy

Scope = Literal["any", "all"]


class TermsOut(Schema):
    """The rule of a policy."""

    min_gpu_utilization: int = Field(description="Percent; a GPU below it is idle")
    time_window_s: int
    scope: Scope
    warmup_s: int


class PolicyOut(TermsOut):
    """A placed run's utilization policy and its current state.

    `verdict` is `keep`, `unknown` (samples are missing) or `stop`. `low_since` is from when it has been below the
    minimum, `stops_at` when it is stopped if that goes on. `gpu_index` is NVML's index of the GPU that is low on
    `node`, null where all are. `kept_until` is set while somebody keeps it from being stopped.
    """

    action: Literal["terminate", "notify"]
    source: dict[str, Any] = Field(description="Its source, as in `provenance`")
    verdict: Literal["keep", "unknown", "stop"]
    low_since: dt.datetime | None
    stops_at: dt.datetime | None
    node: int
    gpu_index: int | None
    badge: bool = Field(description="Utilization was low for at least half the window")
    noticed: bool = Field(description="A warning about low utilization was sent")
    kept_until: dt.datetime | None
    kept_by: str | None
    kept_because: str | None
    keeps_left: int
    observe_only: bool = Field(description="The project's policies only report violations")

    @classmethod
    def of(cls, found: Standing | None) -> PolicyOut | None:
        if found is None:
            return None
        keep = found.keep
        return cls(
            **found.policy.model_dump(),
            source=found.source,
            verdict=found.verdict.kind.value,
            low_since=found.low_since,
            stops_at=found.stops_at,
            node=found.node,
            gpu_index=found.gpu_index,
            badge=found.badge,
            noticed=found.noticed,
            kept_until=found.paused_until,
            kept_by=keep.by.get_username() if keep and keep.by else None,
            kept_because=keep.reason if keep else None,
            keeps_left=found.keeps_left,
            observe_only=found.observe_only,
        )


class KeepIn(Schema):
    """Why the run should continue; `minutes` defaults to the project's setting."""

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
    """A policy, as in a run file's `utilization_policy`."""

    model_config = {"extra": "forbid"}

    min_gpu_utilization: int = Field(strict=True, ge=0, le=100, examples=[10])
    time_window: str | int = Field(description="At least 1m", examples=["30m"])
    scope: Scope = "any"
    warmup: str | int = Field("0s", examples=["10m"])


class WouldStopOut(Schema):
    """A run that would have been stopped at `at`; hours and USD count from then."""

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
        told: dict[str, Any] = {
            "run": run.name,
            "id": str(run.uid),
            "user": run.user.get_username(),
            "status": run.status,
        }
        return cls(**told, **{name: getattr(stop, name) for name in cls.model_fields if name not in told})


class WhatIfOut(Schema):
    """The runs that the policy would have stopped between `since` and `until`, and the data used.

    `left_out` runs had too many samples to be looked at; `holds` are never stopped.
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
    def of(cls, found: WhatIf) -> WhatIfOut:
        own: dict[str, Any] = {"policy": terms(found.policy), "stops": [WouldStopOut.of(stop) for stop in found.stops]}
        return cls(**own, **{name: getattr(found, name) for name in cls.model_fields if name not in own})


def terms(policy: UtilizationPolicy) -> TermsOut:
    """The rule of a policy, without its action."""
    return TermsOut(**policy.model_dump(exclude={"action"}))


class TotalOut(Schema):
    """Totals; the hours and USD of `unknown` more runs are not included."""

    runs: int
    gpu_hours: float
    usd: float
    unknown: int

    @classmethod
    def of(cls, total: Total) -> TotalOut:
        return cls(**{name: getattr(total, name) for name in cls.model_fields})


class StopOut(Schema):
    """A run that its policy stopped, or (`observed`) would have stopped. Hours and USD until now; null if unknown."""

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
        return cls(**own, **{name: getattr(stop, name) for name in cls.model_fields if name not in own})


class LedgerOut(Schema):
    """The project's policies in the last `days`: stopped runs, violations in observe-only mode, and savings."""

    observe_only: bool
    days: int
    stopped: TotalOut
    observed: TotalOut
    stops: list[StopOut] = Field(description="The newest stops")

    @classmethod
    def of(cls, found: Ledger, observe_only: bool) -> LedgerOut:
        return cls(
            observe_only=observe_only,
            days=found.days,
            stopped=TotalOut.of(found.stopped),
            observed=TotalOut.of(found.observed),
            stops=[StopOut.of(entry) for entry in found.entries],
        )


class ObserveIn(Schema):
    """Whether the project's policies only report violations."""

    model_config = {"extra": "forbid"}

    observe_only: bool = Field(strict=True)
