"""How long each stage of a run took or takes."""

from __future__ import annotations

import datetime as dt

from dstackweb.runs.models import Job, Run
from dstackweb.web.runs.details import newest, stages

T0 = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


def run(status: str, attempt: int = 1, queued_s: float = 0, ended_s: float | None = None) -> Run:
    ended_at = None if ended_s is None else at(ended_s)
    return Run(status=status, attempt=attempt, submitted_at=T0, queued_at=at(queued_s), ended_at=ended_at)


def job(placed_s: float, started_s: float | None = None, attempt: int = 1) -> Job:
    return Job(attempt=attempt, placed_at=at(placed_s), started_at=None if started_s is None else at(started_s))


def sentences(of: Run, *jobs: Job) -> list[str]:
    """Each stage as `label: verb duration`, with a live one as `since N`."""
    since = (
        f"since {(stage.since - T0).total_seconds():.0f}" if stage.since else stage.took for stage in stages(of, jobs)
    )
    return [f"{stage.label}: {stage.verb} {took}".strip() for stage, took in zip(stages(of, jobs), since, strict=True)]


def test_a_waiting_run_has_waited_since_it_was_submitted() -> None:
    assert sentences(run("submitted")) == ["Submitted: waiting since 0", "Placed:", "Running:", "End:"]


def test_a_placed_run_is_starting() -> None:
    waiting, starting, *_rest = sentences(run("provisioning"), job(200))
    assert (waiting, starting) == ("Submitted: waited 3 min 20 s", "Placed: starting since 200")


def test_a_running_run_counts_on_from_its_first_node() -> None:
    found = sentences(run("running"), job(200, 207), job(201, 205))
    assert found == [
        "Submitted: waited 3 min 20 s",
        "Placed: started in 5 s",
        "Running: running since 205",
        "End:",
    ]


def test_a_run_whose_last_commands_have_ended_sends_its_artifacts() -> None:
    first, second = job(200, 205), job(200, 206)
    first.exited_at = at(300)
    assert len(sentences(run("running"), first, second)) == 4
    second.exited_at = at(320)
    assert sentences(run("running"), first, second)[2:4] == [
        "Running: ran 1 min 55 s",
        "Artifacts: being sent since 320",
    ]


def test_an_ended_run_ran_until_its_end() -> None:
    found = stages(run("failed", ended_s=4000), [job(200, 205)])
    assert (found[2].verb, found[2].took) == ("ran", "1 h 3 min")
    assert (found[3].label, found[3].at, found[3].status) == ("Failed", at(4000), "failed")


def test_a_run_that_was_stopped_before_it_ran_only_waited_or_started() -> None:
    assert sentences(run("terminated", ended_s=30))[0] == "Submitted: waited 30 s"
    assert sentences(run("terminated", ended_s=30), job(10))[:3] == [
        "Submitted: waited 10 s",
        "Placed: started in 20 s",
        "Running:",
    ]


def test_a_retried_run_counts_its_newest_attempt_from_when_it_was_queued_again() -> None:
    found = sentences(run("running", attempt=2, queued_s=900), job(1, 2), job(960, 961, attempt=2))
    assert found[:2] == ["Queued: waited 1 min 0 s", "Placed: started in 1 s"]


def test_a_pending_run_waits_in_no_queue() -> None:
    found = stages(run("pending", attempt=2), [job(1, 2)])
    assert newest(found) is None
    assert newest(stages(run("terminated", attempt=2, ended_s=500), [job(1, 2)])) is None


def test_the_newest_stage_is_the_one_that_goes_on_or_was_last() -> None:
    assert newest(stages(run("provisioning"), [job(200)])).verb == "starting"  # type: ignore[union-attr]
    assert newest(stages(run("done", ended_s=300), [job(200, 201)])).verb == "ran"  # type: ignore[union-attr]
