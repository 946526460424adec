"""Schemas of runs. Times are ISO 8601 in UTC; money is USD."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from django.conf import settings
from django.utils import timezone
from ninja import Field, Schema

from dstackweb.api.app import Body, Id, Name, NameOrNull, Page, UsernameOrNull
from dstackweb.api.utilization import PolicyOut
from dstackweb.gpus.policy_status import policy_status
from dstackweb.runs import connections, selectors
from dstackweb.runs.codes import DependencyOutcome
from dstackweb.runs.comparison import current_spec
from dstackweb.runs.holds import access_to
from dstackweb.runs.models import Dependency, Job, Run, RunEvent
from dstackweb.runs.queue.positions import RankFactors, rank_factors
from dstackweb.runs.row_fields import RunRow
from dstackweb.runs.rows import row_of
from dstackweb.runs.run_places import silent_hosts
from dstackweb.runs.service_codes import ServiceState
from dstackweb.runs.service_health import HealthReport
from dstackweb.runs.states import RunStatus
from dstackweb.runs.usage import costs_by_run
from dstackweb.spec.codes import On, Otherwise
from dstackweb.spec.source import Config
from dstackweb.wording import events, fair_share, gateway, statuses, units, waiting

RunStatusName = Literal[
    "pending", "submitted", "provisioning", "running", "terminating", "done", "failed", "terminated"
]


class SubmitIn(Body):
    """`config` is the run file, as YAML text or as an object; several runs are a list of objects."""

    config: Config
    env: dict[str, str] = Field(default_factory=dict, description="Values for bare names in the file's `env` list")
    overrides: dict[str, Any] = Field(default_factory=dict, description="Keys set on the command line")


class SubmitRunIn(SubmitIn):
    """A run to submit, with its uploaded code."""

    archive: str | None = Field(None, pattern="^[0-9a-f]{64}$", description="SHA-256 of an uploaded archive")


class PatchRunIn(Body):
    """Changes of a run."""

    priority: int | None = Field(None, strict=True)
    queue: str | None = None


class StopIn(Body):
    """`abort` kills immediately instead of after `stop_duration`."""

    abort: bool = False


class HoldIn(Body):
    """The resources, in the notation of the run file, and `for` how long."""

    model_config = {"populate_by_name": True}

    duration: str = Field(alias="for", examples=["3h"])
    gpu: str = Field("", examples=["A100:2"])
    cpu: str = ""
    memory: str = ""
    name: str = ""
    queue: str = ""
    priority: int | None = Field(None, strict=True)


class ExtendIn(Body):
    """The time to add."""

    model_config = {"populate_by_name": True}

    duration: str = Field(alias="for", examples=["1h"])


class AccountingOut(Schema):
    """What the backend's accounting says that a job used, its runner included. Null: it does not say.

    `cpu_reserved_s` is its CPUs times `elapsed_s`; `billed_h` is in hours of the engine's own unit of billing.
    """

    elapsed_s: int | None = None
    cpu_reserved_s: int | None = None
    cpu_used_s: float | None = None
    memory_peak_mib: int | None = None
    billed_h: float | None = None
    energy_j: int | None = None
    detail: str


class JobOut(Schema):
    """One node of one attempt."""

    id: Id
    attempt: int
    node: int
    status: str
    backend: Name
    region: str
    instance_type: str
    spot: bool = Field(validation_alias="is_spot")
    price: float = Field(description="USD per hour at the start")
    host: NameOrNull
    cpus: int
    memory_mib: int
    gpus: list[str]
    image_digest: str = Field(description="The image that its container was made of")
    placed_at: dt.datetime
    started_at: dt.datetime | None
    ended_at: dt.datetime | None
    exit_code: int | None
    termination_reason: str
    message: str
    accounting: AccountingOut | None = Field(description="Null until its backend's accounting knows, or for ever")
    log_missing: int = Field(description="Bytes of output that a log over its limit lacks")
    log_cut: str = Field(
        description="Why output is not kept any more: `job_limit`, `project_quota`, or empty. The run goes on"
    )

    @staticmethod
    def resolve_message(job: Job) -> str:
        return statuses.message(job.detail, job.message)

    @staticmethod
    def resolve_accounting(job: Job) -> dict[str, Any] | None:
        usage = job.instance.usage if job.instance else None
        return {**usage, "detail": units.used(usage)} if usage else None


class EventOut(Schema):
    """An event: a code with data, and in words as `detail`."""

    at: dt.datetime
    kind: str
    actor: UsernameOrNull
    attempt: int
    node: int | None
    data: dict[str, Any]
    detail: str

    @staticmethod
    def resolve_detail(event: RunEvent) -> str:
        return str(events.event_text(event, nodes=1))


class HoldOut(Schema):
    """A hold's resources, and the commands to connect; `here`: its host is the dstackweb server."""

    host: str
    address: str
    here: bool
    gpus: list[str]
    lines: list[str]


