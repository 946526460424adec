"""From samples to the stop of a run that leaves its GPUs unused, and to none of any other (R16-R21)."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.gpus import exemptions, intake
from dstackweb.gpus.models import (
    GpuSample,
    GpuSeries,
    JobPolicy,
    PolicyExemption,
    PolicyStop,
    ProjectPolicies,
)
from dstackweb.gpus.window import PolicyAction
from dstackweb.lib.times import to_moment
from dstackweb.profiles.models import Profile
from dstackweb.runs import attempts, heartbeats
from dstackweb.runs.models import Job, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import JobStatus
from dstackweb.scheduler import utilization
from dstackweb.wording import statuses
from dstackweb.wording.events import event_text
from tests.factories import cloud_job, make_host, make_run, placed_job, start
from tests.gpus.snapshots import EVERY_MS, START_MS, sample
from tests.gpus.watching import IDLE, MINUTE, begin, look_at, stopped, watch

pytestmark = pytest.mark.django_db

SLOW = {"min_gpu_utilization": 50, "time_window": "8m"}


def events(run: Run, prefix: str = "utilization") -> list[str]:
    return list(run.events.filter(kind__startswith=prefix).values_list("kind", flat=True))


def test_the_default_profiles_policy_stops_a_run_that_does_not_use_its_gpu_after_a_minute_and_not_before(
    project: Project, member: User
) -> None:
    """The reported bug: the policy of the default profile never reached the watcher."""
    Profile.objects.update_or_create(
        project=project, name="team", defaults={"is_default": True, "settings": {"utilization_policy": IDLE}}
    )
    job = begin(project, member)
    assert watch(MINUTE - EVERY_MS) == []
    assert Run.objects.get(pk=job.run_id).status == "running"
    assert watch(MINUTE, from_ms=MINUTE) == [(MINUTE, PolicyAction.STOP)]
    run = Run.objects.get(pk=job.run_id)
    job.refresh_from_db()
    assert (run.status, job.status, job.stop_reason) == (
        "terminating", "terminating", "terminated_due_to_utilization_policy",
    )  # fmt: skip
    assert job.stop_grace_s == 20
    run = stopped(run)
    assert (run.status, run.termination_reason) == ("terminated", "terminated_due_to_utilization_policy")
    assert statuses.run_message(run) == "GPU 0 was below 50 % for 1 min."
    assert (run.attempt, run.retry_at) == (1, None)
    assert list(differences()) == []


def test_policy_actions_are_logged(project: Project, member: User, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", utilization.log.name)
    begin(project, member, utilization_policy=SLOW)
    watch(8 * MINUTE)
    said = f"train, attempt 1, node 0 of {project}: %s, policy 50 %% over 480 s"
    assert caplog.messages == [said % "notice", said % "stop"]


def test_a_run_that_uses_its_gpu_stays(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    assert watch(10 * MINUTE, lambda uuid, ms: 50) == []
    assert watch(20 * MINUTE, lambda uuid, ms: 60 if ms % MINUTE == 0 else 0, from_ms=10 * MINUTE + EVERY_MS) == []
    assert Run.objects.get(pk=job.run_id).status == "running"
    assert not PolicyStop.objects.exists()


def test_a_gap_of_samples_keeps_the_run_and_restarts_the_window(project: Project, member: User) -> None:
    begin(project, member, utilization_policy=IDLE)
    gap = range(30_000, 80_000)
    assert watch(2 * MINUTE, lambda uuid, ms: None if ms in gap else 0) == []
    assert watch(3 * MINUTE, from_ms=2 * MINUTE + EVERY_MS) == [(80_000 + MINUTE, PolicyAction.STOP)]


def test_unreadable_gpus_never_stop_a_run(project: Project, member: User) -> None:
    begin(project, member, utilization_policy=IDLE)
    assert watch(10 * MINUTE, lambda uuid, ms: None) == []


def test_a_job_whose_files_are_being_sent_is_not_stopped(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    assert watch(MINUTE - EVERY_MS) == []
    heartbeats.note_exited(job.pk)
    assert watch(3 * MINUTE, from_ms=MINUTE) == []
    assert Run.objects.get(pk=job.run_id).status == "running"


def test_other_nodes_are_still_judged_while_the_files_of_one_are_being_sent(project: Project, member: User) -> None:
    for name in ("box-1", "box-2"):
        make_host(name, gpus=1)
    job = begin(project, member, nodes=2, utilization_policy=IDLE)
    heartbeats.note_exited(job.pk)
    idle = placed_job(job.run, node=1)
    assert watch(MINUTE, lambda uuid, ms: 0) == [(MINUTE, PolicyAction.STOP)]
    assert PolicyStop.objects.get().node == idle.node


def test_a_run_without_a_policy_is_never_stopped(project: Project, member: User) -> None:
    job = begin(project, member)
    assert watch(5 * MINUTE) == []
    assert JobPolicy.objects.get(pk=job.pk).min_gpu_utilization is None


def test_the_warm_up_does_not_count(project: Project, member: User) -> None:
    begin(project, member, utilization_policy={**IDLE, "warmup": "5m"})
    assert watch(7 * MINUTE) == [(6 * MINUTE, PolicyAction.STOP)]


def test_one_idle_gpu_of_two_is_named(project: Project, member: User) -> None:
    job = begin(project, member, gpus=2, utilization_policy=IDLE)
    assert watch(MINUTE, lambda uuid, ms: 0 if uuid == job.gpus[1] else 99) == [(MINUTE, PolicyAction.STOP)]
    index = GpuSeries.objects.get(job=job, uuid=job.gpus[1]).index
    run = Run.objects.get(pk=job.run_id)
    assert statuses.run_message(run) == f"GPU {index} was below 50 % for 1 min."
    stop = PolicyStop.objects.get()
    assert (stop.gpu_index, sorted(stop.gpus), stop.observed) == (index, sorted(job.gpus), False)


def test_with_the_scope_all_one_busy_gpu_keeps_the_run(project: Project, member: User) -> None:
    job = begin(project, member, gpus=2, utilization_policy={**IDLE, "scope": "all"})
    assert watch(3 * MINUTE, lambda uuid, ms: 99 if uuid == job.gpus[0] else 0) == []
    assert watch(5 * MINUTE, from_ms=3 * MINUTE + EVERY_MS) == [(4 * MINUTE + EVERY_MS, PolicyAction.STOP)]
    assert statuses.run_message(Run.objects.get(pk=job.run_id)) == "All GPUs were below 50 % for 1 min."


def test_one_idle_node_ends_the_whole_run_and_no_retry_follows(project: Project, member: User) -> None:
    for name in ("box-1", "box-2"):
        make_host(name, gpus=1)
    job = begin(project, member, nodes=2, retry=True, utilization_policy=IDLE)
    idle = placed_job(job.run, node=1)
    assert watch(MINUTE, lambda uuid, ms: 0 if uuid in idle.gpus else 99) == [(MINUTE, PolicyAction.STOP)]
    assert {one.status for one in Job.objects.filter(run=job.run)} == {"terminating"}
    run = stopped(job.run)
    assert (run.status, run.attempt) == ("terminated", 1)
    assert statuses.run_message(run) == "GPU 0 of node 1 was below 50 % for 1 min."
    assert PolicyStop.objects.get().node == 1


def test_a_job_on_a_cloud_instance_is_stopped_by_the_samples_of_its_runner(project: Project, member: User) -> None:
    run = make_run(project, member, "cloudy", resources={"gpu": 1}, utilization_policy=IDLE)
    job = cloud_job(run)
    Job.objects.filter(pk=job.pk).update(gpus=["GPU-cloud-0"])
    start(job)
    Job.objects.filter(pk=job.pk).update(started_at=to_moment(START_MS))
    done = []
    for ms in range(0, MINUTE + 1, EVERY_MS):
        samples = [(START_MS + ms, [sample("GPU-cloud-0", 3)])]
        intake.add_samples(Job.objects.get(pk=job.pk), samples, START_MS + ms)
        done += [(ms, action) for action in utilization.judge_jobs(to_moment(START_MS + ms)).values()]
    assert done == [(MINUTE, PolicyAction.STOP)]
    assert stopped(run).termination_reason == "terminated_due_to_utilization_policy"


@pytest.mark.parametrize("scope", ["any", "all"])
@pytest.mark.parametrize("seed", range(6))
def test_the_moment_is_that_of_a_plain_reading_of_the_samples(
    project: Project, member: User, seed: int, scope: str
) -> None:
    """Random loads with gaps, on two GPUs: stopped at the first moment of the definition's, or never."""
    rnd = random.Random(seed)
    used: dict[int, list[int | None]] = {
        place: [rnd.choices([None, 0, 49, 50, 99], [3, 10, 10, 2, 2])[0] for _ in range(30)] for place in range(2)
    }
    policy = {"min_gpu_utilization": 50, "time_window": "1m", "scope": scope}
    job = begin(project, member, gpus=2, utilization_policy=policy)
    done = watch(
        30 * EVERY_MS,
        lambda uuid, ms: used[job.gpus.index(uuid)][ms // EVERY_MS - 1] if uuid in job.gpus else None,
        from_ms=EVERY_MS,
    )
    seen = [[(ms, value) for ms, value in enumerate(values, start=1) if value is not None] for values in used.values()]
    assert done[:1] == [(step * EVERY_MS, PolicyAction.STOP) for step in _first_stop(seen, scope)]


def _first_stop(seen: list[list[tuple[int, int]]], scope: str) -> list[int]:
    """The first step (ten seconds each, the job began at 0) at which the rule says stop, by a plain reading."""
    for now in range(6, 31):
        low = [stretch for samples in seen if (stretch := _low_stretch(samples, now))]
        if scope == "any" and any(last - first >= 6 for first, last in low):
            return [now]
        if len(low) == len(seen) and min(last for _, last in low) - max(first for first, _ in low) >= 6:
            return [now]
    return []


def _low_stretch(samples: list[tuple[int, int]], now: int) -> tuple[int, int] | None:
    """The first and the last of the newest samples that were all below 50 %, without a gap over three up to now."""
    stretch: list[int] = []
    for at, value in samples:
        if at > now:
            break
        if value >= 50:
            stretch = []
        else:
            stretch = [*stretch, at] if stretch and at - stretch[-1] <= 3 else [at]
    return (stretch[0], stretch[-1]) if stretch and now - stretch[-1] <= 3 else None


def test_one_notice_comes_before_the_stop(project: Project, member: User) -> None:
    """A quarter of eight minutes is two."""
    job = begin(project, member, utilization_policy=SLOW)
    assert watch(9 * MINUTE) == [(6 * MINUTE, PolicyAction.NOTICE), (8 * MINUTE, PolicyAction.STOP)]
    notice = job.run.events.get(kind="utilization_notice")
    assert notice.data["stops_at"] == to_moment(START_MS + 8 * MINUTE).isoformat()
    assert "has been below 50 % since" in event_text(notice, 1)


def test_a_short_window_has_no_notice(project: Project, member: User) -> None:
    begin(project, member, utilization_policy={**IDLE, "time_window": "3m"})
    assert watch(4 * MINUTE) == [(3 * MINUTE, PolicyAction.STOP)]


def test_a_new_low_stretch_has_a_new_notice(project: Project, member: User) -> None:
    begin(project, member, utilization_policy=SLOW)
    assert watch(7 * MINUTE) == [(6 * MINUTE, PolicyAction.NOTICE)]
    watch(7 * MINUTE + EVERY_MS, lambda uuid, ms: 80, from_ms=7 * MINUTE + EVERY_MS)
    low_from = 7 * MINUTE + 2 * EVERY_MS
    assert watch(16 * MINUTE, from_ms=low_from) == [
        (low_from + 6 * MINUTE, PolicyAction.NOTICE), (low_from + 8 * MINUTE, PolicyAction.STOP),
    ]  # fmt: skip


@pytest.mark.slow
def test_several_idle_nodes_have_one_notice(project: Project, member: User) -> None:
    for name in ("box-1", "box-2", "box-3"):
        make_host(name, gpus=1)
    job = begin(project, member, nodes=3, utilization_policy={**SLOW, "action": "notify"})
    assert watch(20 * MINUTE) == [(8 * MINUTE, PolicyAction.WOULD_STOP)]
    assert events(job.run) == ["utilization_would_stop"]
    stop = PolicyStop.objects.get()
    assert (stop.observed, len(stop.gpus)) == (True, 3)


@pytest.mark.parametrize("how", ["notify", "observe"])
def test_a_policy_that_only_notifies_stops_nothing_and_records_each_low_stretch_once(
    project: Project, member: User, how: str
) -> None:
    if how == "observe":
        ProjectPolicies.objects.create(project=project, observe_only=True)
    action = "notify" if how == "notify" else "terminate"
    job = begin(project, member, utilization_policy={**IDLE, "action": action})
    assert watch(5 * MINUTE) == [(MINUTE, PolicyAction.WOULD_STOP)]
    assert (JobPolicy.objects.get().noticed_ms is not None) == (how == "notify")  # which all pages show its owner
    watch(5 * MINUTE + EVERY_MS, lambda uuid, ms: 80, from_ms=5 * MINUTE + EVERY_MS)
    assert watch(9 * MINUTE, from_ms=5 * MINUTE + 2 * EVERY_MS) == [
        (6 * MINUTE + 2 * EVERY_MS, PolicyAction.WOULD_STOP)
    ]
    run = Run.objects.get(pk=job.run_id)
    assert run.status == "running"
    assert events(run) == ["utilization_would_stop"] * 2
    assert [stop.observed for stop in PolicyStop.objects.all()] == [True, True]
    assert "would have stopped it: GPU 0 was below 50 %" in event_text(run.events.filter(kind__startswith="util")[0], 1)


def test_when_observing_ends_a_run_that_is_idle_still_is_stopped(project: Project, member: User) -> None:
    policies = ProjectPolicies.objects.create(project=project, observe_only=True)
    begin(project, member, utilization_policy=IDLE)
    assert watch(2 * MINUTE) == [(MINUTE, PolicyAction.WOULD_STOP)]
    policies.observe_only = False
    policies.save()
    assert watch(3 * MINUTE, from_ms=2 * MINUTE + EVERY_MS) == [(2 * MINUTE + EVERY_MS, PolicyAction.STOP)]


def test_a_hold_has_a_notice_and_is_never_stopped(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    Run.objects.filter(pk=job.run_id).update(
        spec={**job.run.spec, "hold": True, "utilization_policy": job.run.spec["utilization_policy"] | {
            "action": "notify"
        }}
    )  # fmt: skip
    assert watch(5 * MINUTE) == [(MINUTE, PolicyAction.WOULD_STOP)]


def test_an_exempt_run_is_stopped_after_its_exemption(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    PolicyExemption.objects.create(
        run=job.run, by=member, at=to_moment(START_MS), until=to_moment(START_MS + 10 * MINUTE), reason="it loads data"
    )
    assert watch(10 * MINUTE - EVERY_MS) == []
    assert watch(11 * MINUTE, from_ms=10 * MINUTE) == [(10 * MINUTE, PolicyAction.STOP)]


def test_an_exempt_run_without_a_notice_has_one_before_its_exemption_ends(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=SLOW)
    until = to_moment(START_MS + 20 * MINUTE)
    PolicyExemption.objects.create(run=job.run, by=member, at=to_moment(START_MS), until=until, reason="it loads data")
    assert watch(20 * MINUTE) == [(18 * MINUTE, PolicyAction.NOTICE), (20 * MINUTE, PolicyAction.STOP)]


def test_the_stored_samples_have_the_last_word(project: Project, member: User) -> None:
    """The folded stretch alone stops nothing: here a sample that showed use came in while nobody folded."""
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE - EVERY_MS)
    series = GpuSeries.objects.get(job=job)
    GpuSample.objects.filter(series=series, at_ms=START_MS + 30_000).update(utilization=90)
    assert watch(MINUTE, from_ms=MINUTE) == []
    assert Run.objects.get(pk=job.run_id).status == "running"
    assert not PolicyStop.objects.exists()


def test_a_window_longer_than_the_retention_is_confirmed_by_the_stored_samples(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=SLOW)
    watch(8 * MINUTE - EVERY_MS)
    series = GpuSeries.objects.get(job=job)
    kept_ms = START_MS + 5 * MINUTE
    GpuSample.objects.filter(series=series, at_ms__lt=kept_ms).delete()
    GpuSeries.objects.filter(pk=series.pk).update(first_ms=kept_ms)
    assert watch(8 * MINUTE, from_ms=8 * MINUTE) == [(8 * MINUTE, PolicyAction.STOP)]


def test_a_changed_policy_is_bound_to_the_job_before_it_can_stop_the_run(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE - EVERY_MS)
    spec = Run.objects.get(pk=job.run_id).spec
    spec["utilization_policy"]["time_window_s"] = 300
    Run.objects.filter(pk=job.run_id).update(spec=spec)
    assert watch(5 * MINUTE, from_ms=MINUTE) == [(3 * MINUTE, PolicyAction.NOTICE), (5 * MINUTE, PolicyAction.STOP)]
    assert JobPolicy.objects.get(pk=job.pk).time_window_s == 300


def test_applying_a_policy_twice_acts_once(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE)
    now = to_moment(START_MS + MINUTE)
    assert [utilization.apply_policy(job, now) for _ in range(2)] == [PolicyAction.NOTHING] * 2
    assert PolicyStop.objects.count() == 1
    assert events(job.run) == ["utilization_stop"]


def test_a_job_of_an_earlier_attempt_or_one_that_has_ended_is_not_acted_on(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE - EVERY_MS)
    attempts.end_job(job.pk, "done_by_runner", exit_code=0)
    assert utilization.apply_policy(job, to_moment(START_MS + MINUTE)) == PolicyAction.NOTHING
    assert Run.objects.get(pk=job.run_id).status == "done"


class Killed(BaseException):
    """What a worker that is killed leaves: whatever has not been committed is gone."""


STEPS = ["_add_to_ledger", "move_run", "stop_jobs", "settle_run"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_killed_between_any_two_steps_leaves_all_or_nothing(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    """The next sample finishes it."""
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE - EVERY_MS)
    real: Callable[..., Any] = getattr(utilization, step)

    def dies(*args: Any, **kwargs: Any) -> None:
        if when == "after":
            real(*args, **kwargs)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(utilization, step, dies)
        with pytest.raises(Killed):
            watch(MINUTE, from_ms=MINUTE)
    run = Run.objects.get(pk=job.run_id)
    assert (run.status, PolicyStop.objects.count(), events(run)) == ("running", 0, [])
    assert Job.objects.get(pk=job.pk).status == JobStatus.RUNNING
    assert watch(MINUTE + EVERY_MS, from_ms=MINUTE + EVERY_MS) == [(MINUTE + EVERY_MS, PolicyAction.STOP)]
    assert stopped(run).status == "terminated"
    assert (PolicyStop.objects.count(), list(differences())) == (1, [])


def test_a_check_whose_worker_died_before_acting_is_repeated_by_the_next(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE - EVERY_MS)
    host = placed_job(job.run).host
    assert host is not None

    def dies(job: object, now: object) -> PolicyAction:
        raise Killed

    look_at(host, lambda uuid, ms: 0, MINUTE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(utilization, "apply_policy", dies)
        with pytest.raises(Killed):
            utilization.judge_jobs(to_moment(START_MS + MINUTE))
    assert utilization.judge_jobs(to_moment(START_MS + MINUTE + 2000)) == {job.pk: PolicyAction.STOP}


def test_the_ledger_has_the_runs_gpus_and_the_end_of_its_max_duration(project: Project, member: User) -> None:
    for name in ("box-1", "box-2"):
        make_host(name, gpus=2)
    job = begin(project, member, nodes=2, gpus=2, max_duration="2h", utilization_policy=IDLE)
    Job.objects.filter(run=job.run).update(price=Decimal("3.5"))
    watch(MINUTE)
    stop, held = PolicyStop.objects.get(), [*job.gpus, *placed_job(job.run, node=1).gpus]
    assert (stop.run_name, stop.user, stop.price, sorted(stop.gpus)) == ("train", member, 7, sorted(held))
    assert stop.until == to_moment(START_MS + 120 * MINUTE)
    assert (stop.low_since, stop.at) == (to_moment(START_MS), to_moment(START_MS + MINUTE))
    assert (stop.min_gpu_utilization, stop.time_window_s, stop.scope) == (50, 60, "any")


def test_keeping_it_before_the_stop_wins(project: Project, member: User) -> None:
    job = begin(project, member, utilization_policy=IDLE)
    watch(MINUTE - EVERY_MS)
    exemptions.exempt(Run.objects.get(pk=job.run_id), member, "member", "it loads data")
    PolicyExemption.objects.update(until=to_moment(START_MS + 30 * MINUTE))
    assert watch(2 * MINUTE, from_ms=MINUTE) == []
