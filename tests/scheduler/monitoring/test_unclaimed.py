"""Runs that were placed and that no runner claimed go back to their place in the queue; sick hosts are held back."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone
from pytest_django import Settings

from dstackweb.accounts.models import Project, Role, User
from dstackweb.backends.hosts import inventory, local
from dstackweb.backends.models import Host, HostEvent
from dstackweb.lib.errors import Conflict
from dstackweb.runs import attempts, services
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.recount import differences
from dstackweb.runs.states import JobStatus, Reason, RunStatus
from dstackweb.scheduler import hosts, watch
from tests.factories import make_host, make_run, place_all, placed_job, start

pytestmark = [pytest.mark.django_db, pytest.mark.both_sides]


def fresh(run: Run) -> Run:
    return Run.objects.get(pk=run.pk)


def events() -> list[str]:
    return list(HostEvent.objects.order_by("id").values_list("kind", flat=True))


@pytest.fixture
def broken(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The host of this process, on which no start works."""
    settings.DSTACKWEB_HOST_NAME = "box-1"

    def not_a_directory(_order: object) -> None:
        raise FileExistsError(17, "File exists", "/var/jobs")

    monkeypatch.setattr(local, "ensure_runner", not_a_directory)
    return make_host(gpus=1)


def test_a_run_whose_start_failed_returns_to_its_position_at_once(project: Project, member: User, broken: Host) -> None:
    ahead, behind = make_run(project, member, resources={"gpu": 1}), make_run(project, member, resources={"gpu": 1})
    Run.objects.filter(pk=ahead.pk).update(queued_at=timezone.now() - dt.timedelta(hours=1))
    before = fresh(ahead)
    assert place_all() == 1
    hosts.check_jobs("box-1")
    after = fresh(ahead)
    assert (after.status, after.attempt) == (RunStatus.SUBMITTED, 2)
    assert (after.rank, after.seniority_us, after.queued_at) == (before.rank, before.seniority_us, before.queued_at)
    assert after.rank < fresh(behind).rank
    assert not Allocation.objects.exists()
    assert list(differences()) == []
    job = Job.objects.get(run=ahead)
    assert (job.termination_reason, "File exists" in job.message) == (Reason.NOT_CLAIMED, True)


