"""Hosts: their capacity and state, changes by deployment admins, and joining."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Annotated, Any

from django.conf import settings
from django.db import transaction
from django.http import HttpRequest
from django.utils.translation import gettext as _
from ninja import Field, Path, Router, Schema, Status
from ninja.security import HttpBearer
from pydantic import BeforeValidator

from dstackweb.accounts.access import visible_projects
from dstackweb.accounts.models import User
from dstackweb.api.app import CONFLICTS, Body, Listing, Username, admin, auth_of, caller, refusals
from dstackweb.backends.hosts import inventory, joining
from dstackweb.backends.models import HostInvite
from dstackweb.gpus.models import HostSampling
from dstackweb.gpus.selectors import newest, throttle_reasons
from dstackweb.lib.errors import NotFound
from dstackweb.lib.times import to_moment
from dstackweb.runs.models import Run
from dstackweb.scheduler import team_hosts
from dstackweb.scheduler.team_hosts import HostSummary, list_hosts


class GpuSampleOut(Schema):
    """A GPU's newest sample. Values that it doesn't report are null."""

    at: Annotated[dt.datetime, BeforeValidator(to_moment)] = Field(validation_alias="last_ms")
    utilization: int | None = Field(description="Percent")
    memory_used_mib: int | None
    power_w: int | None
    power_limit_w: int | None
    temperature_c: int | None
    held_back: Annotated[list[str], BeforeValidator(throttle_reasons)] = Field(
        validation_alias="throttle",
        description="Why its clocks are throttled: `power_cap`, `power_brake`, `heat`, `hardware`",
    )


class HostGpuOut(Schema):
    uuid: str
    index: int
    name: str
    memory_mib: int
    present: bool
    run: str | None
    stranger: dict[str, Any] | None
    sample: GpuSampleOut | None


class SamplingOut(Schema):
    """The last sample of a host's GPUs. Without `library` the machine has no NVML, and no GPUs are read."""

    at: dt.datetime
    took_ms: float
    library: bool
    error: str


class ReservedOut(Schema):
    """A reservation on a host for a run that has waited long. `gpus` are UUIDs."""

    run: str
    cpus: int
    memory_mib: int
    gpus: Annotated[list[str], BeforeValidator(sorted)]


class CgroupsOut(Schema):
    """Whether jobs' cgroups limit memory and CPUs; `version` is `v1`, `v2` or empty. `code` says why not, if not."""

    version: str = ""
    memory: bool = False
    cpu: bool = False
    code: str = ""
    error: str = ""


class EngineOut(Schema):
    """Its container engine. `code` says why it can't be used, if not; `volumes` are folders that jobs may mount."""

    name: str = ""
    version: str = ""
    code: str = ""
    error: str = ""
    volumes: list[str] = []


class HostOut(Schema):
    """`gpus_used` counts GPUs of jobs and GPUs used outside dstackweb; `jobs` counts active jobs."""

    name: str
    online: bool
    draining: bool
    leaving: bool
    isolation: str
    cgroups: CgroupsOut
    engine: EngineOut
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
    agent_version: str = Field(description="dstackweb's version on a joined host; empty for the server's own machine")
    held_back_at: dt.datetime | None = Field(description="Since when it gets no jobs because starts fail there")
    start_failures: int = Field(description="Failed starts in a row")
    start_error: str = Field(
        description="Why the last of them failed. `commands_fail`: commands of three runs in a minute ended within 5 s "
        "with 126 or 127"
    )
    sampling: SamplingOut | None
    gpus: list[HostGpuOut]
    reserved: ReservedOut | None


class HostsOut(Listing[HostOut]): ...


class PatchHostIn(Body):
    """Changes by deployment admins. Labels that are not given stay; a label that is null is removed."""

    draining: bool | None = Field(None, strict=True)
    labels: dict[str, str | None] | None = None


class GoneIn(Body):
    """`reason`: how you know that the machine is gone. Everyone can read it."""

    reason: str


class GoneOut(Schema):
    """How many jobs ended."""

    ended: int


class HostInviteOut(Schema):
    id: int
    created_by: Username
    created_at: dt.datetime
    expires_at: dt.datetime


class NewHostInviteOut(HostInviteOut):
    """`token` is shown only once. `obstacles` are reasons why no machine can join yet."""

    token: str
    command: str
    obstacles: list[str]


class HostInvitesOut(Listing[HostInviteOut]): ...


class HostJoinIn(Body):
    """A machine that joins as a host. With `check` only obstacles are reported."""

    name: str
    url: str = Field(description="The server's URL as the machine reaches it")
    version: str = Field(description="dstackweb's version there")
    labels: dict[str, str] = Field(default_factory=dict)
    insecure: bool = Field(False, description="Allow plain HTTP on a trusted network")
    nonce: str = Field("", max_length=64, description="Made by the machine: with it, it may repeat the call")
    check: bool = False


class JoinOut(Schema):
    """`token` is the host's own, for its agent alone; null after a check."""

    name: str
    expires_at: dt.datetime
    obstacles: list[str]
    token: str | None


router = Router(tags=["hosts"])


class JoinToken(HttpBearer):
    """`Authorization: Bearer <join token>`."""

    def authenticate(self, request: HttpRequest, token: str) -> HostInvite:
        return joining.of_token(token)


