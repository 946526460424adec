"""Estimates of starts: what they say, when they are made and written, and how they are compared with the starts."""

from __future__ import annotations

import datetime as dt
from unittest.mock import patch

import pytest
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.runs import attempts, services, start_estimates
from dstackweb.runs.codes import StartBasis
from dstackweb.runs.learned_durations import BINS, RUNS_MIN
from dstackweb.runs.models import Job, LearnedDuration, Queue, QueueCount, Run, StartEstimate, StartScore
from dstackweb.runs.rows import starts_of
from dstackweb.runs.states import Reason
from dstackweb.scheduler.models import ForecastState
from dstackweb.scheduler.passes import forecast_pass
from dstackweb.scheduler.passes.forecast_pass import Forecast
from tests.factories import join, make_host, make_project, make_run, place_all, placed_job, start

pytestmark = pytest.mark.django_db
GPU = {"gpu": 1}
UNLIMITED = {"max_duration": "off"}


def estimate(run: Run) -> StartEstimate:
    return StartEstimate.objects.get(run=run)


def known(run: Run) -> tuple[str, dict[str, object], bool]:
    """Basis, its data, and whether there are times."""
    row = estimate(run)
    return row.basis, row.data, row.p50 is not None


def running(project: Project, user: User, name: str, **keys: object) -> Run:
    run = make_run(project, user, name, **({"resources": GPU} | keys))
    place_all()
    start(placed_job(run))
    return run


def learn(project: Project, user: User, prefix: str, seconds: float, runs: int = RUNS_MIN) -> None:
    LearnedDuration.objects.create(project=project, user=user, prefix=prefix, bin=BINS.bin_of(seconds), runs=runs)


def test_a_run_behind_one_with_a_limit_starts_when_that_is_over(project: Project, member: User) -> None:
    make_host(gpus=1)
    first = running(project, member, "first", max_duration="1h", stop_duration="20s")
    behind = make_run(project, member, "behind", resources=GPU)
    forecast_pass.refresh()
    assert known(behind) == (StartBasis.MAX_DURATION, {"run": "first"}, True)
    row, ends = estimate(behind), placed_job(first).placed_at + dt.timedelta(seconds=3680)
    assert row.p50 == row.p90
    assert row.p50 is not None
    assert dt.timedelta(0) <= row.p50 - ends <= dt.timedelta(minutes=1)


def test_durations_of_ended_runs_count_more_than_a_limit(project: Project, member: User) -> None:
    make_host(gpus=1)
    learn(project, member, "train", 600, runs=41)
    running(project, member, "train-1", max_duration="24h")
    behind = make_run(project, member, "behind", resources=GPU)
    forecast_pass.refresh()
    assert known(behind) == (StartBasis.LEARNED, {"run": "train-1", "prefix": "train", "runs": 41}, True)
    row = estimate(behind)
    assert row.p50 is not None
    assert row.p50 - timezone.now() < dt.timedelta(minutes=15)


def test_what_a_run_has_lasted_already_shortens_what_is_left(project: Project, member: User) -> None:
    make_host(gpus=1)
    learn(project, member, "train", 600)
    first = running(project, member, "train-1")
    behind = make_run(project, member, "behind", resources=GPU)
    Job.objects.filter(run=first).update(placed_at=timezone.now() - dt.timedelta(seconds=500))
    forecast_pass.refresh()
    row = estimate(behind)
    assert row.p50 is not None
    assert row.p50 - timezone.now() < dt.timedelta(minutes=4)


def test_behind_a_run_without_limit_or_history_there_is_no_estimate_and_its_name(
    project: Project, member: User
) -> None:
    make_host(gpus=1)
    running(project, member, "big-1", **UNLIMITED)
    behind = make_run(project, member, "behind", resources=GPU)
    forecast_pass.refresh()
    assert known(behind) == (StartBasis.NO_END, {"run": "big-1"}, False)


def test_runs_of_other_projects_are_not_named(project: Project, member: User) -> None:
    make_host(gpus=1)
    other = make_project("other")
    join(other, member)
    running(other, member, "secret-1", **UNLIMITED)
    behind = make_run(project, member, "behind", resources=GPU)
    forecast_pass.refresh()
    assert known(behind) == (StartBasis.NO_END, {}, False)


