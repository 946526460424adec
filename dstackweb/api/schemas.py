"""Schemas of runs, plans and errors. Times are ISO 8601 in UTC; money is USD."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from django.utils import timezone
from ninja import Field, Schema

from dstackweb.api.policy_schemas import PolicyOut
from dstackweb.api.queue_schemas import QueueSettings
from dstackweb.backends.contract import Offer
from dstackweb.gpus.policy.policy_status import policy_status
from dstackweb.runs import selectors
from dstackweb.runs.holds import Access, access_to
from dstackweb.runs.models import Job, Run, RunEvent
from dstackweb.runs.queue.rank_factors import RankFactors, rank_factors
from dstackweb.runs.rows import QueueRow, RunRow, row_of, sent
from dstackweb.runs.spend import costs_by_run
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler.passes.plan import Plan
from dstackweb.wording import messages
from dstackweb.wording.waiting import reason as reason_told


class SubmitIn(Schema):
    """`config` is the run file, as YAML text or as an object."""

    model_config = {"extra": "forbid"}

    config: str | dict[str, Any]
    env: dict[str, str] = Field(default_factory=dict, description="Values for bare names in the file's `env` list")
    overrides: dict[str, Any] = Field(default_factory=dict, description="Keys set on the command line")


class SubmitRunIn(SubmitIn):
    """A run to submit, with its uploaded code."""

    archive: str | None = Field(None, pattern="^[0-9a-f]{64}$", description="SHA-256 of an uploaded archive")


class PatchRunIn(Schema):
    """Changes of a run."""

    model_config = {"extra": "forbid"}

    priority: int | None = Field(None, strict=True)
    queue: str | None = None


class StopIn(Schema):
    """`abort` kills immediately instead of after `stop_duration`."""

    model_config = {"extra": "forbid"}

    abort: bool = False


class JobOut(Schema):
    """One node of one attempt."""

    id: str
    attempt: int
    node: int
    status: str
    backend: str
    region: str
    instance_type: str
    spot: bool
    price: float = Field(description="USD per hour at the start")
    host: str | None
    cpus: int
    memory_mib: int
    gpus: list[str]
    placed_at: dt.datetime
    started_at: dt.datetime | None
    ended_at: dt.datetime | None
    exit_code: int | None
    termination_reason: str
    message: str

    @classmethod
    def of(cls, job: Job) -> JobOut:
        worded: dict[str, Any] = {
            "id": str(job.pk),
            "message": messages.message(job.detail, job.message),
            "backend": job.backend.name,
            "host": job.host.name if job.host else None,
            "spot": job.is_spot,
            "price": float(job.price),
        }
        return cls(**worded, **{name: getattr(job, name) for name in cls.model_fields if name not in worded})


class EventOut(Schema):
    """An event: a code with data."""

    at: dt.datetime
    kind: str
    actor: str | None
    attempt: int
    node: int | None
    data: dict[str, Any]

    @classmethod
    def of(cls, event: RunEvent) -> EventOut:
        actor = event.actor.get_username() if event.actor else None
        return cls(at=event.at, kind=event.kind, actor=actor, attempt=event.attempt, node=event.node, data=event.data)


class HoldOut(Schema):
    """A hold's resources, and the commands to connect; `here`: its host is the dstackweb server."""

    host: str
    address: str
    here: bool
    gpus: list[str]
    lines: list[str]

    @classmethod
    def of(cls, way: Access | None) -> HoldOut | None:
        return cls(**{name: getattr(way, name) for name in cls.model_fields}) if way else None


class FactorsOut(Schema):
    """Why a waiting run has its position.

    `aged_points` are the points of priority that its waiting is worth against a run submitted now. A run submitted now
    goes ahead of it from priority `ahead_of_priority`: null where it would not even with 100.
    """

    priority: int
    submitted_at: dt.datetime
    aged_points: float
    moved_by: str | None
    moved_at: dt.datetime | None
    position: int | None
    ahead_of_priority: int | None

    @classmethod
    def of(cls, found: RankFactors) -> FactorsOut:
        own = {name: getattr(found, name) for name in cls.model_fields if name != "moved_by"}
        return cls(moved_by=found.moved_by.get_username() if found.moved_by else None, **own)


