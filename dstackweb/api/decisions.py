"""Why a run waits: what a placement pass would decide now, and every place it would try."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

from django.http import HttpRequest
from ninja import Path, Router, Schema

from dstackweb.api.app import project_of
from dstackweb.api.schemas import ErrorOut
from dstackweb.runs import selectors
from dstackweb.scheduler.passes.decision import Candidate, Decision, decide_now
from dstackweb.scheduler.passes.reservations import VisibleReservation
from dstackweb.wording import waiting

router = Router(tags=["runs"])
REFUSALS = {401: ErrorOut, 403: ErrorOut, 404: ErrorOut}


class TriedOut(Schema):
    """One place: `fits`, or a code with its text. `price` is USD per hour of one node."""

    backend: str
    where: str
    code: str
    detail: str
    price: float | None

    @classmethod
    def of(cls, tried: Candidate) -> TriedOut:
        label, text, _tone = waiting.tried(tried.code, tried.data)
        price = None if tried.price is None else float(tried.price)
        return cls(backend=tried.backend, where=tried.where, code=tried.code, detail=text or label, price=price)


class ReservationOut(Schema):
    """A reservation. `run` is null for a run of another project."""

    run: str | None
    starts_at: dt.datetime | None
    expires_at: dt.datetime | None
    hosts: list[str]
    gpus: int

    @classmethod
    def of(cls, shown: VisibleReservation) -> ReservationOut:
        return cls(
            run=shown.run.name if shown.run else None,
            starts_at=shown.starts_at,
            expires_at=shown.expires_at,
            hosts=sorted({node.host for node in shown.nodes}),
            gpus=sum(len(node.gpus) for node in shown.nodes),
        )


class LimitOut(Schema):
    """A limit that blocks the run: the limit, current use, and what the run would add."""

    reason: str
    code: str
    limit: int
    used: int
    asked: int


class BudgetOut(Schema):
    """USD of this month (UTC)."""

    limit: Decimal
    spent: Decimal


class DecisionOut(Schema):
    """`outcome` is a wait reason, `starting` if the run fits, or `not_waiting` if it is not in the queue."""

    at: dt.datetime
    outcome: str
    detail: str
    data: dict[str, Any]
    tried: list[TriedOut]
    limits: list[LimitOut]
    budget: BudgetOut | None
    reservation: ReservationOut | None

    @classmethod
    def of(cls, decision: Decision) -> DecisionOut:
        budget = decision.budget
        return cls(
            at=decision.at,
            outcome=decision.outcome,
            detail=waiting.reason(decision.outcome, decision.data).text,
            data=dict(decision.data),
            tried=[TriedOut.of(tried) for tried in decision.candidates],
            limits=[
                LimitOut(reason=waits.reason, **{name: waits.data[name] for name in ("code", "limit", "used", "asked")})
                for waits in decision.limits
            ],
            budget=BudgetOut(limit=budget.limit, spent=round(budget.spent, 2)) if budget else None,
            reservation=ReservationOut.of(decision.reservation) if decision.reservation else None,
        )


@router.get("/{name}/decision", response={200: DecisionOut, **REFUSALS}, summary="Why a run waits, place by place")
def decision(request: HttpRequest, project: Path[str], name: str) -> DecisionOut:
    """Computed with the code of the placement pass; changes nothing."""
    found, _role = project_of(request, project)
    return DecisionOut.of(decide_now(selectors.find_run(found, name)))
