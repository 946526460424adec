"""Whether services answer, as the gateway's checks find it, and what pages, API and command line say of it.

No service is stopped or retried because of it: a check may fail for reasons that are not the service's.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from django.db.models import F
from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.lib import sql
from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import Run, ServiceHealth
from dstackweb.runs.service_codes import CheckFailure, ServiceState
from dstackweb.runs.shared_rows import shared_rows_last, touch
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import lock_run, record
from dstackweb.spec.codes import RunType
from dstackweb.spec.effective import HealthCheck

SPARE_S = 40.0
"""By which a check may be late before the state is unknown: results that change nothing are stored every 10 s."""
FIRST_S = 60.0
"""How long after the start the first check may take."""


@dataclass(frozen=True)
class Check:
    """The result of one check. `failure` is None if it succeeded; `data` is that of the failure."""

    at: dt.datetime
    failure: CheckFailure | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HealthReport:
    """The state of a service since a moment, and the last check; `error` and its data are empty if that succeeded."""

    state: ServiceState
    since: dt.datetime
    checked_at: dt.datetime
    failures: int = 0
    error: str = ""
    error_data: dict[str, Any] = field(default_factory=dict)


def advanced(before: HealthReport | None, check: Check, unhealthy_after: int) -> HealthReport:
    """The health after a check. Pure.

    A success makes it healthy. A service that has never been healthy is starting, however long that takes; one that
    was is unhealthy after so many failures in a row.
    """
    if check.failure is None:
        state, failures = ServiceState.HEALTHY, 0
    else:
        state = before.state if before else ServiceState.STARTING
        failures = (before.failures if before else 0) + 1
        if state == ServiceState.HEALTHY and failures >= unhealthy_after:
            state = ServiceState.UNHEALTHY
    since = before.since if before and before.state == state else check.at
    return HealthReport(state, since, check.at, failures, check.failure.value if check.failure else "", check.data)


def seen(
    stored: HealthReport | None, rules: HealthCheck, started_at: dt.datetime | None, now: dt.datetime
) -> HealthReport:
    """The health to show: unknown where the last check is too old; starting before the first one, for a while. Pure."""
    if stored is None:
        began = started_at or now
        late = (now - began).total_seconds() > FIRST_S + rules.interval_s + rules.timeout_s
        return HealthReport(ServiceState.UNKNOWN if late else ServiceState.STARTING, began, began)
    if (now - stored.checked_at).total_seconds() > rules.interval_s + rules.timeout_s + SPARE_S:
        return replace(stored, state=ServiceState.UNKNOWN, since=stored.checked_at)
    return stored


def rules_of(spec: Mapping[str, Any]) -> HealthCheck:
    """How a service with this stored spec is checked."""
    return HealthCheck.model_validate(spec.get("health_check") or {})


def health_of(run: Run) -> HealthReport | None:
    """The health of a running service; None for any other run."""
    if run.spec.get("type") != RunType.SERVICE or run.status != RunStatus.RUNNING:
        return None
    return seen(stored_health(run.pk, run.attempt), rules_of(run.spec), run.started_at, timezone.now())


def stored_health(run_id: int, attempt: int) -> HealthReport | None:
    row = ServiceHealth.objects.filter(run=run_id, attempt=attempt).first()
    return None if row is None else _health(row)


def states(rows: Collection[Mapping[str, Any]], now: dt.datetime) -> dict[int, ServiceState]:
    """The states of the running services among these runs, by id.

    Each row has the run's `pk`, `attempt`, `status`, `started_at` and, if it runs, its `spec`.
    """
    running = RunStatus.RUNNING
    found = [row for row in rows if row["status"] == running and row["spec"].get("type") == RunType.SERVICE]
    if not found:
        return {}
    stored = {row.run_id: row for row in ServiceHealth.objects.filter(run__in=[row["pk"] for row in found])}
    result = {}
    for row in found:
        one = stored.get(row["pk"])
        known = _health(one) if one is not None and one.attempt == row["attempt"] else None
        result[row["pk"]] = seen(known, rules_of(row["spec"]), row["started_at"], now).state
    return result


def states_in(project: Project) -> list[tuple[int, ServiceState]]:
    """A project's checked services and their states, which become unknown with time and not by events."""
    running = ServiceHealth.objects.filter(run__project=project, run__status=RunStatus.RUNNING).order_by("pk")
    now = timezone.now()
    return [
        (row.run_id, seen(_health(row), rules_of({"health_check": row.rules}), None, now).state)
        for row in running.annotate(rules=F("run__spec__health_check"))
    ]


def keep(found: Mapping[int, tuple[int, HealthReport]]) -> None:
    """Store the attempt and health of services by run id, where the state is as it was."""
    existing = set(Run.objects.filter(pk__in=found).values_list("pk", flat=True))
    sql.write([_row(run_id, *one) for run_id, one in found.items() if run_id in existing], ["run"], _FIELDS)


def change(run_id: int, attempt: int, before: HealthReport | None, after: HealthReport) -> None:
    """Store another state of a service, with its event, unless the attempt no longer runs."""
    with shared_rows_last():
        run = lock_run(run_id)
        if run.attempt != attempt or run.status != RunStatus.RUNNING:
            return
        sql.write([_row(run_id, attempt, after)], ["run"], _FIELDS)
        if after.state in _EVENTS:
            lasted = round((after.since - before.since).total_seconds()) if before else None
            data: dict[str, Any] = {"before": before.state.value if before else None, "after_s": lasted}
            if after.error:
                data |= {"error": after.error, "error_data": after.error_data, "failures": after.failures}
            record(run, _EVENTS[after.state], data, attempt=attempt, at=after.since)
        touch(run.queue_id)


_EVENTS = {ServiceState.HEALTHY: RunEventKind.SERVICE_HEALTHY, ServiceState.UNHEALTHY: RunEventKind.SERVICE_UNHEALTHY}
_FIELDS = ["attempt", "state", "since", "checked_at", "failures", "error", "error_data"]


def _health(row: ServiceHealth) -> HealthReport:
    values = {name: getattr(row, name) for name in _FIELDS if name not in ("attempt", "state")}
    return HealthReport(state=ServiceState(row.state), **values)


def _row(run_id: int, attempt: int, health: HealthReport) -> ServiceHealth:
    return ServiceHealth(run_id=run_id, attempt=attempt, **asdict(health))
