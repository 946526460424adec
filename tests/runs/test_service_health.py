"""How services are: what the gateway's checks make of them, and what is shown of that."""

from __future__ import annotations

import datetime as dt

import pytest
from django.conf import LazySettings
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.runs import rows, service_health, services
from dstackweb.runs.models import Run, RunEvent, ServiceHealth
from dstackweb.runs.row_fields import RunRow
from dstackweb.runs.service_codes import CheckFailure, ServiceState
from dstackweb.runs.service_health import Check, HealthReport, advanced, seen
from dstackweb.spec.effective import HealthCheck
from dstackweb.wording import events
from tests.factories import make_host, place_all, placed_job, start

NOW = dt.datetime(2031, 5, 4, 9, 30, tzinfo=dt.UTC)
RULES = HealthCheck()


def after(seconds: float) -> dt.datetime:
    return NOW + dt.timedelta(seconds=seconds)


def failed(seconds: float) -> Check:
    return Check(after(seconds), CheckFailure.REFUSED, {"port": 8000})


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_the_state_follows_from_the_checks_so_far(succeeded: list[bool], limit: int) -> None:
    health: HealthReport | None = None
    since = NOW
    for at, success in enumerate(succeeded):
        before = health
        health = advanced(before, Check(after(at)) if success else failed(at), limit)
        so_far = succeeded[: at + 1]
        last = len(so_far) - 1 - so_far[::-1].index(True) if True in so_far else None
        expected = (
            ServiceState.STARTING
            if last is None
            else ServiceState.UNHEALTHY
            if at - last >= limit
            else ServiceState.HEALTHY
        )
        since = since if before and before.state == expected else after(at)
        assert (health.state, health.since, health.checked_at) == (expected, since, after(at))
        assert health.failures == (at - last if last is not None else at + 1)
        assert bool(health.error) is not success


def test_what_is_not_checked_any_more_is_unknown_since_then() -> None:
    health = advanced(None, Check(NOW), 3)
    assert seen(health, RULES, NOW, after(55)) == health
    late = seen(health, RULES, NOW, after(56))
    assert (late.state, late.since) == (ServiceState.UNKNOWN, NOW)
    assert seen(None, RULES, NOW, after(75)).state == ServiceState.STARTING
    assert seen(None, RULES, NOW, after(76)).state == ServiceState.UNKNOWN


@pytest.fixture
def run(project: Project, member: User, settings: LazySettings) -> Run:
    settings.DSTACKWEB_GATEWAY_PORT = 8001
    make_host("box")
    config = {"type": "service", "name": "llm", "commands": ["serve"], "port": 8000}
    run, _made = services.submit(project, member, "member", services.Submission(config))
    place_all()
    start(placed_job(run))
    run.refresh_from_db()
    return run


def listed(run: Run) -> ServiceState | None:
    found, _next = rows.newest_rows(run.project, kind=RunRow)
    return found[0].health


@pytest.mark.django_db
def test_a_change_is_an_event_and_in_lists(run: Run) -> None:
    assert run.started_at is not None
    began = run.started_at
    assert listed(run) == ServiceState.STARTING
    at = [began + dt.timedelta(seconds=10 * n) for n in range(5)]
    first = advanced(None, Check(at[0], CheckFailure.REFUSED, {"port": 8000}), 2)
    service_health.change(run.pk, 1, None, first)
    second = advanced(first, Check(at[1]), 2)
    service_health.change(run.pk, 1, first, second)
    assert listed(run) == ServiceState.HEALTHY
    third = advanced(second, Check(at[2], CheckFailure.STATUS, {"status": 500}), 2)
    service_health.keep({run.pk: (1, third)})
    assert listed(run) == ServiceState.HEALTHY
    fourth = advanced(third, Check(at[3], CheckFailure.STATUS, {"status": 500}), 2)
    service_health.change(run.pk, 1, third, fourth)
    assert listed(run) == ServiceState.UNHEALTHY
    assert service_health.states_in(run.project) == [(run.pk, ServiceState.UNHEALTHY)]
    fifth = advanced(fourth, Check(at[4]), 2)
    service_health.change(run.pk, 1, fourth, fifth)
    found = RunEvent.objects.filter(run=run, kind__startswith="service_")
    assert [str(events.event_text(event, 1)) for event in found] == [
        "healthy after 10 s",
        "unhealthy: 2 checks failed in a row (it answers with status 500)",
        "healthy again after 10 s",
    ]


@pytest.mark.django_db
def test_what_was_found_of_another_attempt_or_of_an_ended_run_says_nothing(run: Run) -> None:
    health = advanced(None, Check(NOW), 3)
    service_health.change(run.pk, 2, None, health)
    assert not ServiceHealth.objects.exists()
    service_health.change(run.pk, 1, None, health)
    Run.objects.filter(pk=run.pk).update(attempt=2)
    assert listed(run) == ServiceState.STARTING
    Run.objects.filter(pk=run.pk).update(status="done")
    run.refresh_from_db()
    assert service_health.health_of(run) is None
    assert listed(run) is None
