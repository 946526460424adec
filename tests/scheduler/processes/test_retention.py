"""What is old goes, step by step and within a time; what somebody may need stays."""

from __future__ import annotations

import datetime as dt
from io import StringIO

import pytest
from django.core.management import call_command
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.backends.models import HostEvent
from dstackweb.lib.errors import Gone, Invalid
from dstackweb.lib.storage import storage
from dstackweb.runs import archives, logs, selectors, services
from dstackweb.runs.models import Archive, Job, QueueHour, Run
from dstackweb.runs.recount import differences
from dstackweb.scheduler.models import Retention
from dstackweb.scheduler.processes import retention, tasks
from tests.factories import make_host, make_run
from tests.runs.test_removal import done_run

pytestmark = pytest.mark.django_db
YEARS = dt.timedelta(days=800)


@pytest.fixture
def later() -> dt.datetime:
    return timezone.now() + YEARS


def ended_runs(project: Project, member: User, number: int) -> list[Run]:
    runs = [make_run(project, member) for _ in range(number)]
    return [services.stop(run, member, "member") for run in runs]


def test_old_runs_are_deleted_and_counters_stay_correct(project: Project, member: User, later: dt.datetime) -> None:
    make_host()
    done_run(project, member)
    waiting = make_run(project, member)
    assert not retention.prune(later)
    assert list(Run.objects.all()) == [waiting]
    assert list(differences()) == []


def test_young_runs_stay(project: Project, member: User) -> None:
    ended_runs(project, member, 1)
    assert not retention.prune(timezone.now() + dt.timedelta(days=300))
    assert Run.objects.exists()


def test_a_run_stays_until_its_next_occurrence_exists(project: Project, member: User, later: dt.datetime) -> None:
    run = ended_runs(project, member, 1)[0]
    Run.objects.filter(pk=run.pk).update(retry_at=later)
    retention.prune(later)
    assert Run.objects.exists()


def test_one_call_is_bounded_in_time_and_the_next_continues(
    project: Project, member: User, later: dt.datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 2)
    clock = iter(range(1000))
    monkeypatch.setattr(retention.time, "monotonic", lambda: float(next(clock)))
    ended_runs(project, member, 9)
    assert retention.prune(later, budget_s=3)
    left = Run.objects.count()
    assert 0 < left < 9
    assert Retention.objects.get(kind="runs").waiting == left
    assert not retention.prune(later, budget_s=100)
    assert not Run.objects.exists()
    figures = Retention.objects.get(kind="runs")
    assert (figures.waiting, figures.pruned, figures.behind_since) == (0, 9, None)


def test_remaining_old_data_makes_the_next_tick_due_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forward: list[str] = []
    monkeypatch.setattr(tasks, "_bring_forward", lambda name, _seconds: forward.append(name))
    for left in (True, False):
        monkeypatch.setattr(tasks.retention, "prune", lambda left=left: left)
        tasks.prune_old_data()
    assert forward == ["retention"]


def test_a_kind_that_fails_stops_no_other(
    project: Project, member: User, later: dt.datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_job: object) -> None:
        raise OSError("disk")

    make_host()
    done_run(project, member)
    HostEvent.objects.all().delete()
    monkeypatch.setattr(retention.logs, "remove_log", fail)
    with pytest.raises(OSError, match="disk"):
        retention.prune(later)
    assert not Run.objects.exists()


def test_the_log_of_an_old_run_is_deleted_and_reading_it_explains_why(project: Project, member: User) -> None:
    make_host()
    run = done_run(project, member)
    job = Job.objects.get()
    retention.prune(timezone.now() + dt.timedelta(days=200))
    assert not logs.log_size(job.pk)
    with pytest.raises(Gone, match="180 days"):
        selectors.log_part(run)


def test_logs_of_earlier_attempts_stay_while_the_run_is_active(project: Project, member: User) -> None:
    make_host()
    run = done_run(project, member)
    Run.objects.filter(pk=run.pk).update(status="pending", ended_at=None)
    retention.prune(timezone.now() + YEARS)
    assert selectors.log_part(run).data == b"hello\n"


def archive_of(project: Project) -> Archive:
    return archives.store_archive(project, [b"code"])[0]


def is_stored(archive: Archive) -> bool:
    return storage().is_whole(Archive.objects.get(pk=archive.pk).key)


def test_unused_code_is_deleted_and_restored_by_an_upload(project: Project, later: dt.datetime) -> None:
    archive = archive_of(project)
    retention.prune(timezone.now() + dt.timedelta(days=89))
    assert is_stored(archive)
    retention.prune(timezone.now() + dt.timedelta(days=91))
    assert not is_stored(archive)
    assert archives.use_archive(project, archive.sha256) is None
    _same, new = archives.store_archive(project, [b"code"])
    assert new
    assert is_stored(archive)
    assert archives.use_archive(project, archive.sha256) is not None


def test_code_of_a_waiting_or_scheduled_run_stays(project: Project, member: User) -> None:
    archive = archive_of(project)
    config = {"type": "task", "commands": ["true"]}
    run, _ = services.submit(project, member, "member", services.Submission(config, archive=archive.sha256))
    retention.prune(timezone.now() + YEARS)
    assert is_stored(archive)
    services.stop(run, member, "member")
    Run.objects.update(retry_at=timezone.now())
    retention.prune(timezone.now() + YEARS)
    assert is_stored(archive)
    Run.objects.update(retry_at=None)
    retention.prune(timezone.now() + dt.timedelta(days=91))
    assert not is_stored(archive)


def test_finding_code_or_submitting_it_keeps_it(project: Project, member: User) -> None:
    archive = archive_of(project)
    Archive.objects.update(used_at=timezone.now() - YEARS)
    assert retention.unused_archives(timezone.now()).exists()
    assert archives.use_archive(project, archive.sha256) is not None
    assert not retention.unused_archives(timezone.now()).exists()


def test_concurrently_reused_code_is_not_removed(project: Project) -> None:
    """The condition holds behind the row's lock, not when the row was chosen."""
    archive = archive_of(project)
    Archive.objects.update(used_at=timezone.now() - YEARS)
    unused = retention._unused(timezone.now())
    archives.use_archive(project, archive.sha256)
    assert not archives.remove_archive(archive, unused, timezone.now())
    assert is_stored(archive)


def test_a_file_left_by_a_killed_removal_is_deleted_with_its_row(project: Project) -> None:
    archive = archive_of(project)
    Archive.objects.update(removed_at=timezone.now())
    assert storage().is_whole(archive.key)
    retention.prune(timezone.now() + YEARS)
    assert not Archive.objects.exists()
    assert not storage().is_whole(archive.key)


def test_removed_code_can_not_be_submitted(project: Project, member: User) -> None:
    archive = archive_of(project)
    retention.prune(timezone.now() + YEARS)
    config = {"type": "task", "commands": ["true"]}
    with pytest.raises(Invalid, match="Upload it again"):
        services.submit(project, member, "member", services.Submission(config, archive=archive.sha256))


def test_a_dry_run_counts_and_changes_nothing(project: Project, member: User) -> None:
    ended_runs(project, member, 2)
    Run.objects.update(ended_at=timezone.now() - YEARS)
    QueueHour.objects.all().delete()
    out = StringIO()
    call_command("prune", "--dry-run", stdout=out)
    assert "runs: 2" in out.getvalue()
    assert Run.objects.count() == 2
    call_command("prune", stdout=out)
    assert not Run.objects.exists()
