"""The shapes of what is asked of hosts and answered, joining and leaving included."""

from __future__ import annotations

import datetime as dt
from typing import Any

from ninja import Field, Schema


class GpuSampleOut(Schema):
    """What a GPU was seen doing last. What it doesn't tell is null."""

    at: dt.datetime
    utilization: int | None = Field(description="Percent")
    memory_used_mib: int | None
    power_w: int | None
    power_limit_w: int | None
    temperature_c: int | None
    held_back: list[str] = Field(
        description="What holds its clocks down: `power_cap`, `power_brake`, `heat`, `hardware`"
    )


class GpuOut(Schema):
    uuid: str
    index: int
    name: str
    memory_mib: int
    present: bool
    run: str | None
    stranger: dict[str, Any] | None
    sample: GpuSampleOut | None


class SamplingOut(Schema):
    """How the last look at a host's GPUs went. Without `library` the machine has no NVML, and so no GPU to look at."""

    at: dt.datetime
    took_ms: float
    library: bool
    error: str


class ReservedOut(Schema):
    """What a host keeps for a run that has waited long. `gpus` are UUIDs."""

    run: str
    cpus: int
    memory_mib: int
    gpus: list[str]


class HostOut(Schema):
    """`gpus_used` counts those that a job holds or that are used outside dstackweb; `jobs` are the active ones."""

    name: str
    online: bool
    draining: bool
    leaving: bool
    isolation: str
    address: str
    cpus: int
    cpus_used: int
    memory_mib: int
    memory_used_mib: int
    gpus_total: int
    gpus_used: int
    jobs: int
    labels: dict[str, Any]
    seen_at: dt.datetime | None
    error: str
    sampling: SamplingOut | None
    gpus: list[GpuOut]
    reserved: ReservedOut | None


class HostsOut(Schema):
    items: list[HostOut]
    next: str | None = None


class PatchHostIn(Schema):
    """What deployment admins edit of a host. Labels that are not named stay; one that is null is taken away."""

    model_config = {"extra": "forbid"}

    draining: bool | None = Field(None, strict=True)
    labels: dict[str, str | None] | None = None


class HostInviteOut(Schema):
    id: int
    created_by: str
    created_at: dt.datetime
    expires_at: dt.datetime


class NewHostInviteOut(HostInviteOut):
    """`token` is shown this once. `obstacles` are what still keeps another machine out."""

    token: str
    command: str
    obstacles: list[str]


class HostInvitesOut(Schema):
    items: list[HostInviteOut]
    next: str | None = None


class JoinIn(Schema):
    """A machine that wants to become a host. With `check` it is only told what is in its way."""

    model_config = {"extra": "forbid"}

    name: str
    url: str = Field(description="The server's address as the machine reaches it")
    version: str = Field(description="dstackweb's version there")
    labels: dict[str, str] = Field(default_factory=dict)
    insecure: bool = Field(False, description="Plain HTTP will do, on a network that is trusted")
    check: bool = False


class ReachOut(Schema):
    """A service that the machine itself must be able to reach; `setting` is where the server has its address."""

    what: str
    host: str
    port: int
    setting: str


class JoinOut(Schema):
    """`environment` is what `manage.py host` needs; it has the deployment's keys, and is null where nothing joined."""

    name: str
    api_url: str
    expires_at: dt.datetime
    reach: list[ReachOut]
    obstacles: list[str]
    environment: dict[str, str] | None
