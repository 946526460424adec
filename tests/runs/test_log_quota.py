"""A job's log takes no more than its limit, a project's logs no more than their quota, and no run fails for that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.conf import LazySettings
from django.db import connection
from django.utils import timezone
from hypothesis import given, strategies as st

from dstackweb.accounts.models import Project, User
from dstackweb.lib.storage import Gap
from dstackweb.runs import attempts, logs, recount, selectors
from dstackweb.runs.codes import LogCut, RunEventKind
from dstackweb.runs.logs import SLACK, STEP, append, counted_for, cut_line, limit_of
from dstackweb.runs.models import Job, ProjectLogs, Run
from dstackweb.runs.removal import remove
from dstackweb.scheduler.processes import retention
from dstackweb.wording import events
from tests.factories import make_host, make_project, make_run, place_all, placed_job
from tests.support import examples

MIB = 1 << 20
PIECE = b"x" * (MIB // 2)


@pytest.fixture
def job(settings: LazySettings, project: Project, member: User) -> Job:
    """Its log may have a MiB, and its project's a GiB."""
    settings.DSTACKWEB_LOG_LIMIT_MB = settings.DSTACKWEB_PROJECT_LOG_GB = 1
    make_host()
    run = make_run(project, member)
    place_all()
    return placed_job(run)


def fill(project: Project, left: int) -> None:
    """Leave so many bytes of its quota."""
    ProjectLogs.objects.update_or_create(project=project, defaults={"bytes": limit_of(LogCut.PROJECT_QUOTA) - left})


def used(project: Project) -> int:
    return ProjectLogs.used(project)


@examples(60)
@given(st.integers(1, 1 << 40))
def test_a_log_counts_for_a_little_more_than_it_is(size: int) -> None:
    assert size <= counted_for(size) < max(STEP, size // 8 + 1) + size


@pytest.mark.django_db
@pytest.mark.parametrize("kind", ["", "database"], ids=["on disk", "in rows"])
def test_a_log_over_its_limit_is_cut_with_a_line_that_says_so(job: Job, settings: LazySettings, kind: str) -> None:
    settings.DSTACKWEB_STORAGE = kind
    sent = 0
    for _ in range(4):
        appended = append(job.pk, sent, PIECE)
        sent += len(PIECE)
        assert appended.next == sent
    assert appended.cut == "job_limit"
    most = MIB + SLACK
    assert logs.read_log(job.pk, 0, 4 * MIB) == b"x" * most + cut_line(LogCut.JOB_LIMIT)
    job.refresh_from_db()
    assert (job.log_cut, job.log_size) == ("job_limit", most)
    assert append(job.pk, 0, b"").next == most


@pytest.mark.django_db
def test_a_log_of_its_limit_with_its_runners_lines_is_whole(job: Job) -> None:
    assert append(job.pk, 0, b"x" * (MIB + SLACK)).cut == ""


@pytest.mark.django_db
def test_what_was_sent_before_may_be_sent_again(job: Job) -> None:
    assert [append(job.pk, at, b"abc").next for at in (0, 0, 2, 3)] == [3, 3, 5, 6]
    with pytest.raises(Gap):
        append(job.pk, 100 * MIB, b"abc")
    job.refresh_from_db()
    assert (job.log_cut, used(job.run.project)) == ("", STEP)


@pytest.mark.django_db
def test_a_project_over_its_quota_keeps_no_more_output(job: Job, project: Project) -> None:
    fill(project, STEP)
    assert append(job.pk, 0, b"x" * STEP) == logs.Appended(STEP)
    assert append(job.pk, STEP, b"yes") == logs.Appended(STEP + 3, "project_quota")
    fill(project, MIB)
    assert append(job.pk, STEP + 3, b"more").cut == "project_quota"
    line = cut_line(LogCut.PROJECT_QUOTA)
    assert logs.read_log(job.pk, 0, MIB) == b"x" * STEP + line
    assert b"quota of 1 GB" in line
    event = job.run.events.get(kind=RunEventKind.LOG_CUT)
    words = "the project's logs have reached their quota of 1 GB; later output is not kept, and the run goes on"
    assert str(events.event_text(event, 1)) == words


@pytest.mark.django_db
def test_other_projects_have_quotas_of_their_own(job: Job) -> None:
    fill(make_project("other"), 0)
    assert append(job.pk, 0, b"x").cut == ""


@pytest.mark.django_db
def test_the_end_of_a_job_counts_what_was_not_kept(job: Job, project: Project) -> None:
    fill(project, 0)
    append(job.pk, 0, b"abc")
    attempts.report_end(job.pk, "done_by_runner", exit_code=0, log_size=2**62, log_missing=2**62)
    job.refresh_from_db()
    assert (job.status, job.log_size, job.log_missing) == ("done", 0, 2**62)
    part = selectors.log_part(job.run, offset=logs.log_size(job.pk))
    assert (part.complete, part.cut) == (True, "project_quota")


@pytest.mark.django_db
def test_a_job_that_ends_without_a_report_keeps_the_size_of_its_cut_log(job: Job, project: Project) -> None:
    fill(project, 0)
    append(job.pk, 0, b"abc")
    attempts.end_job(job.pk, "instance_unreachable")
    job.refresh_from_db()
    assert (job.log_size, job.log_missing) == (0, 0)


@pytest.mark.django_db
def test_logs_stop_counting_once_they_are_pruned_or_deleted(job: Job, project: Project, member: User) -> None:
    run = make_run(project, member)
    place_all()
    other = placed_job(run)
    for one in (job, other):
        append(one.pk, 0, b"x" * (STEP + 1))
        attempts.end_job(one.pk, "done_by_runner", exit_code=0)
    assert used(project) == 4 * STEP
    assert list(recount.differences()) == []
    for _ in range(2):
        logs.forget([job.pk], timezone.now())
        assert used(project) == 2 * STEP
    assert remove([job.run_id, run.pk], retention.Q()) == 2
    assert used(project) == 0
    assert list(recount.differences()) == []


@pytest.mark.django_db(transaction=True)
def test_of_many_jobs_at_once_as_many_bytes_are_kept_as_the_quota_has(job: Job, project: Project, member: User) -> None:
    runs = [make_run(project, member) for _ in range(5)]
    place_all()
    jobs = [job, *map(placed_job, runs)]
    fill(project, 2 * STEP)

    def send(one: Job) -> str:
        try:
            return append(one.pk, 0, b"x").cut
        finally:
            connection.close()

    with ThreadPoolExecutor(6) as pool:
        cuts = list(pool.map(send, jobs))
    assert sorted(cuts) == [""] * 2 + ["project_quota"] * 4
    assert used(project) == limit_of(LogCut.PROJECT_QUOTA)
    assert Run.objects.filter(events__kind=RunEventKind.LOG_CUT).count() == 4


@pytest.mark.django_db(transaction=True)
def test_two_senders_of_one_job_are_counted_once(job: Job, project: Project) -> None:
    def send(_: int) -> int:
        try:
            return append(job.pk, 0, b"x" * 3 * STEP).next
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(send, range(8))) == {3 * STEP}
    assert used(project) == counted_for(3 * STEP)
