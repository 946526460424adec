"""Logs and code move from one storage to another, and an outage of one is a periodic job's error."""

from __future__ import annotations

import datetime as dt
from io import StringIO
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Gone
from dstackweb.lib.models import StoredPart
from dstackweb.lib.storage import StorageAway, storage
from dstackweb.lib.storage.objects import ObjectStorage
from dstackweb.runs import archives, logs, selectors
from dstackweb.runs.models import Job
from dstackweb.scheduler.processes import tasks
from tests.factories import make_host
from tests.runs.test_removal import done_run

pytestmark = pytest.mark.django_db


def copied(source: str) -> str:
    out = StringIO()
    call_command("copy_storage", source, stdout=out)
    return out.getvalue()


def test_logs_and_code_are_copied_to_the_new_place_once(
    project: Project, member: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host()
    done_run(project, member)
    job = Job.objects.get()
    archive = archives.store_archive(project, [b"code"])[0]
    done_run(project, member)
    lost = Job.objects.exclude(pk=job.pk).get()
    logs.remove_log(lost.pk)
    with pytest.raises(CommandError, match="Set DSTACKWEB_STORAGE to the new place"):
        copied("home")
    monkeypatch.setattr(settings, "DSTACKWEB_STORAGE", "database")
    assert logs.log_size(job.pk) == 0
    assert copied("home") == "2 files copied; 1 are in neither place. The originals were left.\n"
    assert logs.read_log(job.pk, 0, 100) == b"hello\n"
    assert archives.use_archive(project, archive.sha256) is not None
    logs.append_log(job.pk, 6, b"more\n")
    assert copied("home").startswith("0 files copied")
    assert logs.read_log(job.pk, 0, 100) == b"hello\nmore\n"


def test_of_a_log_whose_objects_are_lost_every_reader_is_answered(
    project: Project, member: User, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "DSTACKWEB_STORAGE", bucket)
    make_host()
    run = done_run(project, member)
    StoredPart.objects.update(at=timezone.now() - dt.timedelta(hours=1))
    tasks.keep_storage()
    assert selectors.log_part(run, tail=10).data == b"hello\n"
    place = storage()
    assert isinstance(place, ObjectStorage)
    place._s3.delete_object(Bucket=place.bucket, Key=StoredPart.objects.get().object)
    for tail in (None, 10):
        with pytest.raises(Gone, match="0-6 is not there"):
            selectors.log_part(run, tail=tail)


def test_an_unreachable_storage_is_an_error_of_its_periodic_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks.keep_storage()
    monkeypatch.setattr(settings, "DSTACKWEB_STORAGE", f"file://{tmp_path}/missing")
    with pytest.raises(StorageAway, match="missing is not there"):
        tasks.keep_storage()
