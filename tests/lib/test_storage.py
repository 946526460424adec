"""One contract of all storages: a disk, rows of the database, and objects of a real S3 server over HTTP."""

from __future__ import annotations

import datetime as dt
import threading
from pathlib import Path

import pytest
from django.db import connection
from django.utils import timezone
from hypothesis import HealthCheck, given, settings, strategies as st

from dstackweb.lib.models import StoredFile, StoredPart
from dstackweb.lib.storage import DiskStorage, Gap, Missing, Storage, StorageAway, pieces, rows, storage_at
from dstackweb.lib.storage.objects import ObjectStorage

pytestmark = pytest.mark.django_db

KEY = "joblogs/ab/abc"


@pytest.fixture(params=["disk", pytest.param("database", marks=pytest.mark.both_sides), "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return storage_at(request.getfixturevalue("bucket"), tmp_path)
    return storage_at("" if request.param == "disk" else "database", tmp_path)


def settle(place: Storage) -> None:
    """As after ten minutes without anything new."""
    StoredPart.objects.update(at=timezone.now() - rows.SETTLED_AFTER - dt.timedelta(minutes=1))
    assert place.settle()


def test_a_file_grows_by_offset(place: Storage) -> None:
    assert (place.size(KEY), place.read(KEY, 0, 10), place.is_whole(KEY)) == (None, b"", False)
    assert place.append(KEY, 0, b"") == 0
    assert place.size(KEY) == 0
    assert place.append(KEY, 0, b"hello ") == 6
    assert place.append(KEY, 6, b"world") == 11
    assert place.append(KEY, 3, b"lo wo") == 11
    assert place.append(KEY, 9, b"ld!") == 12
    with pytest.raises(Gap) as gap:
        place.append(KEY, 13, b"?")
    assert gap.value.expected == 12
    assert (place.read(KEY, 0, 100), place.read(KEY, 4, 4), place.read(KEY, 12, 5)) == (b"hello world!", b"o wo", b"")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(st.tuples(st.integers(0, 40), st.binary(max_size=12)), st.just("settle")), min_size=1, max_size=12
    ),
    at=st.integers(0, 60),
    limit=st.integers(0, 60),
)
def test_a_file_has_the_same_bytes_as_a_plain_buffer(place: Storage, steps: list[object], at: int, limit: int) -> None:
    place.remove(KEY)
    expected = b""
    for step in steps:
        if not isinstance(step, tuple):
            settle(place)
            continue
        offset, data = step
        if offset > len(expected):
            with pytest.raises(Gap):
                place.append(KEY, offset, data)
        else:
            expected += data[len(expected) - offset :]
            assert place.append(KEY, offset, data) == len(expected)
    assert place.read(KEY, at, limit) == expected[at : at + limit]
    assert b"".join(pieces(place, KEY, 0, len(expected))) == expected


def test_a_file_is_put_whole_and_removed(place: Storage, tmp_path: Path) -> None:
    data = bytes(range(256)) * (5 << 12)
    (tmp_path / "upload").write_bytes(data)
    place.put("archives/1/code.tar.gz", tmp_path / "upload")
    assert place.is_whole("archives/1/code.tar.gz")
    assert b"".join(pieces(place, "archives/1/code.tar.gz", 0, len(data))) == data
    assert place.read("archives/1/code.tar.gz", (1 << 20) - 2, 4) == data[(1 << 20) - 2 :][:4]
    place.remove("archives/1/code.tar.gz")
    place.remove("archives/1/code.tar.gz")
    assert place.size("archives/1/code.tar.gz") is None
    with pytest.raises(Missing):
        list(pieces(place, "archives/1/code.tar.gz", 0, len(data)))


@pytest.mark.parametrize("place", ["database", "s3"], indirect=True)
def test_small_parts_are_put_together_and_new_ones_stay(place: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PART", 10)
    for number in range(12):
        place.append(KEY, number * 2, b"%02d" % number)
    assert place.settle()
    ends = list(StoredPart.objects.order_by("offset").values_list("end", "settled"))
    assert ends == [(10, True), (20, True), (22, False), (24, False)]
    assert place.read(KEY, 0, 100) == b"".join(b"%02d" % number for number in range(12))
    place.append(KEY, 24, b"new")
    place.settle()
    assert StoredPart.objects.filter(settled=False).exists()
    settle(place)
    assert not StoredPart.objects.filter(settled=False).exists()
    assert place.read(KEY, 0, 100).endswith(b"11new")


def test_settled_logs_of_object_storage_are_stored_only_as_objects(bucket: str, tmp_path: Path) -> None:
    place = storage_at(bucket, tmp_path)
    assert isinstance(place, ObjectStorage)
    place.append(KEY, 0, b"hello")
    settle(place)
    part = StoredPart.objects.get()
    assert (part.data, part.object) == (None, f"team/{KEY}/0-5")
    place._s3.delete_object(Bucket=place.bucket, Key=part.object)
    assert not place.is_whole(KEY)
    with pytest.raises(Missing, match=r"0-5"):
        place.read(KEY, 0, 5)
    place.remove(KEY)
    assert not StoredFile.objects.exists()


def test_objects_left_by_a_killed_process_are_deleted_with_the_file(bucket: str, tmp_path: Path) -> None:
    place = storage_at(bucket, tmp_path)
    assert isinstance(place, ObjectStorage)
    place.append(KEY, 0, b"hello")
    place._s3.put_object(Bucket=place.bucket, Key=f"team/{KEY}/0-3", Body=b"hel")
    place.remove(KEY)
    assert "Contents" not in place._s3.list_objects_v2(Bucket=place.bucket)


def test_without_its_bucket_a_log_is_still_written(s3: str, bucket: str, tmp_path: Path) -> None:
    away = storage_at(bucket.replace("s3://bucket", "s3://nowhere"), tmp_path)
    with pytest.raises(StorageAway, match="nowhere"):
        away.check()
    assert away.append(KEY, 0, b"hello") == 5
    StoredPart.objects.update(at=timezone.now() - dt.timedelta(hours=1))
    with pytest.raises(StorageAway):
        away.settle()
    assert away.read(KEY, 0, 10) == b"hello"
    with pytest.raises(StorageAway):
        away.put("archives/1/code", Path(__file__))
    assert away.size("archives/1/code") is None


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = storage_at(f"file://{tmp_path}/file", tmp_path)
    for call in (place.check, lambda: place.append(KEY, 0, b"x"), lambda: place.put(KEY, Path(__file__))):
        with pytest.raises(StorageAway, match=r"folder .*/file"):
            call()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("place", ["disk", pytest.param("database", marks=pytest.mark.both_sides)], indirect=True)
def test_of_two_concurrent_senders_no_byte_is_lost_or_duplicated(place: Storage) -> None:
    if connection.vendor == "sqlite":
        place.append(KEY, 0, b"")
    data = bytes(range(200))

    def send() -> None:
        at = 0
        while at < len(data):
            try:
                at = place.append(KEY, at, data[at : at + 7])
            except Gap as gap:
                at = gap.expected
        connection.close()

    senders = [threading.Thread(target=send) for _ in range(3)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        StoredPart.objects.update(at=timezone.now() - dt.timedelta(hours=1))
        place.settle()
    for sender in senders:
        sender.join()
    assert place.read(KEY, 0, 1000) == data


def test_others_can_not_list_the_folders_of_logs(tmp_path: Path) -> None:
    """Their names say which jobs there are."""
    DiskStorage(tmp_path).append("joblogs/ab/abc", 0, b"x")
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("joblogs", "joblogs/ab")} == {0o700}
