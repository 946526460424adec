"""What runners and the agents of hosts and cloud instances send."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

from ninja import Field, Schema
from pydantic import AwareDatetime, BeforeValidator

from dstackweb.lib.times import to_ms
from dstackweb.runner import relay
from dstackweb.runner.limits import ArtifactLeft
from dstackweb.runner.nvml import Sample
from dstackweb.spec.containers import MAX_IMAGE

MESSAGE_CHARS = 4000


def storable(text: object) -> object:
    """A runner's text from files and commands, as text that every database can store."""
    if not isinstance(text, str):
        return text
    return text.encode("utf-8", "replace").decode().replace("\0", "?")[:MESSAGE_CHARS]


DAY_S = 24 * 3600
MANY = 64
"""The most GPUs of a machine, and processes of a GPU."""

Mib = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=120), BeforeValidator(storable)]


def measured(least: int, most: int) -> BeforeValidator:
    """Let a measured value that nothing can have count as unknown, without the others beside it."""
    return BeforeValidator(lambda value: value if type(value) is int and least <= value <= most else None)


Percent = Annotated[int | None, measured(0, 100)]
Watts = Annotated[int | None, measured(0, 2**15 - 1)]
UsedMib = Annotated[int | None, measured(0, 2**31 - 1)]
Celsius = Annotated[int | None, measured(-273, 1000)]
Bits = Annotated[int | None, measured(0, 2**62 - 1)]


class ProcessIn(Schema):
    pid: int = Field(ge=0, lt=2**31)
    user: Text | None = None
    memory_mib: UsedMib = None


class GpuIn(Schema):
    """As `runner.nvml.Sample`."""

    uuid: str = Field(max_length=80)
    index: int = Field(0, ge=0, lt=2**15)
    name: Text = ""
    memory_mib: Mib
    utilization: Percent = None
    memory_used_mib: UsedMib = None
    power_w: Watts = None
    power_limit_w: Watts = None
    temperature_c: Celsius = None
    throttle: Bits = None
    processes: list[ProcessIn] = Field([], max_length=MANY, fail_fast=True)

    def sample(self) -> Sample:
        values = self.dict()
        return Sample(**values | {"processes": tuple(values["processes"])})


class SampleIn(Schema):
    age_s: float = Field(ge=0, le=DAY_S)
    gpus: list[GpuIn] = Field(max_length=MANY, fail_fast=True)


class SamplesIn(Schema):
    samples: list[SampleIn] = Field(max_length=100, fail_fast=True)

    def taken(self, now: dt.datetime) -> list[tuple[int, list[Sample]]]:
        now_ms = to_ms(now)
        return [(now_ms - round(sample.age_s * 1000), [gpu.sample() for gpu in sample.gpus]) for sample in self.samples]


class ClaimIn(Schema):
    nonce: str = Field(min_length=1, max_length=64, pattern=r"^[!-~]+$")
    pid: int | None = None
    host: Text = ""


class HeartbeatIn(Schema):
    beat: int
    phase: Literal["pulling", "waiting", "running", "stopping", "exited"] = "running"


class JobHeartbeatIn(Schema):
    token: str = Field(max_length=200)
    nonce: str = Field(max_length=64)


class HeartbeatsIn(Schema):
    jobs: list[JobHeartbeatIn] = Field(max_length=relay.MOST, fail_fast=True)


class InterruptionIn(Schema):
    at: AwareDatetime


class CodeRefusedIn(Schema):
    """As `runner.archive.BadArchive`."""

    fault: str = Field(max_length=40, pattern="^[a-z_]+$")
    name: Annotated[str, Field(max_length=400), BeforeValidator(storable)] = ""
    limit: int | None = Field(None, ge=0, lt=2**62)


class DiskIn(Schema):
    """As `runner.disk.DiskWatch.over`."""

    used: int | None = Field(None, ge=0, lt=2**62)
    limit: int | None = Field(None, ge=0, lt=2**62)
    free: int | None = Field(None, ge=0, lt=2**62)
    reserve: int | None = Field(None, ge=0, lt=2**62)
    free_inodes: int | None = Field(None, ge=0, lt=2**62)
    inode_reserve: int | None = Field(None, ge=0, lt=2**62)


class ImagePullIn(Schema):
    """As `runner.images.PullFailed`."""

    fault: str = Field(max_length=40, pattern="^[a-z_]+$")
    image: Annotated[str, Field(max_length=MAX_IMAGE), BeforeValidator(storable)]


class StartedIn(Schema):
    image_digest: Annotated[str, Field(max_length=300), BeforeValidator(storable)] = ""


class LeftOutIn(Schema):
    """As `runner.artifacts.LeftOut`."""

    path: Annotated[str, Field(max_length=2000), BeforeValidator(storable)]
    why: ArtifactLeft
    size: int | None = Field(None, ge=0, lt=2**62)


class ArtifactsIn(Schema):
    left_out: list[LeftOutIn] = Field(max_length=100, fail_fast=True)
    number: int = Field(ge=0, lt=2**31)


class ExitIn(Schema):
    exit_code: int | None = Field(None, ge=-(2**31), lt=2**31)
    reason: str = Field(max_length=60, pattern="^[a-z_]+$")
    message: Annotated[str, BeforeValidator(storable)] = ""
    log_size: int | None = Field(None, ge=0, lt=2**62)
    log_missing: int = Field(0, ge=0, lt=2**62)
    memory_mib: int | None = Field(None, ge=0, lt=2**40)
    disk: DiskIn | None = None
    code_refused: CodeRefusedIn | None = None
    image_pull_failed: ImagePullIn | None = None
    artifacts: ArtifactsIn | None = None
    signalled: bool = False
    by_engine: bool = False
    interruption: InterruptionIn | None = None
