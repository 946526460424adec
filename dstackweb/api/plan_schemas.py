"""Schemas of plans, and of decisions about waiting runs. Times are ISO 8601 in UTC; money is USD."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Annotated, Any

from ninja import Field, Schema
from pydantic import BeforeValidator

from dstackweb.api.app import NameOrNull
from dstackweb.scheduler.passes.decision import Candidate, Decision, Outlook, Plan, VisibleReservation
from dstackweb.scheduler.placement import displacing
from dstackweb.scheduler.placement.hosts import Wait
from dstackweb.wording import fair_share, places, queue as queue_words, statuses, waiting
from dstackweb.wording.sentence import joined


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


class RemarkOut(Schema):
    code: str
    message: str


class OutlookOut(Schema):
    """What one backend has for the run now."""

    backend: str
    used: bool = Field(description="Whether the run may use it; otherwise it would have to name it in `backends`")
    starts: bool = Field(description="Whether the run could start there at once, apart from its position")
    price: float | None = Field(description="USD per hour of all nodes; null without an offer")
    reason: str | None
    reason_detail: str | None


class DisplacedOut(Schema):
    """A run that would be displaced. Its work without a checkpoint is the time since it was placed."""

    run: str
    user: str
    queue: str
    placed_at: dt.datetime


class DisplacesOut(Schema):
    """Whom the run displaces once no run ahead of it waits for the same hosts."""

    runs: list[DisplacedOut]
    reclaims: bool = Field(description="Whether its queue takes back what it has lent to the queues of these runs")
    work_s: int = Field(description="The time that they have held what they hold, together")
    detail: str
    allowed_at: dt.datetime | None = Field(
        description="From when on its member's daily budget allows it; null: it costs more than the budget"
    )

    @classmethod
    def of(cls, found: Plan | Decision) -> DisplacesOut | None:
        runs, at, budget = found.displaces, found.at, found.work_budget
        if not runs:
            return None
        parts = filter(None, (queue_words.would_displace(found), queue_words.budget_of_work(budget, at)))
        return cls(
            runs=[DisplacedOut(run=one.name, user=one.user, queue=one.queue, placed_at=one.since) for one in runs],
            reclaims=found.reclaims,
            work_s=displacing.work_s(runs, at),
            detail=str(joined("; ", parts)),
            allowed_at=budget.allowed_at if budget else at,
        )


class PlanOut(Schema):
    """The plan of a run. `settings` is `spec` in the run file's notation; `provenance` has the same keys."""

    spec: dict[str, Any]
    settings: dict[str, Any]
    provenance: dict[str, Any]
    queue: str
    runs: int = Field(description="How many runs the file makes: 1 without `array`. All else is about the first one")
    position: int | None = Field(description="Null for a run with `schedule` or `after`, which is not queued yet")
    penalty_s: int = Field(description="Seconds that its member's fair share puts it behind; `position` includes them")
    penalty_detail: str = Field(description="Why, in words; empty without a penalty")
    after_detail: str | None = Field(description="The runs that it would wait for, where they have not ended")
    next_at: dt.datetime | None = Field(description="When a run with a schedule enters its queue")
    offers: list[OfferOut]
    backends: list[OutlookOut] = Field(description="All that the run uses or could name, the best first")
    reason: str | None
    reason_detail: str | None
    warnings: list[RemarkOut] = Field(description="Submitting despite one should be confirmed")
    notes: list[RemarkOut] = Field(description="Settings that have no effect")
    displaces: DisplacesOut | None = Field(description="Running runs that would be stopped for it; null: none")

    @classmethod
    def of(cls, plan: Plan) -> PlanOut:
        effective = plan.prepared.effective
        text = waiting.reason(plan.waits.reason, plan.waits.data).text if plan.waits else None
        return cls.from_orm(
            {
                **vars(plan),
                "spec": effective.spec.model_dump(mode="json"),
                "settings": effective.spec.as_file(),
                "provenance": effective.provenance,
                "queue": plan.prepared.queue.name,
                "runs": effective.spec.array.size if effective.spec.array else 1,
                "penalty_s": plan.share.seconds,
                "penalty_detail": fair_share.penalty(plan.share.seconds, plan.share.basis),
                "backends": [_outlook(one) for one in plan.backends],
                "reason": plan.waits.reason if plan.waits else None,
                "reason_detail": text,
                "after_detail": statuses.after(plan.follows) if plan.follows else None,
                "warnings": [{"code": "impossible", "message": text or ""}] if plan.impossible else [],
                "notes": [{"code": code, "message": waiting.plan_note(code)} for code in plan.notes],
                "displaces": DisplacesOut.of(plan),
            }
        )


def _outlook(one: Outlook) -> dict[str, Any]:
    return {
        "backend": one.backend,
        "used": one.used,
        "starts": one.waits is None,
        "price": one.price,
        "reason": one.waits.reason if one.waits else None,
        "reason_detail": waiting.reason(one.waits.reason, one.waits.data).text if one.waits else None,
    }


class TriedOut(Schema):
    """One place: `fits`, or a code with its text. `price` is USD per hour of one node."""

    backend: str
    where: str
    code: str
    detail: str
    price: float | None

    @staticmethod
    def resolve_detail(tried: Candidate) -> str:
        label, text, _tone = places.tried(tried.code, tried.data)
        return text or label


class ReservationOut(Schema):
    """A reservation. `run` is null for a run of another project."""

    run: NameOrNull
    starts_at: dt.datetime | None
    expires_at: dt.datetime | None
    hosts: list[str]
    gpus: int

    @staticmethod
    def resolve_hosts(shown: VisibleReservation) -> list[str]:
        return sorted({node.host for node in shown.nodes})

    @staticmethod
    def resolve_gpus(shown: VisibleReservation) -> int:
        return sum(len(node.gpus) for node in shown.nodes)


class LimitOut(Schema):
    """A limit that blocks the run: the limit, current use, and what the run would add."""

    reason: str
    code: str = Field(validation_alias="data.code")
    limit: int = Field(validation_alias="data.limit")
    used: int = Field(validation_alias="data.used")
    asked: int = Field(validation_alias="data.asked")


class BudgetOut(Schema):
    """USD of this month (UTC)."""

    limit: Decimal
    spent: Annotated[Decimal, BeforeValidator(lambda usd: round(usd, 2))]


class BlockerOut(Schema):
    """A reason to wait, in words as `detail`."""

    reason: str
    detail: str

    @staticmethod
    def resolve_detail(waits: Wait) -> str:
        return waiting.reason(waits.reason, waits.data).text


class DecisionOut(Schema):
    """`outcome` is a wait reason, `starting` if the run fits, or `not_waiting` if it is not in the queue."""

    at: dt.datetime
    outcome: str
    detail: str
    data: dict[str, Any]
    tried: list[TriedOut] = Field(validation_alias="candidates")
    blockers: Annotated[list[BlockerOut], Field(description="All that hold it up, the most permanent first")]
    limits: list[LimitOut]
    budget: BudgetOut | None
    reservation: ReservationOut | None
    displaces: DisplacesOut | None = Field(description="Running runs that will be stopped for it; null: none")

    @staticmethod
    def resolve_displaces(decision: Decision) -> DisplacesOut | None:
        return DisplacesOut.of(decision)

    @staticmethod
    def resolve_detail(decision: Decision) -> str:
        return waiting.reason(decision.outcome, decision.data).text
