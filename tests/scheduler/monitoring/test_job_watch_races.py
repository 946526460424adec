"""The watcher racing runners, people and passes."""

from __future__ import annotations

import contextlib
import threading

import pytest
from django.db import connection, transaction
from pytest_django import Settings

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import Host
from dstackweb.runs import attempts
from dstackweb.runs.models import Allocation, Job, Run
from dstackweb.runs.states import JobStatus, RunStatus
from dstackweb.scheduler import watch
from dstackweb.wording import statuses
from tests.factories import as_if, make_host, make_run, place_all, placed_job, start


def late(job: Job) -> None:
    as_if(Job.objects.filter(pk=job.pk), status_s=1e6)


@pytest.mark.django_db
def test_a_job_that_starts_while_its_deadline_is_checked_continues_without_an_event(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job = placed_job(run)
    late(job)
    lock = watch.lock_run
    monkeypatch.setattr(watch, "lock_run", lambda run_id: (start(job), lock(run_id))[1])
    watch.watch()
    assert Run.objects.get(pk=run.pk).status == RunStatus.RUNNING
    assert not run.events.filter(kind="start_deadline").exists()


@pytest.mark.django_db
def test_a_watcher_killed_at_a_start_deadline_did_all_of_it_or_nothing(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    late(placed_job(run))

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(watch, "return_job", die)
        with pytest.raises(KeyboardInterrupt):
            watch.watch()
    assert not run.events.filter(kind="start_deadline").exists()
    watch.watch()
    assert (Run.objects.get(pk=run.pk).status, Allocation.objects.count()) == (RunStatus.SUBMITTED, 0)


@pytest.mark.django_db
def test_a_claimed_job_that_missed_its_start_keeps_that_reason_and_message(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    job = placed_job(run)
    attempts.claim_job(job.pk, "nonce", "here")
    late(job)
    watch.watch()
    attempts.end_job(job.pk, "terminated_by_server", message="stopped before its commands were started")
    job.refresh_from_db()
    assert (job.status, job.termination_reason) == (JobStatus.FAILED, "failed_to_start_due_to_no_capacity")
    assert "did not start within" in statuses.run_message(Run.objects.get(pk=run.pk))


@pytest.mark.django_db
def test_one_unreadable_run_does_not_block_the_watch_of_others(
    project: Project, member: User, settings: Settings
) -> None:
    settings.DSTACKWEB_LOST_AFTER_S = 1
    make_host(silent_s=1e6)
    broken, lost = make_run(project, member, retry=True), make_run(project, member, retry=True)
    Host.objects.update(silent_s=0)
    place_all()
    for run in (broken, lost):
        start(placed_job(run))
    Run.objects.filter(pk=broken.pk).update(spec={"type": "no longer known"})
    Host.objects.update(silent_s=1e6)
    as_if(Job.objects.all(), silent_s=1e6)
    with pytest.raises(Exception, match="validation error"):
        watch.watch()
    assert Run.objects.get(pk=lost.pk).status == RunStatus.PENDING


@pytest.mark.django_db(transaction=True)
def test_the_watcher_skips_locked_rows(project: Project, member: User) -> None:
    """It touches many rows in one statement: waiting for one while holding others is how deadlocks are made."""
    busy, idle = make_host("busy"), make_host("idle")
    # SQLite has one writer at a time and no rows to wait for: there nobody else is at work.
    with transaction.atomic() if connection.vendor == "postgresql" else contextlib.nullcontext():
        Host.objects.filter(pk=busy.pk).update(cpus_used=1)
        looker = threading.Thread(target=lambda: (watch._add_silence(2.0), connection.close()))
        looker.start()
        looker.join(3)
        waited = looker.is_alive()
    looker.join(5)
    assert not waited
    idle.refresh_from_db()
    assert idle.silent_s == 2.0
