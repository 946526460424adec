from __future__ import annotations

import datetime as dt

import pytest
from django.conf import settings
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import given, strategies as st
from pytest_django import Settings

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Host
from dstackweb.lib.models import Watch
from dstackweb.runs import attempts
from dstackweb.runs.heartbeats import Heartbeat, take
from dstackweb.runs.models import Job, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import RunStatus
from dstackweb.scheduler import watch
from dstackweb.wording import statuses
from tests.factories import make_host, make_run, place_all, placed_job, start


class Clock:
    """The watcher's monotonic time, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.boot = 1000.0, "boot-1"
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watch, "boot_id", lambda: self.boot)
        # By chance the pause before the next attempt is over at once: real time passes in these tests.
        monkeypatch.setattr(attempts, "full_jitter", lambda *_: 60.0)
        watch.watch()

    def pass_time(self, seconds: float, looks: int = 5) -> None:
        """Look so often while `seconds` pass, with pauses that count in full."""
        with self.monkeypatch.context() as patched:
            patched.setattr(settings, "DSTACKWEB_WATCH_EVERY_S", seconds / looks / watch.MAX_STEP)
            for _ in range(looks):
                self.now += seconds / looks
                watch.watch()


@pytest.fixture
def clock(db: None, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def fresh(run: Run) -> Run:
    return Run.objects.get(pk=run.pk)


def running(project: Project, member: User, **keys: object) -> Run:
    run = make_run(project, member, **keys)
    place_all()
    start(placed_job(run))
    return run


@given(st.none() | st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_one_check_never_adds_more_than_three_intervals(last: float | None, now: float, others: float) -> None:
    step = watch.countable_s(last, now, others, 2.0)
    assert 0 <= step <= 6
    assert last is not None or step == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 2.0, 5.0, 60.0])), max_size=60))
def test_machines_that_alternate_checks_count_each_second_once(looks: list[tuple[int, float]]) -> None:
    now = total = 0.0
    last: dict[int, tuple[float, float]] = {}
    for machine, wait in looks:
        now += wait
        seen, then = last.get(machine, (None, 0.0))
        total += watch.countable_s(seen, now + machine, total - then, 2.0)
        last[machine] = now + machine, total
        assert total <= now


def test_a_job_unclaimed_at_its_start_deadline_is_requeued_and_counts_against_its_host(
    project: Project, member: User, clock: Clock, settings: Settings
) -> None:
    settings.DSTACKWEB_START_DEADLINE_S, settings.DSTACKWEB_HOST_SILENT_S = 60, 1000
    host = make_host()
    run = make_run(project, member)
    place_all()
    clock.pass_time(58)
    assert fresh(run).status == RunStatus.PROVISIONING
    clock.pass_time(6)
    assert (fresh(run).status, fresh(run).attempt) == (RunStatus.SUBMITTED, 2)
    job = Job.objects.get(run=run)
    assert "did not start within 1 min" in statuses.message(job.detail, job.message)
    host.refresh_from_db()
    assert (host.cpus_used, host.start_failures) == (0, 1)
    assert list(differences()) == []


def test_an_hour_without_a_watcher_declares_nothing_lost(
    project: Project, member: User, clock: Clock, settings: Settings
) -> None:
    settings.DSTACKWEB_START_DEADLINE_S = settings.DSTACKWEB_LOST_AFTER_S = 60
    make_host()
    waiting = make_run(project, member)
    place_all()
    lost = running(project, member, retry=True)
    clock.now += 3600
    watch.watch()
    assert fresh(waiting).status == RunStatus.PROVISIONING
    assert fresh(lost).status == RunStatus.RUNNING
    assert Job.objects.timed().get(run=lost).silent_s <= 6


def test_a_reboot_of_the_watchers_machine_declares_nothing_lost(project: Project, member: User, clock: Clock) -> None:
    make_host()
    run = running(project, member, retry=True)
    clock.now, clock.boot = 5.0, "boot-2"
    watch.watch()
    assert Job.objects.timed().get(run=run).silent_s == 0


@pytest.mark.slow
def test_two_alternating_watchers_find_a_lost_job_as_soon_as_one(
    project: Project, member: User, clock: Clock, settings: Settings
) -> None:
    settings.DSTACKWEB_LOST_AFTER_S, settings.DSTACKWEB_HOST_SILENT_S = 20, 10
    make_host()
    run = running(project, member, retry=True, stop_duration=20)
    for _ in range(16):
        clock.now += 3
        watch.watch()
        clock.now, clock.boot = clock.now + 1e6 + 3, "boot-2"
        watch.watch()
        clock.now, clock.boot = clock.now - 1e6, "boot-1"
    assert fresh(run).status == RunStatus.RUNNING  # after 96 s of the 100 that its runner has
    clock.pass_time(20)
    assert fresh(run).status == RunStatus.PENDING


def test_the_watch_of_a_machine_that_no_longer_checks_is_deleted(clock: Clock) -> None:
    clock.boot = "boot-2"
    clock.pass_time(2, looks=1)
    Watch.objects.update(counted_s=watch.FORGET_S + 100)
    clock.pass_time(2, looks=1)
    assert list(Watch.objects.get().checks) == ["boot-2"]


def test_a_silent_host_loses_a_run_with_retry_once_its_runner_must_have_stopped(
    project: Project, member: User, clock: Clock, settings: Settings
) -> None:
    settings.DSTACKWEB_LOST_AFTER_S, settings.DSTACKWEB_HOST_SILENT_S = 100, 30
    make_host(gpus=1)
    run = running(project, member, retry=True, resources={"gpu": 1}, stop_duration=20)
    clock.pass_time(170)
    assert fresh(run).status == RunStatus.RUNNING
    clock.pass_time(20)
    assert fresh(run).attempt == 2
    assert fresh(run).status in (RunStatus.PENDING, RunStatus.SUBMITTED)  # its back-off may be over
    assert Job.objects.get(run=run).allocations.count() == 0


def test_without_retry_a_silent_host_keeps_its_run_and_its_gpus(
    project: Project, member: User, clock: Clock, settings: Settings
) -> None:
    """Nobody knows that its processes are gone: no GPU is given away."""
    settings.DSTACKWEB_LOST_AFTER_S, settings.DSTACKWEB_HOST_SILENT_S = 100, 30
    make_host(gpus=1)
    run = running(project, member, resources={"gpu": 1})
    clock.pass_time(1000)
    assert fresh(run).status == RunStatus.RUNNING
    assert Job.objects.get(run=run).allocations.count() == 2


def test_a_host_with_heartbeats_keeps_its_silent_job_until_it_has_checked_it(
    project: Project, member: User, clock: Clock, settings: Settings
) -> None:
    settings.DSTACKWEB_LOST_AFTER_S, settings.DSTACKWEB_HOST_SILENT_S = 100, 30
    host = make_host()
    run = running(project, member, retry=True)
    for heartbeat in range(1, 13):
        Host.objects.filter(pk=host.pk).update(heartbeats=host.heartbeats + heartbeat)
        clock.pass_time(20, looks=2)
    assert Job.objects.timed().get(run=run).silent_s == 240  # a job of a silent host is lost after 180
    assert fresh(run).status == RunStatus.RUNNING


def test_a_pending_run_enters_the_queue_at_its_time(project: Project, member: User, clock: Clock) -> None:
    run = make_run(project, member)
    Run.objects.filter(pk=run.pk).update(status="pending", retry_at=timezone.now() + dt.timedelta(hours=1))
    watch.watch()
    assert fresh(run).status == RunStatus.PENDING
    Run.objects.filter(pk=run.pk).update(retry_at=timezone.now())
    watch.watch()
    assert fresh(run).status == RunStatus.SUBMITTED


def test_a_step_lost_between_two_processes_is_finished_by_the_next_check(
    project: Project, member: User, clock: Clock
) -> None:
    make_host()
    run = running(project, member)
    Job.objects.filter(run=run).update(status="done", termination_reason="done_by_runner")
    watch.watch()
    assert fresh(run).status == RunStatus.DONE


def test_a_check_writes_none_of_the_jobs_it_watches(project: Project, member: User, clock: Clock) -> None:
    """What has passed is derived from one row: 10,000 running jobs cost a check no more rows than none."""
    make_host()
    run = running(project, member)
    clock.now += 2
    with CaptureQueriesContext(connection) as seen:
        watch.watch()
    assert not [query["sql"] for query in seen if query["sql"].startswith('UPDATE "runs_')]
    assert Job.objects.timed().get(run=run).silent_s == 2


def test_a_heartbeat_resets_only_the_silence_of_its_own_job(project: Project, member: User, clock: Clock) -> None:
    make_host()
    heard, silent = running(project, member), running(project, member)
    clock.pass_time(20)
    take([Heartbeat(placed_job(heard).pk, "nonce")])
    assert Job.objects.timed().get(run=heard).silent_s == 0
    assert Job.objects.timed().get(run=silent).silent_s == 20


def test_a_job_that_starts_late_in_the_watchers_time_begins_at_zero(
    project: Project, member: User, clock: Clock
) -> None:
    clock.pass_time(500)
    make_host()
    run = make_run(project, member)
    place_all()
    job = Job.objects.timed().get(run=run)
    assert (job.status_s, job.silent_s) == (0, 0)
    clock.pass_time(10)
    start(placed_job(run))
    assert Job.objects.timed().get(run=run).status_s == 0
