"""Schemas of sweeps. Times are ISO 8601 in UTC."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from ninja import Field, Schema

from dstackweb.api.app import Id, Name, Username, UsernameOrNull
from dstackweb.api.run_schemas import DependencyOut, RunStatusName
from dstackweb.runs.codes import NoRun
from dstackweb.runs.models import Dependency, Sweep
from dstackweb.runs.selectors import dependencies_of
from dstackweb.runs.sweeps.selectors import SweepCounts, SweepRun, parameter_names
from dstackweb.spec.array import Array
from dstackweb.spec.effective import EffectiveSpec
from dstackweb.wording.statuses import after
from dstackweb.wording.tables import sweep_run


class SweepCountsOut(Schema):
    """How many of its runs are where; all of them add up to its size."""

    waiting: int
    running: int = Field(description="On hosts or instances, also those that start or stop")
    done: int
    failed: int
    terminated: int
    left: int = Field(description="To be created")
    dropped: int = Field(description="Never created, since it was stopped")
    removed: int = Field(description="Deleted, or removed because they were old")


class SweepRowOut(Schema):
    """A sweep. Its runs are called `<name>-<index>`, from 0 to `size` - 1."""

    type: Literal["sweep"] = "sweep"
    id: Id = Field(validation_alias="uid")
    name: str
    user: Username
    queue: Name
    priority: int
    size: int
    status: RunStatusName = Field(
        description="`pending` while it waits for others, `running` until all its runs have ended, then `done` if all "
        "are, `terminated` if none was created, otherwise `failed`"
    )
    status_message: str = Field(description="What it waits for (`after`), or why it was canceled; else empty")
    max_parallel: int | None
    counts: SweepCountsOut
    waits_for_name: str = Field(description="The name of its next run, while another run has it; else empty")
    submitted_at: dt.datetime
    stopped_at: dt.datetime | None
    stopped_by: UsernameOrNull = Field(description="Null if its owner was not allowed to submit any more")
    ended_at: dt.datetime | None

    @staticmethod
    def resolve_status_message(sweep: Sweep) -> str:
        return after(sweep.status_detail) if sweep.status_detail else ""

    @staticmethod
    def resolve_counts(sweep: Sweep) -> SweepCounts:
        return SweepCounts.of(sweep)


class SweepOut(SweepRowOut):
    """With what its runs have in common. `settings` is in the run file's notation, `provenance` has the same keys."""

    after: list[DependencyOut] = Field(description="The runs and sweeps that had, or have, to end before it")
    parameters: list[str] = Field(description="The names of the parameters of its runs")
    settings: dict[str, Any]
    provenance: dict[str, Any]

    @staticmethod
    def resolve_after(sweep: Sweep) -> list[Dependency]:
        return dependencies_of(sweep)

    @staticmethod
    def resolve_parameters(sweep: Sweep) -> list[str]:
        return list(parameter_names(sweep))

    @staticmethod
    def resolve_settings(sweep: Sweep) -> dict[str, Any]:
        array = Array.model_validate(sweep.array)
        spec = EffectiveSpec.model_validate(sweep.spec).model_copy(update={"array": array, "priority": sweep.priority})
        return spec.as_file()


class SweepsOut(Schema):
    items: list[SweepRowOut]
    next: str | None


class SweepRunOut(Schema):
    """A run of a sweep, or, without `id`, why there is none: `to_come`, `dropped` or `removed`."""

    index: int
    name: str
    id: str | None
    parameters: dict[str, str]
    status: RunStatusName | NoRun
    status_message: str = Field(description="Its message, or why it ended unless it is done")
    termination_reason: str
    exit_code: int | None
    started_at: dt.datetime | None
    ended_at: dt.datetime | None
    duration_s: float | None = Field(description="From the start of its newest attempt to its end; null before")

    @classmethod
    def of(cls, row: SweepRun) -> SweepRunOut:
        return cls(parameters=row.parameters, **sweep_run(row))


class SweepRunsOut(Schema):
    items: list[SweepRunOut]
    next: str | None


class PatchSweepIn(Schema):
    """Changes of a sweep."""

    model_config = {"extra": "forbid"}

    priority: int = Field(strict=True)
