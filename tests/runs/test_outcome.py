from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from dstackweb.runs.states import (
    JOB_ENDED,
    EndRun,
    JobStatus,
    JobView,
    Reason,
    RetryRun,
    ReturnRun,
    RunStarted,
    RunStatus,
    RunView,
    StopOthers,
    decide,
    job_end_status,
)

NOW = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
HOUR = dt.timedelta(hours=1)
RUNNING = RunView(RunStatus.RUNNING)
RETRYING = RunView(RunStatus.RUNNING, retry_on=frozenset({"error", "interruption"}), retry_for=HOUR)


def failed(node: int = 0, reason: Reason = Reason.CONTAINER_EXITED_WITH_ERROR, at: dt.datetime = NOW) -> JobView:
    return JobView(node, job_end_status(reason), reason, 1, "exit code 1", at)


def done(node: int = 0) -> JobView:
    return JobView(node, JobStatus.DONE, Reason.DONE_BY_RUNNER, 0, "", NOW)


def test_a_run_is_running_once_a_job_of_it_is() -> None:
    run = RunView(RunStatus.PROVISIONING)
    assert decide(run, [JobView(0, JobStatus.PROVISIONING)], NOW) is None
    assert decide(run, [JobView(0, JobStatus.RUNNING), JobView(1, JobStatus.PROVISIONING)], NOW) == RunStarted()


def test_a_displaced_run_returns_whatever_its_retry_says() -> None:
    stopping, job = replace(RUNNING, status=RunStatus.TERMINATING), failed(1, Reason.PREEMPTED)
    assert decide(stopping, [done(0), JobView(1, JobStatus.TERMINATING)], NOW) is None
    assert decide(stopping, [done(0), job], NOW) == ReturnRun(job)
    assert decide(replace(RETRYING, status=RunStatus.TERMINATING, max_attempts=1), [job], NOW) == ReturnRun(job)
    stopped = decide(replace(stopping, stop_reason=Reason.STOPPED_BY_USER), [job], NOW)
    assert isinstance(stopped, EndRun)


def test_a_run_is_done_only_when_every_node_is() -> None:
    assert decide(RUNNING, [done(0), JobView(1, JobStatus.RUNNING)], NOW) is None
    assert decide(RUNNING, [done(0), done(1)], NOW) == EndRun(RunStatus.DONE, Reason.ALL_JOBS_DONE, exit_code=0)


def test_a_run_with_a_failed_node_fails_though_another_is_done() -> None:
    outcome = decide(RUNNING, [done(0), failed(1)], NOW)
    assert isinstance(outcome, EndRun)
    assert (outcome.status, outcome.exit_code) == (RunStatus.FAILED, 1)


def test_a_failed_node_stops_the_others() -> None:
    assert decide(RUNNING, [failed(0), JobView(1, JobStatus.RUNNING)], NOW) == StopOthers(failed(0))


def test_the_others_are_stopped_only_once() -> None:
    run = RunView(RunStatus.TERMINATING)
    assert decide(run, [failed(0), JobView(1, JobStatus.TERMINATING)], NOW) is None


def test_the_first_failure_determines_the_outcome() -> None:
    later = failed(0, Reason.EXECUTOR_ERROR, NOW)
    first = JobView(1, JobStatus.FAILED, Reason.CONTAINER_EXITED_WITH_ERROR, 3, "why", NOW - dt.timedelta(seconds=5))
    outcome = decide(RunView(RunStatus.TERMINATING), [later, first], NOW)
    assert isinstance(outcome, EndRun)
    assert (outcome.exit_code, outcome.message, outcome.data["node"]) == (3, "why", 1)


def test_a_stop_by_a_person_ends_as_terminated_and_is_never_retried() -> None:
    run = RunView(RunStatus.TERMINATING, stop_reason=Reason.STOPPED_BY_USER, retry_on=frozenset({"error"}))
    outcome = decide(run, [failed(0), failed(1, Reason.TERMINATED_BY_USER)], NOW)
    assert isinstance(outcome, EndRun)
    assert (outcome.status, outcome.reason) == (RunStatus.TERMINATED, Reason.STOPPED_BY_USER)


def test_a_stop_with_a_detail_ends_with_that_detail() -> None:
    said = {"code": "low_utilization", "gpu": 1}
    run = RunView(RunStatus.TERMINATING, stop_reason=Reason.UTILIZATION_POLICY, stop_detail=said)
    outcome = decide(run, [failed(0, Reason.UTILIZATION_POLICY)], NOW)
    assert isinstance(outcome, EndRun)
    assert (outcome.status, outcome.reason, outcome.detail) == (
        RunStatus.TERMINATED, Reason.UTILIZATION_POLICY, said,
    )  # fmt: skip


def test_a_run_that_finished_before_the_stop_reached_it_is_done() -> None:
    run = RunView(RunStatus.TERMINATING, stop_reason=Reason.STOPPED_BY_USER)
    assert decide(run, [done()], NOW) == EndRun(RunStatus.DONE, Reason.ALL_JOBS_DONE, exit_code=0)


def test_a_covered_failure_is_retried_until_its_time_has_passed() -> None:
    assert decide(RETRYING, [failed()], NOW) == RetryRun(failed(), NOW, NOW + HOUR)
    late = RunView(
        RunStatus.RUNNING,
        retry_on=frozenset({"error"}),
        retry_for=dt.timedelta(hours=1),
        first_failed_at=NOW - dt.timedelta(hours=1),
    )
    outcome = decide(late, [failed()], NOW)
    assert isinstance(outcome, EndRun)
    assert (outcome.status, outcome.reason) == (RunStatus.FAILED, Reason.RETRY_LIMIT_EXCEEDED)