@dataclass(slots=True, kw_only=True)
class RunOut(RunRow):
    """A run. `position` and `reason` are null unless it waits, `hold` unless it is a hold that has started."""

    position: int | None
    reason: str | None
    reason_detail: str | None
    factors: Annotated[FactorsOut | None, Field(description="Why it has its position; null unless it waits")]
    max_duration_s: Annotated[int | None, Field(description="Its limit, including extensions")]
    cost: Annotated[float, Field(description="USD so far, for all attempts; hosts are free")]
    hold: HoldOut | None
    policy: Annotated[PolicyOut | None, Field(description="State of its utilization policy; null unless it is placed")]
    spec: dict[str, Any]
    provenance: dict[str, Any]
    jobs: list[JobOut]
    jobs_next: Annotated[str | None, Field(description="The next cursor of `…/jobs`; null if these are all")]
    events: Annotated[list[EventOut], Field(description="The newest events, in order of time")]
    events_next: Annotated[str | None, Field(description="The next cursor of `…/events`; null if these are all")]

    @classmethod
    def of(cls, run: Run) -> RunOut:
        reason, data = selectors.why(run)
        jobs, jobs_next = jobs_page(run)
        events, events_next = events_page(run)
        now = timezone.now()
        found = rank_factors(run, now) if run.status == RunStatus.SUBMITTED else None
        return cls(
            **messages.worded(row_of(run, jobs)).values(),
            position=found.position if found else None,
            factors=FactorsOut.of(found) if found else None,
            reason=reason or None,
            reason_detail=reason_told(reason, data).text if reason else None,
            max_duration_s=run.limit_s,
            cost=float(costs_by_run([run], now).get(run.pk, 0)),
            hold=HoldOut.of(access_to(run, jobs)),
            policy=PolicyOut.of(policy_status(run, now)),
            spec=run.spec,
            provenance=run.provenance,
            jobs=[JobOut.of(job) for job in jobs],
            jobs_next=jobs_next,
            events=[EventOut.of(event) for event in reversed(events)],
            events_next=events_next,
        )


class JobsOut(Schema):
    items: list[JobOut]
    next: str | None


class EventsOut(Schema):
    items: list[EventOut]
    next: str | None


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


@dataclass(slots=True, kw_only=True)
class QueueItem(QueueRow):
    """A waiting run and its position."""

    reason_detail: str

    @staticmethod
    def listed(rows: Sequence[QueueRow]) -> list[dict[str, Any]]:
        """A page of the queue. Runs with the same reason share its text."""
        of_shapes = {row.shape: row for row in rows}
        words = {shape: reason_told(row.reason, row.reason_data).text for shape, row in of_shapes.items()}
        items = sent(rows)
        for item, row in zip(items, rows, strict=True):
            item["reason_detail"] = words[row.shape]
        return items


class QueueOut(QueueSettings):
    """A queue with a page of its runs."""

    items: list[QueueItem]
    next: str | None


class OfferOut(Schema):
    backend: str
    region: str
    instance_type: str
    cpus: int
    memory_mib: int
    gpu_name: str
    gpu_count: int
    gpu_memory_mib: int
    spot: bool
    price: float
    availability: str
    detail: dict[str, Any]

    @classmethod
    def of(cls, offer: Offer) -> OfferOut:
        return cls(**{name: getattr(offer, name) for name in cls.model_fields})


class Warning(Schema):
    code: str
    message: str


class PlanOut(Schema):
    """The plan of a run. `settings` is `spec` in the run file's notation; `provenance` has the same keys."""

    spec: dict[str, Any]
    settings: dict[str, Any]
    provenance: dict[str, Any]
    queue: str
    position: int | None = Field(description="Null for a run with a schedule, which is not queued yet")
    next_at: dt.datetime | None = Field(description="When a run with a schedule enters its queue")
    offers: list[OfferOut]
    reason: str | None
    reason_detail: str | None
    warnings: list[Warning]

    @classmethod
    def of(cls, plan: Plan) -> PlanOut:
        effective = plan.prepared.effective
        text = reason_told(plan.waits.reason, plan.waits.data).text if plan.waits else None
        return cls(
            spec=effective.spec.model_dump(mode="json"),
            settings=effective.spec.as_file(),
            provenance=effective.provenance,
            queue=plan.prepared.queue.name,
            position=plan.position,
            next_at=plan.next_at,
            offers=[OfferOut.of(offer) for offer in plan.offers],
            reason=plan.waits.reason if plan.waits else None,
            reason_detail=text,
            warnings=[Warning(code="impossible", message=text or "")] if plan.impossible else [],
        )


class ErrorOut(Schema):
    detail: str
    errors: list[dict[str, Any]] | None = None


class StaleOut(ErrorOut):
    """The run was changed meanwhile, and nothing was applied. Its current values, and its `ETag` without quotes."""

    run: str | None = None
    priority: int | None = None
    queue: str | None = None
    status: str | None = None
    etag: str | None = None


RunStatusName = Literal[
    "pending", "submitted", "provisioning", "running", "terminating", "done", "failed", "terminated"
]
