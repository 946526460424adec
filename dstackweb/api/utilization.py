"""Utilization policies: what they did, what another would have done, and keeping a run from them."""

from __future__ import annotations

from django.http import HttpRequest
from django.utils import timezone
from ninja import Path, Router

from dstackweb.api.app import caller, project_of
from dstackweb.api.policy_schemas import KeepIn, KeepOut, LedgerOut, ObserveIn, WhatIfIn, WhatIfOut
from dstackweb.api.schemas import ErrorOut
from dstackweb.gpus.policy.exemptions import keep as keep_run
from dstackweb.gpus.policy.exemptions import policies_of
from dstackweb.gpus.policy.ledger import ledger, set_observe_only
from dstackweb.gpus.policy.simulation_store import policy_asked
from dstackweb.gpus.policy.simulation_store import what_if as apply_policy
from dstackweb.runs import selectors

router = Router(tags=["utilization"])
of_runs = Router(tags=["utilization"])
REFUSALS = {401: ErrorOut, 403: ErrorOut, 404: ErrorOut, 422: ErrorOut}


@router.get("", response={200: LedgerOut, **REFUSALS}, summary="What policies stopped, and what that saved")
def index(request: HttpRequest, project: Path[str]) -> LedgerOut:
    """The last 30 days. A stopped run saved what it could still have held, up to its `max_duration`."""
    found, _role = project_of(request, project)
    return LedgerOut.of(ledger(found, timezone.now()), policies_of(found).observe_only)


@router.patch("", response={200: LedgerOut, **REFUSALS}, summary="Have policies only observe, or be in force")
def change(request: HttpRequest, project: Path[str], body: ObserveIn) -> LedgerOut:
    """Managers decide. While they only observe, what they would stop is told and nothing is stopped."""
    found, role = project_of(request, project)
    policies = set_observe_only(found, role, body.observe_only)
    return LedgerOut.of(ledger(found, timezone.now()), policies.observe_only)


@router.post("/what-if", response={200: WhatIfOut, **REFUSALS}, summary="What a policy would have stopped")
def what_if(request: HttpRequest, project: Path[str], body: WhatIfIn) -> WhatIfOut:
    """Apply any policy to the last 24 hours of real samples. Changes nothing; the runs' own policies don't matter."""
    found, _role = project_of(request, project)
    return WhatIfOut.of(apply_policy(found, policy_asked(body.dict()), timezone.now()))


@of_runs.post("/{name}/keep", response={200: KeepOut, **REFUSALS, 409: ErrorOut}, summary="Keep an unused run")
def keep(request: HttpRequest, project: Path[str], name: str, body: KeepIn) -> KeepOut:
    """Not to be stopped by its policy for a while. Its owner or a manager may, as often as the project allows."""
    found, role = project_of(request, project, "member")
    run = selectors.find_run(found, name)
    made = keep_run(run, caller(request), role, body.reason, minutes=body.minutes)
    left = max(0, policies_of(found).keeps - run.keeps.count())
    return KeepOut(run=run.name, until=made.until, reason=made.reason, keeps_left=left)