def test_a_run_is_retried_up_to_its_maximum_of_attempts() -> None:
    twice = replace(RETRYING, max_attempts=2)
    assert decide(replace(twice, attempts=1), [failed()], NOW) == RetryRun(failed(), NOW, NOW + HOUR)
    outcome = decide(replace(twice, attempts=2), [failed()], NOW)
    assert isinstance(outcome, EndRun)
    assert (outcome.status, outcome.reason) == (RunStatus.FAILED, Reason.RETRY_LIMIT_EXCEEDED)


def test_a_failure_after_a_long_healthy_stretch_begins_a_new_series_of_retries() -> None:
    run = RunView(
        RunStatus.RUNNING,
        retry_on=frozenset({"interruption"}),
        retry_for=dt.timedelta(hours=1),
        first_failed_at=NOW - dt.timedelta(hours=5),
    )
    culprit = JobView(
        0, JobStatus.FAILED, Reason.INSTANCE_UNREACHABLE, ended_at=NOW, started_at=NOW - dt.timedelta(hours=4)
    )
    assert decide(run, [culprit], NOW) == RetryRun(culprit, NOW, NOW + HOUR)


@pytest.mark.parametrize("run", [RUNNING, RETRYING, RunView(RunStatus.TERMINATING)])
def test_a_run_for_which_all_clouds_lack_capacity_returns_to_the_queue(run: RunView) -> None:
    culprit = failed(0, Reason.OUT_OF_CAPACITY)
    assert decide(run, [culprit], NOW) == RetryRun(culprit, None)
    other = JobView(1, JobStatus.TERMINATED, Reason.TERMINATED_BY_SERVER, ended_at=NOW)
    assert decide(run, [culprit, other], NOW) == RetryRun(culprit, None)


def test_a_stopped_run_for_which_all_clouds_lack_capacity_stays_stopped() -> None:
    run = RunView(RunStatus.TERMINATING, stop_reason=Reason.STOPPED_BY_USER)
    outcome = decide(run, [failed(0, Reason.OUT_OF_CAPACITY)], NOW)
    assert isinstance(outcome, EndRun)
    assert outcome.status == RunStatus.TERMINATED


@pytest.mark.parametrize("status", [RunStatus.PROVISIONING, RunStatus.TERMINATING])
def test_an_unclaimed_run_is_requeued_unless_it_was_stopped_or_a_node_ran(status: RunStatus) -> None:
    culprit = failed(0, Reason.NOT_CLAIMED)
    other = JobView(1, JobStatus.TERMINATED, Reason.TERMINATED_BY_SERVER, ended_at=NOW)
    assert decide(RunView(status), [culprit, other], NOW) == ReturnRun(culprit)
    ran = JobView(1, JobStatus.TERMINATED, Reason.TERMINATED_BY_SERVER, ended_at=NOW, started_at=NOW)
    for outcome in (
        decide(RunView(status), [culprit, ran], NOW),
        decide(RunView(status, stop_reason=Reason.STOPPED_BY_USER), [culprit], NOW),
    ):
        assert isinstance(outcome, EndRun)


def test_a_reclaimed_spot_instance_is_an_interruption() -> None:
    culprit = failed(0, Reason.INTERRUPTED)
    assert decide(RETRYING, [culprit], NOW) == RetryRun(culprit, NOW, NOW + HOUR)
    outcome = decide(RUNNING, [failed(0, Reason.INTERRUPTED)], NOW)
    assert isinstance(outcome, EndRun)
    assert outcome.status == RunStatus.FAILED


@pytest.mark.parametrize("reason", [Reason.MAX_DURATION_EXCEEDED, Reason.UTILIZATION_POLICY])
def test_a_run_stopped_by_a_limit_or_policy_is_never_retried(reason: Reason) -> None:
    outcome = decide(RETRYING, [failed(0, reason)], NOW)
    assert isinstance(outcome, EndRun)
    assert (outcome.status, outcome.reason) == (RunStatus.TERMINATED, reason)


job_views = st.builds(
    lambda node, reason, status: JobView(node, status if reason is None else job_end_status(reason), reason or ""),
    st.integers(0, 3),
    st.none() | st.sampled_from(list(Reason)),
    st.sampled_from([JobStatus.PROVISIONING, JobStatus.RUNNING, JobStatus.TERMINATING]),
)
run_views = st.builds(
    RunView,
    st.sampled_from([RunStatus.PROVISIONING, RunStatus.RUNNING, RunStatus.TERMINATING]),
    st.sampled_from(["", Reason.STOPPED_BY_USER]),
    st.frozensets(st.sampled_from(["error", "interruption", "no-capacity"])),
)


@given(run_views, st.lists(job_views, min_size=1, max_size=4))
def test_a_run_ends_exactly_when_all_its_jobs_have_ended(run: RunView, jobs: list[JobView]) -> None:
    outcome = decide(run, jobs, NOW)
    alive = any(job.status not in JOB_ENDED for job in jobs)
    assert isinstance(outcome, EndRun | RetryRun | ReturnRun) == (not alive)


@given(run_views, st.lists(job_views, min_size=1, max_size=4))
def test_done_means_that_every_job_is_done(run: RunView, jobs: list[JobView]) -> None:
    outcome = decide(run, jobs, NOW)
    if isinstance(outcome, EndRun) and outcome.status == RunStatus.DONE:
        assert all(job.status == JobStatus.DONE for job in jobs)
