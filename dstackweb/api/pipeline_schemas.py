"""Schemas of files with several runs."""

from __future__ import annotations

from typing import Literal

from ninja import Field, Schema

from dstackweb.api.plan_schemas import PlanOut
from dstackweb.api.run_schemas import RunOut
from dstackweb.api.sweep_schemas import SweepOut


class PipelineOut(Schema):
    """The runs and sweeps that one file has made, each after those it waits for."""

    type: Literal["pipeline"] = "pipeline"
    runs: list[RunOut | SweepOut] = Field(description='A sweep has `"type": "sweep"`')


class PipelinePlanOut(Schema):
    """The plan of each run and sweep of a file, each after those it would wait for."""

    type: Literal["pipeline"] = "pipeline"
    plans: list[PlanOut] = Field(description="`settings.name` is the run's. Positions count the others of the file")
