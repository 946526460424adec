"""The API of the agents on joined hosts and cloud instances (docs/runner.md). Not public; a token opens one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from ninja import Field, Router, Schema
from ninja.security import HttpBearer
from pydantic import BeforeValidator

from dstackweb.api import tasks
from dstackweb.api.app import TokenOf, auth_of
from dstackweb.api.runner_schemas import DAY_S, MANY, GpuIn, InterruptionIn, Mib, Text, storable
from dstackweb.lib.errors import Forbidden, Invalid
from dstackweb.runner.isolation import Arrangement
from dstackweb.runner.machine import GpuProbe, Probe
from dstackweb.runner.nvml import Snapshot
from dstackweb.runner.pyz import pyz
from dstackweb.scheduler import host_agents
from dstackweb.scheduler.cloud import agents
from dstackweb.scheduler.host_agents import HostReport, KnownHost
from dstackweb.scheduler.restored import HeldTicket
from dstackweb.spec.labels import check_labels

JOBS = 2000
"""The most jobs of a host in one call."""
OLD = 500
"""The most old files in one call."""
Message = Annotated[str, BeforeValidator(storable)]


class HostToken(HttpBearer):
    """The token of a host's agent, as `auth_of` has its host."""

    def authenticate(self, request: HttpRequest, token: str) -> KnownHost | None:
        return host_agents.host_of_token(token, _process(request))


of_hosts = Router(auth=HostToken())
of_instances = Router()


class StrangerIn(Schema):
    pid: int = Field(ge=0, lt=2**31)
    user: Text | None = None


class HostGpuIn(Schema):
    """As `runner.machine.GpuProbe`."""

    uuid: str = Field(min_length=1, max_length=80, pattern=r"^[\w./-]+$")
    index: int = Field(ge=0, lt=2**15)
    name: Text
    memory_mib: Mib
    stranger: StrangerIn | None = None


class CgroupsIn(Schema):
    """As `runner.cgroups.support`."""

    version: str = Field("", max_length=10)
    memory: bool = False
    cpu: bool = False
    code: str = Field("", max_length=40)
    error: Message = ""


class EngineIn(Schema):
    """As `runner.engine.find`."""

    name: str = Field("", max_length=20)
    version: str = Field("", max_length=40)
    code: str = Field("", max_length=40)
    error: Message = ""
    volumes: list[Annotated[str, Field(max_length=1000)]] = Field([], max_length=100, fail_fast=True)


class FactsIn(Schema):
    """What a machine has, as `runner.machine.Probe` and `runner.isolation.Arrangement`."""

    version: str = Field("", max_length=40)
    starting: bool = False
    labels: dict[str, str] = Field(default_factory=dict)
    address: str = Field("", max_length=255, pattern=r"^[0-9A-Za-z.:_-]*$")
    cpus: int = Field(ge=1, lt=2**15)
    memory_mib: int = Field(ge=0, lt=2**40)
    boot_id: str = Field("", max_length=64)
    gpus: list[HostGpuIn] = Field(max_length=MANY * 8, fail_fast=True)
    cgroups: CgroupsIn
    engine: EngineIn | None = None
    isolation: Literal["sandbox", "project", "user", "shared", "none"]
    job_user: str = Field("", max_length=60)
    runs_dir: str = Field(min_length=1, max_length=1024, pattern=r"^/")
    home: str = Field("", max_length=60, description="Device and inode of the agent's home")
    error: Message = ""


class ProbeIn(Schema):
    error: Message


class HostSampleIn(Schema):
    """As `runner.nvml.Snapshot`, with its age."""

    age_s: float = Field(ge=0, le=DAY_S)
    took_ms: float = Field(0, ge=0, le=DAY_S * 1000)
    library: bool = True
    error: Message = ""
    gpus: list[GpuIn] = Field(max_length=MANY * 8, fail_fast=True)


class TicketIn(Schema):
    """A job that was started on the host, as `runner.jobs.LocalJobs.tickets`."""

    ticket: str = Field(max_length=20_000)
    nonce: str = Field(min_length=1, max_length=64, pattern=r"^[!-~]+$")
    ended: bool


class PollIn(Schema):
    jobs: dict[UUID, Literal["starting", "runner", "left", "gone"]] = Field(max_length=JOBS)
    failed: dict[UUID, Message] = Field(default_factory=dict, max_length=JOBS)
    probe: ProbeIn | None = None
    samples: list[HostSampleIn] = Field([], max_length=100, fail_fast=True)
    tickets: list[TicketIn] | None = Field(None, max_length=JOBS)
    tickets_left: int = Field(0, ge=0)

    def report(self) -> HostReport:
        samples = [
            (one.age_s, Snapshot(tuple(gpu.sample() for gpu in one.gpus), one.library, one.error, one.took_ms))
            for one in sorted(self.samples, key=lambda one: -one.age_s)
        ]
        tickets = None if self.tickets is None else [HeldTicket(**one.dict()) for one in self.tickets]
        probe = self.probe.error if self.probe else None
        return HostReport(self.jobs, self.failed, probe, samples, tickets, self.tickets_left)


