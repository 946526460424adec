"""What a policy would have stopped in the last day, and what that would have given back."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.gpus import savings
from dstackweb.gpus.savings import parse_policy, what_if
from dstackweb.lib.errors import Invalid
from dstackweb.runs import holds
from dstackweb.runs.models import Job
from dstackweb.spec.effective import UtilizationPolicy
from tests.factories import make_project, make_user, place_all, placed_job, start
from tests.gpus.past import add_samples, past_run

pytestmark = pytest.mark.django_db

HALF_AN_HOUR = [0] * 180
POLICY = UtilizationPolicy(min_gpu_utilization=10, time_window_s=600)


@pytest.fixture
def now() -> dt.datetime:
    return timezone.now()


def test_an_idle_run_would_have_been_stopped_after_the_window_and_a_busy_one_not(
    project: Project, member: User, now: dt.datetime
) -> None:
    past_run(project, member, "idle", [HALF_AN_HOUR], now=now)
    past_run(project, member, "busy", [[90] * 180], now=now)
    found = what_if(project, POLICY, now)
    assert (found.runs, found.gpus, found.samples, found.left_out) == (2, 2, 360, 0)
    (stop,) = found.stops
    assert (stop.run.name, stop.node, stop.gpu_index, stop.gpus) == ("idle", 0, 0, 1)
    assert stop.at == pytest.approx(now - dt.timedelta(minutes=20), abs=dt.timedelta(seconds=11))
    assert stop.gpu_hours == pytest.approx(1 / 3, abs=0.01)
    assert found.gpu_hours == pytest.approx(1, abs=0.01)


def test_the_own_policies_of_the_runs_are_ignored(project: Project, member: User, now: dt.datetime) -> None:
    past_run(
        project, member, "idle", [HALF_AN_HOUR], now=now,
        utilization_policy={"min_gpu_utilization": 0, "time_window": "1m", "action": "notify"},
    )  # fmt: skip
    assert [stop.run.name for stop in what_if(project, POLICY, now).stops] == ["idle"]


def test_savings_count_up_to_the_end_of_an_ended_run_at_its_price(
    project: Project, member: User, now: dt.datetime
) -> None:
    job = past_run(project, member, "idle", [HALF_AN_HOUR, [95] * 180], now=now, ended_ago_s=3600)
    Job.objects.filter(pk=job.pk).update(price=Decimal("3"))
    (stop,) = what_if(project, POLICY, now).stops
    assert (stop.gpus, stop.gpu_index) == (2, 0)
    assert stop.gpu_hours == pytest.approx(2 / 3, abs=0.02)
    assert stop.usd == pytest.approx(1, abs=0.02)


def test_with_the_scope_all_every_gpu_must_have_been_unused(project: Project, member: User, now: dt.datetime) -> None:
    job = past_run(project, member, "half", [HALF_AN_HOUR, [95] * 180], now=now)
    every = POLICY.model_copy(update={"scope": "all"})
    assert what_if(project, every, now).stops == []
    job.gpu_series.get(uuid=job.gpus[1]).delete()
    assert what_if(project, every, now).stops == []
    add_samples(job, job.gpus[1], HALF_AN_HOUR, now)
    assert [stop.gpu_index for stop in what_if(project, every, now).stops] == [None]


def test_a_warm_up_and_a_gap_keep_a_run(project: Project, member: User, now: dt.datetime) -> None:
    past_run(project, member, "gap", [[0] * 50 + [None] * 5 + [0] * 50], now=now)
    assert what_if(project, POLICY, now).stops == []
    past_run(project, member, "warm", [[0] * 100], now=now)
    assert len(what_if(project, POLICY, now).stops) == 1
    assert what_if(project, POLICY.model_copy(update={"warmup_s": 600}), now).stops == []


def test_only_runs_of_this_project_in_the_last_day_are_simulated(
    project: Project, member: User, now: dt.datetime
) -> None:
    past_run(project, member, "yesterday", [HALF_AN_HOUR], now=now, ended_ago_s=25 * 3600)
    other = make_project("other")
    past_run(other, make_user("bob", is_superuser=True), "theirs", [HALF_AN_HOUR], now=now)
    found = what_if(project, POLICY, now)
    assert (found.runs, found.stops) == (0, [])


def test_holds_are_never_stopped(project: Project, member: User, now: dt.datetime) -> None:
    past_run(project, member, "idle", [HALF_AN_HOUR], now=now)
    held = holds.submit_hold(project, member, "member", holds.HoldRequest(duration="3h", gpu="1", name="mine"))
    place_all()
    job = start(placed_job(held))
    Job.objects.filter(pk=job.pk).update(started_at=now - dt.timedelta(hours=1))
    add_samples(job, job.gpus[0], HALF_AN_HOUR, now)
    found = what_if(project, POLICY, now)
    assert (found.runs, found.holds, [stop.run.name for stop in found.stops]) == (1, 1, ["idle"])


def test_the_work_is_bounded_and_omitted_runs_are_counted(
    project: Project, member: User, now: dt.datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        past_run(project, member, f"idle-{number}", [HALF_AN_HOUR], now=now)
    monkeypatch.setattr(savings, "MOST_SAMPLES", 400)
    found = what_if(project, POLICY, now)
    assert (found.runs, found.left_out, found.samples) == (2, 1, 360)
    assert sorted(stop.run.name for stop in found.stops) == ["idle-1", "idle-2"]


def test_samples_of_runs_shorter_than_the_window_are_not_read(project: Project, member: User, now: dt.datetime) -> None:
    past_run(project, member, "short", [[0] * 50], now=now)
    found = what_if(project, POLICY, now)
    assert (found.runs, found.gpus, found.samples, found.stops) == (1, 1, 0, [])
    assert found.gpu_hours == pytest.approx(50 / 360, abs=0.01)
    (stop,) = what_if(project, POLICY.model_copy(update={"time_window_s": 480}), now).stops
    assert stop.run.name == "short"


def test_many_runs_are_read_in_batches(
    project: Project, member: User, now: dt.datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        past_run(project, member, f"idle-{number}", [HALF_AN_HOUR], now=now)
    monkeypatch.setattr(savings, "_AT_ONCE", 200)
    assert len(what_if(project, POLICY, now).stops) == 3


@pytest.mark.parametrize(
    ("given", "loc", "said"),
    [
        ({"min_gpu_utilization": 10}, ["time_window"], "`time_window` is missing"),
        ({"min_gpu_utilization": 101, "time_window": "30m"}, ["min_gpu_utilization"], "from 0 to 100"),
        ({"min_gpu_utilization": 10, "time_window": "30s"}, ["time_window"], "at least 1m"),
        ({"min_gpu_utilization": 10, "time_window": "soon"}, ["time_window"], "is not a duration"),
    ],
)
def test_an_invalid_policy_is_reported_at_its_key(given: dict[str, object], loc: list[str], said: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_policy(given)
    assert [fault["loc"] for fault in refused.value.errors] == [loc]
    assert said in refused.value.detail
    assert "utilization_policy" not in refused.value.detail


def test_a_policy_is_parsed_as_in_a_run_file() -> None:
    asked = parse_policy({"min_gpu_utilization": 10, "time_window": "1h30m", "warmup": "10m", "scope": "all"})
    assert asked == UtilizationPolicy(min_gpu_utilization=10, time_window_s=5400, scope="all", warmup_s=600)