def test_behind_a_waiting_run_without_limit_or_history_that_run_is_named(project: Project, member: User) -> None:
    make_host(gpus=1)
    running(project, member, "first", max_duration="1h")
    make_run(project, member, "endless", resources=GPU, **UNLIMITED)
    behind = make_run(project, member, "behind", resources=GPU)
    forecast_pass.refresh()
    assert known(behind) == (StartBasis.NO_END, {"run": "endless"}, False)


def test_a_run_that_fits_starts_now(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = make_run(project, member, resources=GPU)
    forecast_pass.refresh()
    assert known(run) == (StartBasis.NOW, {}, True)


def test_runs_of_a_paused_queue_have_no_estimate(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = make_run(project, member, resources=GPU)
    Queue.objects.update(paused=True)
    forecast_pass.refresh()
    assert known(run) == (StartBasis.PAUSED, {}, False)


def test_what_could_never_start_is_shown_in_a_paused_queue_too(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = make_run(project, member, resources={"gpu": 2})
    Queue.objects.update(paused=True)
    place_all()
    forecast_pass.refresh()
    assert known(run) == (StartBasis.IMPOSSIBLE, {}, False)
    starts, _data = starts_of(Run.objects.select_related("queue").get(pk=run.pk))
    assert starts is not None
    assert starts.basis == StartBasis.IMPOSSIBLE


def test_what_no_host_could_ever_take_is_impossible(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = make_run(project, member, resources={"gpu": 2})
    place_all()
    forecast_pass.refresh()
    assert known(run) == (StartBasis.IMPOSSIBLE, {}, False)


def test_where_hosts_are_offline_no_end_of_a_run_helps(project: Project, member: User) -> None:
    make_host(gpus=1, draining=True)
    run = make_run(project, member, resources=GPU)
    place_all()
    forecast_pass.refresh()
    assert known(run) == (StartBasis.UNAVAILABLE, {"reason": "backend_unavailable"}, False)


def test_runs_for_clouds_alone_have_no_estimate(project: Project, member: User) -> None:
    make_host(gpus=1)
    run = make_run(project, member, resources=GPU, backends=["aws"])
    forecast_pass.refresh()
    assert known(run) == (StartBasis.ELSEWHERE, {}, False)


def test_a_limit_that_no_end_meets_is_said(project: Project, member: User) -> None:
    make_host(gpus=4)
    Queue.objects.update(max_running=1)
    running(project, member, "endless", **UNLIMITED, resources={"cpu": 1})
    run = make_run(project, member, resources=GPU)
    forecast_pass.refresh()
    assert known(run)[0] in (StartBasis.NO_END, StartBasis.LIMIT)


def test_nothing_is_computed_or_written_while_nothing_changes(project: Project, member: User) -> None:
    make_host(gpus=1)
    running(project, member, "first", max_duration="1h")
    run = make_run(project, member, resources=GPU)
    assert forecast_pass.refresh() == 1
    with patch.object(Forecast, "estimate", side_effect=AssertionError):
        assert forecast_pass.refresh() == 0
    ForecastState.objects.update(at=timezone.now() - dt.timedelta(minutes=5))
    before = estimate(run).first_shown
    assert forecast_pass.refresh() == 0, "made anew, and still right"
    assert estimate(run).first_shown == before
    assert QueueCount.objects.get(queue=run.queue).submitted == 1


def test_a_change_of_the_queue_makes_new_estimates_and_new_lists(project: Project, member: User) -> None:
    make_host(gpus=1)
    first = running(project, member, "first", max_duration="1h")
    run = make_run(project, member, resources=GPU)
    forecast_pass.refresh()
    version = QueueCount.objects.get(queue=run.queue).version
    services.stop(first, member, "member", abort=True)
    Job.objects.filter(run=first).update(placed_at=timezone.now() - dt.timedelta(minutes=30))
    assert forecast_pass.refresh() == 1
    assert QueueCount.objects.get(queue=run.queue).version > version + 1


def test_a_start_is_compared_with_its_estimate_which_is_deleted(project: Project, member: User) -> None:
    make_host(gpus=1)
    first = running(project, member, "first", max_duration="1h")
    run = make_run(project, member, resources=GPU)
    forecast_pass.refresh()
    attempts.end_job(placed_job(first).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    place_all()
    forecast_pass.refresh()
    assert not StartEstimate.objects.filter(run=run).exists()
    rows = StartScore.objects.order_by("quantile").values_list("quantile", "horizon", "bin", "starts", "in_time")
    assert list(rows) == [(50, 2, 0, 1, 1), (90, 2, 0, 1, 1)]


def test_a_run_that_left_its_queue_without_a_start_is_forgotten_uncounted(project: Project, member: User) -> None:
    make_host(gpus=1)
    running(project, member, "first", max_duration="1h")
    run = make_run(project, member, resources=GPU)
    forecast_pass.refresh()
    services.stop(run, member, "member")
    assert forecast_pass.has_work()
    forecast_pass.refresh()
    assert not StartEstimate.objects.exists()
    assert not StartScore.objects.exists()
    assert not forecast_pass.has_work()


def test_the_first_estimate_at_each_horizon_is_compared_and_the_last_one_is_not(project: Project, member: User) -> None:
    """Which one is the last, the start decides: another would have followed if it had not happened then."""
    make_host(gpus=1)
    first = running(project, member, "first", max_duration="5h")
    run = make_run(project, member, resources=GPU)
    for hours in (0.0, 0.5, 4.5, 4.6):
        at = timezone.now() - dt.timedelta(hours=hours)
        Job.objects.filter(run=first).update(started_at=at, placed_at=at)
        ForecastState.objects.all().delete()
        assert forecast_pass.refresh() == 1
    assert [start_estimates.ShownEstimate(*one).horizon for one in estimate(run).first_shown] == [3, 1]
    attempts.end_job(placed_job(first).pk, Reason.DONE_BY_RUNNER, exit_code=0)
    place_all()
    forecast_pass.settle()
    assert list(StartScore.objects.filter(quantile=50).order_by("horizon").values_list("horizon", "starts")) == [
        (1, 1),
        (3, 1),
    ]


def test_the_first_estimate_at_a_new_horizon_is_noted_though_the_time_is_still_right(
    project: Project, member: User
) -> None:
    make_host(gpus=1)
    running(project, member, "first", max_duration="5h")
    run = make_run(project, member, resources=GPU)
    forecast_pass.refresh()
    with patch.object(timezone, "now", return_value=timezone.now() + dt.timedelta(hours=2)):
        assert forecast_pass.refresh() == 1
    assert [start_estimates.ShownEstimate(*one).horizon for one in estimate(run).first_shown] == [3, 2]


def test_late_starts_make_later_estimates_longer_within_bounds(project: Project, member: User) -> None:
    make_host(gpus=1)
    running(project, member, "first", max_duration="1h")
    behind = make_run(project, member, resources=GPU)
    forecast_pass.refresh()
    before = estimate(behind).p90
    for ratio in (1.5, 1.4, 100.0):
        StartScore.objects.update_or_create(
            quantile=90, horizon=2, bin=start_estimates.RATIOS.bin_of(ratio), defaults={"starts": 100}
        )
    ForecastState.objects.all().delete()
    forecast_pass.refresh()
    after = estimate(behind).p90
    assert before is not None
    assert after is not None
    ahead, longer = before - timezone.now(), after - timezone.now()
    assert longer / ahead == pytest.approx(start_estimates.FACTORS[1], rel=0.05)


def test_old_scores_fade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_estimates, "SCORES_MAX", 10)
    shown = start_estimates.ShownEstimate(1000.0, 600.0, 900.0, 1600.0, 1920.0)
    start_estimates.score([(shown, 1500.0)] * 9)
    assert start_estimates.load_records()[50, 0].starts == 9
    start_estimates.score([(shown, 1700.0)])
    record = start_estimates.load_records()[50, 0]
    assert record.starts == 4
    assert record.share == 1.0
