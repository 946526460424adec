"""Utilization policies: their ledger, simulations, and keeping a run."""

from __future__ import annotations

from django.http import HttpRequest
from django.utils import timezone
from ninja import Path, Router

from dstackweb.api.app import caller, project_of
from dstackweb.api.policy_schemas import KeepIn, KeepOut, LedgerOut, ObserveIn, WhatIfIn, WhatIfOut
from dstackweb.api.schemas import ErrorOut
from dstackweb.gpus.policy.exemptions import exempt, policies_of
from dstackweb.gpus.policy.ledger import ledger, set_observe_only
from dstackweb.gpus.policy.simulation_store import parse_policy
from dstackweb.gpus.policy.simulation_store import what_if as apply_policy
from dstackweb.runs import selectors

router = Router(tags=["utilization"])
of_runs = Router(tags=["utilization"])
REFUSALS = {401: ErrorOut, 403: ErrorOut, 404: ErrorOut, 422: ErrorOut}


@router.get("", response={200: LedgerOut, **REFUSALS}, summary="Stopped runs and savings")
def index(request: HttpRequest, project: Path[str]) -> LedgerOut:
    """Of the last 30 days. A stopped run saves what it would have held until its `max_duration`."""
    found, _role = project_of(request, project)
    return LedgerOut.of(ledger(found, timezone.now()), policies_of(found).observe_only)


@router.patch("", response={200: LedgerOut, **REFUSALS}, summary="Turn observe-only on or off")
def change(request: HttpRequest, project: Path[str], body: ObserveIn) -> LedgerOut:
    """For managers. In observe-only mode violations are reported and no runs are stopped."""
    found, role = project_of(request, project)
    policies = set_observe_only(found, role, body.observe_only)
    return LedgerOut.of(ledger(found, timezone.now()), policies.observe_only)


@router.post("/what-if", response={200: WhatIfOut, **REFUSALS}, summary="Simulate a policy")
def what_if(request: HttpRequest, project: Path[str], body: WhatIfIn) -> WhatIfOut:
    """Apply a policy to the samples of the last 24 hours, ignoring the runs' own policies. Changes nothing."""
    found, _role = project_of(request, project)
    return WhatIfOut.of(apply_policy(found, parse_policy(body.dict()), timezone.now()))


@of_runs.post("/{name}/keep", response={200: KeepOut, **REFUSALS, 409: ErrorOut}, summary="Keep an idle run")
def keep(request: HttpRequest, project: Path[str], name: str, body: KeepIn) -> KeepOut:
    """Its policy will not stop it for a while. For its owner and managers, as often as the project allows."""
    found, role = project_of(request, project, "member")
    run = selectors.find_run(found, name)
    exemption = exempt(run, caller(request), role, body.reason, minutes=body.minutes)
    left = max(0, policies_of(found).max_exemptions - run.policy_exemptions.count())
    return KeepOut(run=run.name, until=exemption.until, reason=exemption.reason, keeps_left=left)
