"""Dev environments that are unused: when they are warned and stopped, by a clock that only runs while it can see."""

from __future__ import annotations

import datetime as dt

import pytest
from django.conf import LazySettings
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.runs import inactivity, services
from dstackweb.runs.inactivity import Due, Use, due
from dstackweb.runs.models import Job, Run, RunActivity
from tests.factories import make_host, place_all, placed_job, start

NOW = dt.datetime(2026, 11, 26, 12, tzinfo=dt.UTC)


@given(st.floats(0, 1e6), st.integers(1, 500_000), st.booleans())
def test_nothing_is_stopped_without_a_warning_or_before_its_time(idle_s: float, limit_s: int, warned: bool) -> None:
    what = due(idle_s, limit_s, warned)
    assert what != Due.STOP or (warned and idle_s >= limit_s)
    assert what != Due.NOTICE or not warned
    assert due(idle_s, None, warned) == Due.NOTHING
    if idle_s >= limit_s:
        assert what == (Due.STOP if warned else Due.NOTICE)


def test_the_warning_comes_when_a_quarter_remains_within_two_to_ten_minutes() -> None:
    assert due(2 * 3600 - 601, 2 * 3600, False) == Due.NOTHING
    assert due(2 * 3600 - 600, 2 * 3600, False) == Due.NOTICE
    assert due(20 * 60 - 300, 20 * 60, False) == Due.NOTICE
    assert due(59, 120, False) == Due.NOTHING
    assert due(60, 120, False) == Due.NOTICE


@pytest.fixture(autouse=True)
def _gateway(settings: LazySettings) -> None:
    settings.DSTACKWEB_GATEWAY_PORT = 8001


@pytest.fixture
def run(project: Project, member: User) -> Run:
    return running(project, member, inactivity_duration="1h")


def running(project: Project, member: User, **keys: str) -> Run:
    make_host()
    config = {"type": "dev-environment", "name": "dev", **keys}
    run, _made = services.submit(project, member, "member", services.Submission(config))
    place_all()
    start(placed_job(run))
    run.refresh_from_db()
    return run


def noted(run: Run, idle_s: float, used_at: dt.datetime | None = None) -> RunActivity:
    inactivity.note({run.pk: Use(run.attempt, used_at, idle_s)}, NOW)
    run.refresh_from_db()
    return RunActivity.objects.get(run=run)


def test_idleness_adds_up_warns_once_and_stops_the_run(run: Run) -> None:
    noted(run, 1800)
    row = noted(run, 1200)
    assert (row.idle_s, row.warned) == (3000, True)
    noted(run, 300)
    notice = run.events.get(kind="inactivity_notice")
    assert notice.data == {"idle_s": 3000, "limit_s": 3600, "stops_at": "2026-11-26T12:10:00+00:00"}
    assert run.status == "running"
    noted(run, 400)
    assert (run.status, run.stop_reason) == ("terminating", "inactivity_duration_exceeded")
    assert Job.objects.get(run=run).stop_reason == "inactivity_duration_exceeded"


def test_use_begins_anew_and_takes_the_warning_back(run: Run) -> None:
    noted(run, 3100)
    row = noted(run, 5, used_at=NOW)
    assert (row.idle_s, row.warned, row.used_at) == (5, False, NOW)
    noted(run, 3200)
    assert run.events.filter(kind="inactivity_notice").count() == 2
    assert run.status == "running"


def test_a_run_that_the_gateway_did_not_see_for_long_is_warned_before_it_is_stopped(run: Run) -> None:
    noted(run, 100_000)
    assert run.status == "running"
    assert run.events.filter(kind="inactivity_notice").exists()


def test_a_new_attempt_begins_anew(run: Run) -> None:
    noted(run, 3100)
    run.attempt = 2
    run.save()
    inactivity.note({run.pk: Use(2, None, 10)}, NOW)
    row = RunActivity.objects.get(run=run)
    assert (row.attempt, row.idle_s, row.warned) == (2, 10, False)


def test_without_the_setting_nothing_is_stopped(project: Project, member: User) -> None:
    run = running(project, member)
    noted(run, 1e7)
    assert (run.status, run.events.filter(kind__startswith="inactivity").exists()) == ("running", False)


def test_a_removed_run_is_left_out(run: Run) -> None:
    inactivity.note({run.pk: Use(1, None, 1), run.pk + 99: Use(1, None, 1)}, NOW)
    assert RunActivity.objects.count() == 1
