"""Bytes that rows promise and the disk no longer has: said by name, never answered with nothing."""

from __future__ import annotations

import hashlib

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Gone, Invalid
from dstackweb.lib.storage import storage
from dstackweb.runs import archives, attempts, logs, selectors, services
from dstackweb.runs.models import Archive, Job, Run
from dstackweb.runs.services import Submission, submit
from dstackweb.wording.statuses import run_message
from tests.api.test_runner_api import Runner
from tests.factories import make_host, make_run, place_all, placed_job, start

pytestmark = pytest.mark.django_db
CODE = b"code"
SHA = hashlib.sha256(CODE).hexdigest()


@pytest.fixture
def ended(project: Project, member: User) -> Job:
    """A job whose runner was promised that its 6 bytes are kept."""
    make_host()
    run = make_run(project, member)
    place_all()
    job = start(placed_job(run))
    logs.append_log(job.pk, 0, b"hello\n")
    attempts.end_job(job.pk, "done_by_runner", exit_code=0, log_size=6)
    return job


def test_a_log_that_is_lost_is_not_answered_as_an_empty_one(ended: Job) -> None:
    logs.remove_log(ended.pk)
    for tail in (None, 10):
        with pytest.raises(Gone, match="had 6 bytes, and 0 of them are here"):
            selectors.log_part(ended.run, tail=tail)


def test_the_rest_of_a_truncated_log_is_shown_with_a_note_on_its_lost_end(ended: Job) -> None:
    logs.remove_log(ended.pk)
    logs.append_log(ended.pk, 0, b"hel")
    part = selectors.log_part(ended.run)
    assert (part.data, part.complete) == (b"hel", False)
    with pytest.raises(Gone, match="had 6 bytes, and 3 of them"):
        selectors.log_part(ended.run, offset=3)


def test_a_whole_log_is_complete_and_has_nothing_behind_its_end(ended: Job) -> None:
    assert selectors.log_part(ended.run).complete
    assert selectors.log_part(ended.run, offset=6).data == b""
    assert selectors.log_part(ended.run, offset=100).complete


def test_a_log_that_is_still_written_may_be_empty(project: Project, member: User) -> None:
    make_host()
    run = make_run(project, member)
    place_all()
    start(placed_job(run))
    assert not selectors.log_part(run).complete


def test_lost_code_counts_as_missing_and_is_restored_by_an_upload(project: Project, member: User) -> None:
    archives.store_archive(project, [CODE])
    storage().remove(Archive.objects.get().key)
    assert archives.use_archive(project, SHA) is None
    config = {"type": "task", "commands": ["true"]}
    with pytest.raises(Invalid, match="Upload it again"):
        submit(project, member, "member", Submission(config, archive=SHA))
    archives.store_archive(project, [CODE])
    assert archives.use_archive(project, SHA) is not None


def test_a_run_whose_code_is_lost_fails_at_once_with_a_message(project: Project, member: User) -> None:
    make_host()
    archives.store_archive(project, [CODE])
    config = {"type": "task", "commands": ["true"], "resources": {"cpu": 1, "memory": "1GB"}}
    run, _ = services.submit(project, member, "member", Submission(config, archive=SHA))
    place_all()
    runner = Runner(placed_job(run))
    runner.claim()
    assert b"".join(runner.get("archive").streaming_content) == CODE  # type: ignore[attr-defined]
    storage().remove(Archive.objects.get().key)
    answer = runner.get("archive")
    assert answer.status_code == 410
    assert SHA[:12] in answer.json()["detail"]
    run = Run.objects.get(pk=run.pk)
    assert (run.status, run.termination_reason) == ("failed", "job_failed")
    assert "dstackweb apply" in run_message(run)