@router.get("", response={200: HostsOut, **refusals()}, summary="Hosts")
def hosts(request: HttpRequest) -> dict[str, Any]:
    """CPUs, memory, and GPUs with their run and newest sample. Runs of projects that you can't see have no name."""
    return {"items": _hosts(list_hosts(), caller(request))}


@router.post("/invites", response={201: NewHostInviteOut, **CONFLICTS}, summary="Create a join token")
def invite(request: HttpRequest) -> Status[dict[str, Any]]:
    """For deployment admins. It works once, within an hour, and makes one machine a host."""
    made, token = joining.invite(admin(request, _("hosts")))
    url = settings.DSTACKWEB_PUBLIC_URL or request.build_absolute_uri("/").rstrip("/")
    command = f"dstackweb host join {url} --token {token}"
    own = {"token": token, "command": command, "obstacles": joining.loopback(url)}
    return Status(201, HostInviteOut.from_orm(made).dict() | own)


@router.get("/invites", response={200: HostInvitesOut, **CONFLICTS}, summary="Valid join tokens")
def invites(request: HttpRequest) -> dict[str, Any]:
    admin(request, _("hosts"))
    return {"items": joining.open_invites()}


@router.delete("/invites/{invite_id}", response={204: None, **CONFLICTS}, summary="Revoke a join token")
def withdraw(request: HttpRequest, invite_id: Path[int]) -> Status[None]:
    admin(request, _("hosts"))
    joining.withdraw(invite_id)
    return Status(204, None)


@router.post("/join", auth=JoinToken(), response={200: JoinOut, **CONFLICTS}, summary="Join as a host")
def join(request: HttpRequest, body: HostJoinIn) -> dict[str, Any]:
    """Called by the new host with a join token. After an error or a check the token stays valid."""
    row = auth_of(request)
    machine = joining.JoinRequest(**body.model_dump(exclude={"check"}))
    if body.check:
        joining.check_unused(row)
    return {
        "name": machine.name,
        "expires_at": row.expires_at,
        "obstacles": joining.obstacles(machine) if body.check else [],
        "token": None if body.check else joining.join(row, machine),
    }


@router.patch("/{name}", response={200: HostOut, **CONFLICTS}, summary="Drain a host, or change its labels")
def patch(request: HttpRequest, name: Path[str], body: PatchHostIn) -> dict[str, Any]:
    """For deployment admins. `draining: false` also cancels a removal."""
    who = admin(request, _("hosts"))
    host = inventory.find(name)
    if body.labels is not None:
        inventory.set_labels(host, who, body.labels)
    if body.draining is not None:
        inventory.set_draining(host, who, body.draining)
    return _one(name, who)


@router.post("/{name}/leave", response={200: HostOut, **CONFLICTS}, summary="Remove a host")
def leave(request: HttpRequest, name: Path[str]) -> dict[str, Any]:
    """For deployment admins. It gets no new jobs, and disappears when its jobs have ended."""
    who = admin(request, _("hosts"))
    with transaction.atomic():  # a host without jobs is removed as soon as this commits
        inventory.leave(inventory.find(name), who)
        return _one(name, who)


@router.post("/{name}/clear", response={200: HostOut, **CONFLICTS}, summary="Place jobs on a host again")
def clear(request: HttpRequest, name: Path[str]) -> dict[str, Any]:
    """For deployment admins: a host that is held back because starts failed takes jobs again."""
    who = admin(request, _("hosts"))
    team_hosts.take_jobs_again(inventory.find(name), who)
    return _one(name, who)


@router.post("/{name}/revoke", response={200: HostOut, **CONFLICTS}, summary="Revoke a host's token")
def revoke(request: HttpRequest, name: Path[str]) -> dict[str, Any]:
    """For deployment admins: its agent is refused until the machine joins again. Its running jobs continue."""
    who = admin(request, _("hosts"))
    joining.revoke(inventory.find(name), who)
    return _one(name, who)


@router.post("/{name}/gone", response={200: GoneOut, **CONFLICTS}, summary="Declare a machine gone")
def gone(request: HttpRequest, name: Path[str], body: GoneIn) -> dict[str, int]:
    """For deployment admins: ends the jobs of an offline host, and frees what they held. 409 while it is online."""
    who = admin(request, _("hosts"))
    return {"ended": team_hosts.declare_gone(inventory.find(name), who, body.reason)}


def _one(name: str, who: User) -> dict[str, Any]:
    found = list_hosts(name)
    if not found:
        raise NotFound(_("there is no host %(name)s") % {"name": name})
    return _hosts(found, who)[0]


def _hosts(found: Sequence[HostSummary], who: User) -> list[dict[str, Any]]:
    visible = {project.pk for project in visible_projects(who)}
    series = newest([gpu for one in found for gpu, _run in one.gpus])
    sampling = HostSampling.objects.in_bulk([one.host.pk for one in found])

    def name_of(run: Run) -> str:
        return run.name if run.project_id in visible else "a run of another project"

    return [
        {
            **vars(one.host),
            **{name: getattr(one, name) for name in ("online", "gpus_total", "gpus_used", "jobs")},
            "gpus": [
                {**vars(gpu), "run": name_of(run) if run else None, "sample": series.get(gpu.uuid)}
                for gpu, run in one.gpus
            ],
            "sampling": sampling.get(one.host.pk),
            "reserved": {**vars(one.kept), "run": name_of(one.kept.run)} if one.kept else None,
        }
        for one in found
    ]