class CountsIn(Schema):
    jobs: int = Field(ge=0, lt=2**31)
    runs: int = Field(ge=0, lt=2**31)


class FilesIn(Schema):
    """Old files of a host, by job and by run. `removed`: also ask for runs that were removed lately."""

    jobs: list[UUID] = Field(max_length=OLD)
    runs: list[UUID] = Field(max_length=OLD)
    removed: bool = False
    pruned: CountsIn
    waiting: CountsIn


@of_hosts.post("/{name}/facts", include_in_schema=False)
def facts(request: HttpRequest, name: str, body: FactsIn) -> dict[str, Any]:
    """What the machine has: at the agent's start, and whenever it changes."""
    known = _own(request, name)
    if known.removed:
        return {"removed": True}
    host_agents.take_over(known, _process(request), f"{body.boot_id}/{body.home}")
    try:
        labels = check_labels(body.labels)
    except ValueError as error:
        raise Invalid.at("labels", msg=str(error)) from None
    gpus = tuple(GpuProbe(**gpu.model_dump()) for gpu in body.gpus)
    engine = body.engine.model_dump() if body.engine and (body.engine.name or body.engine.code) else {}
    seen = Probe(body.cpus, body.memory_mib, gpus, body.boot_id, body.error, body.cgroups.model_dump(), engine)
    host_agents.register(
        known,
        seen,
        Arrangement(body.isolation, body.job_user, Path(body.runs_dir)),
        address=body.address,
        version=body.version,
        starting=body.starting,
        labels=labels,
    )
    return {}


@of_hosts.post("/{name}/poll", include_in_schema=False)
def poll(request: HttpRequest, name: str, body: PollIn) -> dict[str, Any]:
    """An agent's heartbeat, answered with what its jobs need."""
    known = _own(request, name)
    if known.removed:
        return {"removed": True}
    host_agents.check_process(known, _process(request))
    return host_agents.poll(known, body.report())


@of_hosts.post("/{name}/files", include_in_schema=False)
def files(request: HttpRequest, name: str, body: FilesIn) -> dict[str, list[str]]:
    """Which of these old files the host may remove."""
    known = _own(request, name)
    if known.removed:
        raise Forbidden(f"host {name} was removed")
    host_agents.check_process(known, _process(request))
    pruned, waiting = body.pruned, body.waiting
    host_agents.note_pruned(known, (pruned.jobs, waiting.jobs), (pruned.runs, waiting.runs))
    return host_agents.removable(known, body.jobs, body.runs, removed_runs=body.removed)


def _own(request: HttpRequest, name: str) -> KnownHost:
    """Return the caller's host. Raises Forbidden if `name` is another."""
    known: KnownHost = auth_of(request)
    if known.name != name:
        raise Forbidden("this token is for another host")
    return known


def _process(request: HttpRequest) -> str:
    """Return the random id of the agent's process."""
    return request.headers.get("X-Nonce", "")[:64]


class AgentJoinIn(Schema):
    token: str = Field(min_length=1, max_length=200)
    nonce: str = Field(min_length=1, max_length=64, pattern=r"^[!-~]+$")
    gpus: list[Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[\w-]+$")]] = Field([], max_length=256)
    address: str = Field("", max_length=255, pattern=r"^[0-9A-Za-z.:-]*$")


class EngineSetupIn(Schema):
    """As `runner.engine.EngineSetup.report`."""

    job: UUID
    fault: str = Field("", max_length=40, pattern="^[a-z_]*$")
    text: Message = ""


class NextIn(Schema):
    job: UUID | None = None
    left: bool = False
    interruption: InterruptionIn | None = None
    error: Message = ""
    engine: EngineSetupIn | None = None


@of_instances.get("/pyz", auth=None, include_in_schema=False)
def runner(request: HttpRequest) -> HttpResponse:
    """The runner and the agent as one file without secrets. Its `ETag` is its SHA-256."""
    return tasks.zip_response(request, *pyz())


@of_instances.post("/instances/{instance_id}/join", auth=None, include_in_schema=False)
def join(request: HttpRequest, instance_id: UUID, body: AgentJoinIn) -> dict[str, Any]:
    """An agent's first call: exchanges the single-use token in its user data for its own, and its first step."""
    token = agents.join(instance_id, body.token, body.nonce, gpus=body.gpus, address=body.address)
    return {"token": token, "next": agents.next_step(instance_id, agents.AgentReport())}


@of_instances.post("/instances/{instance_id}/next", auth=TokenOf(agents.instance_of_token), include_in_schema=False)
def next_(request: HttpRequest, instance_id: UUID, body: NextIn) -> dict[str, Any]:
    """An agent's heartbeat, answered with its next step."""
    if auth_of(request) != instance_id:
        raise Forbidden("this token is for another instance")
    at = body.interruption.at if body.interruption else None
    engine = agents.EngineReport(**body.engine.dict()) if body.engine else None
    return agents.next_step(instance_id, agents.AgentReport(body.job, body.left, at, body.error, engine))
