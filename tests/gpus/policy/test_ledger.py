"""The ledger of what policies gave back."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.gpus.exemptions import policies_of, set_observe_only
from dstackweb.gpus.models import PolicyStop
from dstackweb.gpus.savings import ledger
from dstackweb.lib.errors import Forbidden
from dstackweb.runs.models import Run
from tests.factories import make_run

pytestmark = pytest.mark.django_db


@pytest.fixture
def now() -> dt.datetime:
    return timezone.now()


def stopped(project: Project, run: Run | None, now: dt.datetime, hours_ago: float, **fields: Any) -> PolicyStop:
    at = now - dt.timedelta(hours=hours_ago)
    values = {
        "min_gpu_utilization": 10, "time_window_s": 1800, "scope": "any", "low_since": at - dt.timedelta(minutes=30),
        "gpus": ["GPU-a", "GPU-b"], "run_name": "train-1", "gpu_index": 0,
    }  # fmt: skip
    return PolicyStop.objects.create(project=project, run=run, at=at, **{**values, **fields})


def test_the_saving_of_a_stopped_run_is_its_remaining_time_elapsed_so_far(
    project: Project, member: User, now: dt.datetime
) -> None:
    run = make_run(project, member)
    stopped(project, run, now, 4, until=now - dt.timedelta(hours=1), price=Decimal("2"))
    stopped(project, run, now, 2, until=now + dt.timedelta(hours=9))
    found = ledger(project, now)
    assert [entry.gpu_hours for entry in found.entries] == [pytest.approx(4), pytest.approx(6)]
    assert (found.stopped.runs, found.stopped.unknown) == (2, 0)
    assert (found.stopped.gpu_hours, found.stopped.usd) == (pytest.approx(10), pytest.approx(6))
    assert found.observed.runs == 0


def test_without_a_max_duration_the_saving_is_unknown(project: Project, member: User, now: dt.datetime) -> None:
    stopped(project, make_run(project, member), now, 4)
    found = ledger(project, now)
    assert (found.entries[0].gpu_hours, found.entries[0].usd) == (None, None)
    assert (found.stopped.runs, found.stopped.unknown, found.stopped.gpu_hours) == (1, 1, 0)


def test_an_observed_violation_counts_once_per_run_up_to_its_end(
    project: Project, member: User, now: dt.datetime
) -> None:
    run = make_run(project, member)
    Run.objects.filter(pk=run.pk).update(ended_at=now - dt.timedelta(hours=1))
    stopped(project, run, now, 5, observed=True)
    stopped(project, run, now, 3, observed=True)
    stopped(project, None, now, 2, observed=True, run_name="gone")
    found = ledger(project, now)
    assert [(entry.stop.run_name, entry.gpu_hours) for entry in found.entries] == [
        ("gone", None), ("train-1", pytest.approx(8)),
    ]  # fmt: skip
    assert (found.observed.runs, found.observed.unknown, found.observed.gpu_hours) == (2, 1, pytest.approx(8))
    assert found.stopped.runs == 0


def test_the_ledger_covers_a_month(project: Project, member: User, now: dt.datetime) -> None:
    stopped(project, make_run(project, member), now, 31 * 24)
    assert ledger(project, now).entries == []


def test_managers_decide_whether_policies_are_in_force(project: Project) -> None:
    assert policies_of(project).observe_only is False
    with pytest.raises(Forbidden):
        set_observe_only(project, "member", True)
    assert set_observe_only(project, "manager", True).max_exemptions == 3
    assert policies_of(project).observe_only is True
    set_observe_only(project, "admin", False)
    assert policies_of(project).observe_only is False