class FactorsOut(Schema):
    """Why a waiting run has its position.

    `aged_points` are the points of priority that its waiting is worth against a run submitted now. A run submitted now
    goes ahead of it from priority `ahead_of_priority`: null where it would not even with 100. `penalty_s` is how far
    its member's fair share puts it behind, and `penalty_detail` says why.
    """

    priority: int
    submitted_at: dt.datetime
    aged_points: float
    moved_by: UsernameOrNull
    moved_at: dt.datetime | None
    position: int | None
    ahead_of_priority: int | None
    penalty_s: int
    penalty_detail: str

    @staticmethod
    def resolve_penalty_detail(factors: RankFactors) -> str:
        return fair_share.penalty(factors.penalty_s, factors.penalty_basis)


class SilentHostOut(Schema):
    host: str
    seen_at: dt.datetime | None


class DependencyOut(Schema):
    """A run, or a sweep, that must end before this one enters its queue. `id` is null once it was removed.

    A sweep is `pending` while it waits itself, then `running` until all its runs have ended, then `done` if all are,
    otherwise `failed`.
    """

    run: str = Field(validation_alias="name")
    sweep: bool = Field(description="Whether `run` and `id` are a sweep's")
    id: str | None
    status: RunStatusName | None
    on: On
    otherwise: Otherwise
    outcome: DependencyOutcome

    @staticmethod
    def resolve_id(one: Dependency) -> str | None:
        return str(one.of.uid) if one.of else None

    @staticmethod
    def resolve_status(one: Dependency) -> str | None:
        return one.of.status if one.of else None

    @staticmethod
    def resolve_sweep(one: Dependency) -> bool:
        return one.sweep is not None


class ConnectOut(Schema):
    """How to connect to a dev environment or a hold, through the server's gateway."""

    ready: Annotated[bool, Field(description="Whether its runner is connected to the gateway now")]
    ssh: Annotated[str | None, Field(description="The command; null without SSH")]
    vscode: Annotated[str | None, Field(description="A link that opens it in VS Code")]
    url: Annotated[str | None, Field(description="The dashboard's address that opens JupyterLab in a browser")]
    used_at: Annotated[dt.datetime | None, Field(description="When a person last used it")]
    stops_s: Annotated[int | None, Field(description="Seconds of further inactivity after which it is stopped")]

    @classmethod
    def of(cls, run: Run) -> ConnectOut | None:
        found = connections.connection_to(run)
        if found is None:
            return None
        url = f"{settings.DSTACKWEB_API_URL}{connections.open_path(run)}" if found.opens else None
        return cls(**vars(found) | {"ssh": found.ssh or None, "vscode": found.vscode or None, "url": url})


class HealthOut(Schema):
    """How a running service is: `starting` until a check has succeeded, then `healthy` or `unhealthy`.

    `unknown` where it is not checked now, as its runner or the gateway is away. `error` is why the last check failed,
    empty if it did not, and `detail` says it in words.
    """

    state: ServiceState
    since: dt.datetime
    checked_at: dt.datetime
    failures: Annotated[int, Field(description="How many of the last checks have failed in a row")]
    error: str
    detail: str

    @staticmethod
    def resolve_detail(health: HealthReport) -> str:
        return gateway.check_failure(health.error, health.error_data)


class ServiceOut(Schema):
    """How to call a service, with an API token as `Authorization: Bearer …`, and its health."""

    url: Annotated[str, Field(description="Where it is called; a host name of its own")]
    open_url: Annotated[str, Field(description="The dashboard's address that opens it in a browser")]
    port: Annotated[int, Field(description="Where its commands listen")]
    ready: Annotated[bool, Field(description="Whether its runner is connected to the gateway now")]
    health: HealthOut
    used_at: Annotated[dt.datetime | None, Field(description="When the last request came")]
    stops_s: Annotated[int | None, Field(description="Seconds of further inactivity after which it is stopped")]

    @classmethod
    def of(cls, run: Run) -> ServiceOut | None:
        found = connections.service_of(run)
        if found is None:
            return None
        open_url = f"{settings.DSTACKWEB_API_URL}{connections.open_path(run)}"
        return cls.from_orm({**vars(found), **vars(found.use), "open_url": open_url})


class OfSweepOut(Schema):
    """The sweep that a run belongs to."""

    name: str
    id: Id
    index: int

    @classmethod
    def of(cls, run: Run) -> OfSweepOut | None:
        if run.sweep is None or run.sweep_index is None:
            return None
        return cls(name=run.sweep.name, id=str(run.sweep.uid), index=run.sweep_index)


