from __future__ import annotations

import pytest
from pytest_django import Settings

from dstackweb.accounts.models import Project, User
from dstackweb.backends.hosts import local
from dstackweb.runs.models import Job
from dstackweb.scheduler.hosts import check_jobs
from tests.factories import make_host, make_run, place_all, placed_job

pytestmark = pytest.mark.django_db


def test_the_error_of_a_failed_start_is_stored_and_does_not_block_other_jobs(
    project: Project, member: User, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DSTACKWEB_HOST_NAME = "box-1"
    make_host()
    for _ in range(2):
        make_run(project, member)
    assert place_all() == 2
    asked: list[object] = []

    def full_disk(order: dict[str, object]) -> None:
        asked.append(order["job"])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local, "ensure_runner", full_disk)
    check_jobs("box-1")
    assert len(asked) == 2
    assert all("No space left" in job.message for job in Job.objects.all())


def test_an_unclaimed_job_is_started_without_a_search_of_all_processes(
    project: Project, member: User, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DSTACKWEB_HOST_NAME = "box-1"
    make_host()
    run = make_run(project, member)
    place_all()
    started: list[object] = []
    searched: list[object] = []
    monkeypatch.setattr(local, "ensure_runner", lambda order: started.append(order["job"]))

    def search(job_id: object) -> bool:
        searched.append(job_id)
        return True

    monkeypatch.setattr(local, "tree_gone", search)
    check_jobs("box-1")
    assert (started, searched) == ([str(placed_job(run).pk)], [])
    Job.objects.update(claim_nonce="nonce")
    check_jobs("box-1")
    assert searched == [placed_job(run).pk]