def test_a_runner_that_claims_after_its_run_was_requeued_is_refused(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job = placed_job(run)
    assert attempts.return_job(job.pk)
    with pytest.raises(Conflict):
        attempts.claim_job(job.pk, "late", "here")


def test_a_run_claimed_first_by_its_runner_is_not_requeued(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    attempts.claim_job(placed_job(run).pk, "early", "here")
    assert not attempts.return_job(placed_job(run).pk, failed_start=True)
    assert fresh(run).status == RunStatus.PROVISIONING
    assert Host.objects.get().start_failures == 0


def test_the_third_failed_start_in_a_row_holds_the_host_back(project: Project, member: User, broken: Host) -> None:
    runs = [make_run(project, member) for _ in range(6)]
    for failures in (1, 2, 3):
        place_all()
        hosts.check_job(str(Job.objects.filter(status=JobStatus.PROVISIONING).earliest("pk").pk))
        for job in Job.objects.filter(status=JobStatus.PROVISIONING):
            attempts.return_job(job.pk)
        broken.refresh_from_db()
        assert broken.start_failures == failures
    assert broken.held_back_at is not None
    assert "File exists" in broken.start_error
    assert events() == ["held_back"]
    Run.objects.update(retry_at=None)
    assert place_all() == 0
    assert {fresh(run).status for run in runs} <= {RunStatus.SUBMITTED, RunStatus.PENDING}


def test_a_start_that_works_ends_the_row(project: Project, member: User) -> None:
    host = make_host()
    for _ in range(2):
        inventory.count_failed_start(host.pk, "no", timezone.now())
    run = make_run(project, member)
    place_all()
    start(placed_job(run))
    inventory.count_failed_start(host.pk, "no", timezone.now())
    host.refresh_from_db()
    assert (host.start_failures, host.held_back_at) == (1, None)


def hold_back(host: Host) -> None:
    for _ in range(inventory.HOLD_BACK_AFTER):
        inventory.count_failed_start(host.pk, "no space", timezone.now())


def test_a_successful_trial_start_releases_the_host_and_one_more_failure_holds_it_back(
    project: Project, member: User, broken: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_back(broken)
    hosts.probe_start("box-1")  # still fails, for another reason
    broken.refresh_from_db()
    assert broken.held_back_at is not None
    assert "File exists" in broken.start_error
    monkeypatch.setattr(local, "ensure_runner", lambda _order: None)
    hosts.probe_start("box-1")
    assert not hosts.is_held_back("box-1")
    make_run(project, member)
    assert place_all() == 1
    inventory.count_failed_start(broken.pk, "no space", timezone.now())
    assert hosts.is_held_back("box-1")
    assert events() == ["held_back", "takes_jobs", "held_back"]


def fail_to_start(job: Job, **report: bool) -> None:
    """What a runner reports that has claimed its job and can't start the commands on this host."""
    attempts.claim_job(job.pk, "nonce", "here")
    attempts.report_end(job.pk, Reason.NOT_CLAIMED, message="[Errno 28] No space left on device", **report)


def test_a_host_that_fails_what_it_has_claimed_is_held_back_and_fails_no_run(project: Project, member: User) -> None:
    host = make_host()
    runs = [make_run(project, member) for _ in range(3)]
    for run in runs:
        place_all()
        before = fresh(run)
        fail_to_start(placed_job(run))
        after = fresh(run)
        assert (after.status, after.attempt, after.rank) == (RunStatus.SUBMITTED, 2, before.rank)
        assert not Allocation.objects.filter(job__run=run).exists()
    host.refresh_from_db()
    assert host.held_back_at is not None
    assert host.start_error == "[Errno 28] No space left on device"
    assert events() == ["held_back"]
    assert place_all() == 0
    assert list(differences()) == []


def test_only_a_start_of_the_commands_ends_the_row_of_failures(project: Project, member: User) -> None:
    host = make_host()
    inventory.count_failed_start(host.pk, "no", timezone.now())
    run = make_run(project, member)
    place_all()
    attempts.claim_job(placed_job(run).pk, "nonce", "here")
    host.refresh_from_db()
    assert host.start_failures == 1
    attempts.start_job(placed_job(run).pk)
    host.refresh_from_db()
    assert host.start_failures == 0


def test_a_node_that_cannot_start_returns_the_whole_run_before_any_has_started(project: Project, member: User) -> None:
    make_host("box-1", cpus=2)
    make_host("box-2", cpus=2)
    run = make_run(project, member, nodes=2, resources={"cpu": 2})
    place_all()
    attempts.claim_job(placed_job(run, 0).pk, "first", "here")
    fail_to_start(placed_job(run, 1))
    assert fresh(run).status == RunStatus.TERMINATING
    attempts.report_end(placed_job(run, 0).pk, Reason.TERMINATED_BY_SERVER)
    assert (fresh(run).status, fresh(run).attempt) == (RunStatus.SUBMITTED, 2)


def test_a_run_whose_start_failed_after_a_stop_stays_stopped(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    attempts.claim_job(placed_job(run).pk, "nonce", "here")
    services.stop(fresh(run), member, Role.MEMBER)
    attempts.report_end(placed_job(run).pk, Reason.NOT_CLAIMED, message="no space")
    assert fresh(run).status == RunStatus.TERMINATED


def test_a_broken_engine_returns_its_runs_without_counting_against_its_host(project: Project, member: User) -> None:
    host = make_host()
    run = make_run(project, member)
    place_all()
    fail_to_start(placed_job(run), by_engine=True)
    assert fresh(run).status == RunStatus.SUBMITTED
    host.refresh_from_db()
    assert (host.start_failures, host.held_back_at) == (0, None)


def test_unclaimed_jobs_of_an_offline_host_are_requeued(project: Project, member: User) -> None:
    host = make_host()
    waiting, begun = make_run(project, member), make_run(project, member)
    place_all()
    start(placed_job(begun))
    Host.objects.update(silent_s=31)
    watch.watch()
    assert (fresh(waiting).status, fresh(begun).status) == (RunStatus.SUBMITTED, RunStatus.RUNNING)
    host.refresh_from_db()
    assert host.start_failures == 0
    assert place_all() == 0


def test_claimed_nodes_stop_before_the_run_is_requeued(project: Project, member: User) -> None:
    make_host("box-1", cpus=2)
    make_host("box-2", cpus=2)
    run = make_run(project, member, nodes=2, resources={"cpu": 2})
    place_all()
    attempts.claim_job(placed_job(run, 0).pk, "first", "here")
    attempts.return_job(placed_job(run, 1).pk, failed_start=True)
    assert fresh(run).status == RunStatus.TERMINATING
    attempts.end_job(placed_job(run, 0).pk, Reason.TERMINATED_BY_SERVER)
    assert (fresh(run).status, fresh(run).attempt) == (RunStatus.SUBMITTED, 2)


def test_a_concurrently_stopped_run_is_not_requeued(project: Project, member: User) -> None:
    make_host("box-1", cpus=2)
    make_host("box-2", cpus=2)
    run = make_run(project, member, nodes=2, resources={"cpu": 2})
    place_all()
    attempts.claim_job(placed_job(run, 0).pk, "first", "here")
    attempts.return_job(placed_job(run, 1).pk)
    Run.objects.filter(pk=run.pk).update(stop_reason=Reason.STOPPED_BY_USER)
    attempts.end_job(placed_job(run, 0).pk, Reason.TERMINATED_BY_SERVER)
    assert fresh(run).status == RunStatus.TERMINATED


def test_a_repeatedly_requeued_run_waits_before_the_next_try(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts.random, "random", lambda: 0.5)
    make_host()
    run = make_run(project, member)
    for _ in range(attempts.RETURNS_AT_ONCE):
        place_all()
        attempts.return_job(placed_job(run).pk)
        assert fresh(run).status == RunStatus.SUBMITTED
    place_all()
    attempts.return_job(placed_job(run).pk)
    assert fresh(run).status == RunStatus.PENDING
    assert attempts.requeue_due(timezone.now() + dt.timedelta(minutes=1)) == 1
