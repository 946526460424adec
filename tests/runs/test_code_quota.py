"""A project's uploaded code takes no more than its quota, however many upload at once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.conf import LazySettings
from django.db import connection, transaction
from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import TooLarge
from dstackweb.lib.storage import storage
from dstackweb.runs import archives
from dstackweb.runs.models import Archive
from tests.factories import make_project
from tests.support import eventually

GIB = 1024**3


@pytest.fixture
def nearly_full(settings: LazySettings, project: Project) -> Project:
    """There is room for five bytes."""
    settings.DSTACKWEB_PROJECT_CODE_GB = 1
    Archive.objects.create(project=project, sha256="0" * 64, size=GIB - 5, key="archives/big")
    return project


def stored() -> set[str]:
    """The files of archives with the bytes of these tests."""
    folder = Path(os.environ["DSTACKWEB_HOME"]) / "archives"
    return {str(file) for file in folder.rglob("*.tar.gz")}


@pytest.mark.django_db
def test_what_exceeds_the_quota_is_not_stored(nearly_full: Project) -> None:
    before = stored()
    with pytest.raises(TooLarge, match=r"main has uploaded takes 1.0 of 1 GB: nothing was stored.*90 days"):
        archives.store_archive(nearly_full, [b"123456"])
    assert stored() == before
    assert Archive.objects.count() == 1


@pytest.mark.django_db
def test_what_fits_is_stored_once(nearly_full: Project) -> None:
    for made in (True, False):
        assert archives.store_archive(nearly_full, [b"12345"])[1] == made
    lost = Archive.objects.get(size=5)
    storage().remove(lost.key)
    assert archives.store_archive(nearly_full, [b"12345"])[0] == lost


@pytest.mark.django_db
def test_removed_code_and_that_of_other_projects_does_not_count(nearly_full: Project) -> None:
    archives.store_archive(make_project("other"), [b"123456"])
    Archive.objects.filter(sha256="0" * 64).update(removed_at=timezone.now())
    archives.store_archive(nearly_full, [b"123456"])


@pytest.mark.django_db(transaction=True)
def test_of_several_uploads_at_once_as_many_are_stored_as_fit(nearly_full: Project) -> None:
    def upload(number: int) -> bool:
        try:
            return archives.store_archive(nearly_full, [b"%04d" % number])[1]
        except TooLarge:
            return False
        finally:
            connection.close()

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(upload, range(6)))
    assert sum(made) == 1
    assert Archive.objects.count() == 2


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_an_upload_waits_for_another_that_is_counted(nearly_full: Project) -> None:
    def upload() -> bool:
        try:
            return archives.store_archive(nearly_full, [b"1234"])[1]
        finally:
            connection.close()

    def waits() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return bool(cursor.fetchone()[0])

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            Project.objects.select_for_update(no_key=True).get(pk=nearly_full.pk)
            Archive.objects.create(project=nearly_full, sha256="1" * 64, size=5, key="archives/other")
            outcome = pool.submit(upload)
            eventually(lambda: waits() or outcome.done())
        with pytest.raises(TooLarge):
            outcome.result()