@dataclass(slots=True, kw_only=True)
class RunOut(RunRow):
    """A run. `position` and `reason` are null unless it waits, `hold` unless it is a hold that has started."""

    position: int | None
    reason: str | None
    reason_detail: str | None
    after: Annotated[list[DependencyOut], Field(description="The runs that had, or have, to end before it")]
    sweep: Annotated[OfSweepOut | None, Field(description="The sweep that it belongs to")]
    factors: Annotated[FactorsOut | None, Field(description="Why it has its position; null unless it waits")]
    silent_hosts: Annotated[list[SilentHostOut], Field(description="Offline hosts on which it has active jobs")]
    silent_detail: Annotated[str | None, Field(description="What it waits for while they are silent")]
    max_duration_s: Annotated[int | None, Field(description="Its limit, including extensions")]
    cost: Annotated[float, Field(description="USD so far, for all attempts; hosts are free")]
    hold: HoldOut | None
    service: Annotated[ServiceOut | None, Field(description="Null unless it is a service that runs")]
    connect: Annotated[ConnectOut | None, Field(description="Null unless people can connect to it, and it runs")]
    policy: Annotated[PolicyOut | None, Field(description="State of its utilization policy; null unless it is placed")]
    spec: dict[str, Any]
    settings: Annotated[dict[str, Any], Field(description="`spec` in the run file's notation, as changed since")]
    provenance: dict[str, Any]
    jobs: list[JobOut]
    jobs_next: Annotated[str | None, Field(description="The next cursor of `…/jobs`; null if these are all")]
    events: Annotated[list[EventOut], Field(description="The newest events, in order of time")]
    events_next: Annotated[str | None, Field(description="The next cursor of `…/events`; null if these are all")]

    @classmethod
    def of(cls, run: Run, *, is_new: bool = False) -> RunOut:
        """`is_new`: it was submitted a moment ago, and has no jobs."""
        reason, data = selectors.why(run)
        jobs, jobs_next = ([], None) if is_new else jobs_page(run)
        events, events_next = (run.first_events, None) if run.first_events else events_page(run)
        now = timezone.now()
        found = rank_factors(run, now) if run.status == RunStatus.SUBMITTED else None
        access, silent = access_to(run, jobs), silent_hosts(run, jobs)
        (row,) = statuses.worded([row_of(run, jobs, is_new=is_new)])
        return cls(
            **row.values(),
            position=found.position if found else None,
            factors=FactorsOut.from_orm(found) if found else None,
            reason=reason or None,
            reason_detail=waiting.reason(reason, data).text if reason else None,
            after=[DependencyOut.from_orm(one) for one in selectors.dependencies_of(run)],
            sweep=OfSweepOut.of(run),
            silent_hosts=[SilentHostOut.from_orm(one) for one in silent],
            silent_detail=statuses.silent(run, silent) or None,
            max_duration_s=run.limit_s,
            cost=float(costs_by_run([run], now).get(run.pk, 0)) if jobs else 0.0,
            hold=HoldOut.from_orm(access) if access else None,
            service=ServiceOut.of(run),
            connect=ConnectOut.of(run),
            policy=PolicyOut.of(policy_status(run, now)),
            spec=run.spec,
            settings=current_spec(run).as_file(),
            provenance=run.provenance,
            jobs=[JobOut.from_orm(job) for job in jobs],
            jobs_next=jobs_next,
            events=[EventOut.from_orm(event) for event in reversed(events)],
            events_next=events_next,
        )


class JobsOut(Page[JobOut]): ...


class EventsOut(Page[EventOut]): ...


def jobs_page(run: Run, limit: int = selectors.JOBS_AT_ONCE, cursor: str = "") -> tuple[list[Job], str | None]:
    """Jobs, newest attempt first, and the cursor of the next page: the last one's attempt and node."""
    attempt, _, node = cursor.partition(".")
    found = selectors.jobs_of(run, limit + 1, (int(attempt), int(node)) if cursor else None)
    jobs = found[:limit]
    return jobs, f"{jobs[-1].attempt}.{jobs[-1].node}" if len(found) > limit else None


def events_page(
    run: Run, limit: int = selectors.EVENTS_AT_ONCE, cursor: int | None = None
) -> tuple[list[RunEvent], str | None]:
    """Events, newest first, and the cursor of the next page."""
    found = selectors.events_of(run, limit + 1, cursor)
    events = found[:limit]
    return events, str(events[-1].pk) if len(found) > limit else None


class RunsOut(Schema):
    items: list[RunRow]
    next: str | None
