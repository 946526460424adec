"""What a runner may say: text that every database holds, and of its job's GPUs no more than columns take."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from ninja import Field, Schema
from pydantic import BeforeValidator

from dstackweb.backends.hosts.nvml import Reading
from dstackweb.gpus.clock import to_ms

MESSAGE_CHARS = 4000


def storable(text: object) -> object:
    """Whatever a runner quotes of files and commands, as text that every database holds."""
    if not isinstance(text, str):
        return text
    return text.encode("utf-8", "replace").decode().replace("\0", "?")[:MESSAGE_CHARS]


DAY_S = 24 * 3600
MANY = 64
"""GPUs of one machine, and processes told of one GPU."""

Percent = Annotated[int, Field(ge=0, le=100)]
Mib = Annotated[int, Field(ge=0, lt=2**31)]
Watts = Annotated[int, Field(ge=0, lt=2**15)]
Text = Annotated[str, Field(max_length=120), BeforeValidator(storable)]


class ProcessIn(Schema):
    pid: int = Field(ge=0, lt=2**31)
    user: Text | None = None
    memory_mib: Mib | None = None


class GpuIn(Schema):
    """As `backends.hosts.nvml.Reading`."""

    uuid: str = Field(max_length=80)
    index: int = Field(0, ge=0, lt=2**15)
    name: Text = ""
    memory_mib: Mib
    utilization: Percent | None = None
    memory_used_mib: Mib | None = None
    power_w: Watts | None = None
    power_limit_w: Watts | None = None
    temperature_c: int | None = Field(None, ge=-273, le=1000)
    throttle: int | None = Field(None, ge=0, lt=2**62)
    processes: list[ProcessIn] = Field([], max_length=MANY)

    def reading(self) -> Reading:
        told = self.dict()
        return Reading(**told | {"processes": tuple(told["processes"])})


class SampleIn(Schema):
    age_s: float = Field(ge=0, le=DAY_S)
    gpus: list[GpuIn] = Field(max_length=MANY)


class SamplesIn(Schema):
    samples: list[SampleIn] = Field(max_length=100)

    def taken(self, now: dt.datetime) -> list[tuple[int, list[Reading]]]:
        """The samples with the moments (ms) at which they were taken, when it is `now`."""
        now_ms = to_ms(now)
        return [
            (now_ms - round(sample.age_s * 1000), [gpu.reading() for gpu in sample.gpus]) for sample in self.samples
        ]
