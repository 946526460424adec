"""What jobs leave is kept whole, once, and within its limits, whichever server gets it and wherever it is stored."""

from __future__ import annotations

import datetime as dt
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.conf import LazySettings
from django.db import connection
from django.db.models import Q
from django.utils import timezone

from dstackweb.accounts.models import Project, User
from dstackweb.lib.errors import Gone, Invalid, NotFound
from dstackweb.lib.models import StoredFile, StoredPart
from dstackweb.lib.storage import Gap, storage
from dstackweb.runner.limits import ArtifactLeft
from dstackweb.runs import artifacts, attempts, recount, removal
from dstackweb.runs.artifacts import MOST_FILES, Offered, Taken, take
from dstackweb.runs.models import Artifact, Job, ProjectArtifacts, RemovedRun, Run, RunArtifacts
from dstackweb.scheduler.processes import retention
from tests.factories import make_host, make_project, make_run, place_all, placed_job, start

MIB = 1 << 20


@pytest.fixture
def job(settings: LazySettings, project: Project, member: User) -> Job:
    """A file may have a MiB, its run two, and its project a GiB."""
    settings.DSTACKWEB_ARTIFACT_LIMIT_MB, settings.DSTACKWEB_RUN_ARTIFACTS_MB = 1, 2
    settings.DSTACKWEB_PROJECT_ARTIFACTS_GB = 1
    make_host()
    run = make_run(project, member)
    place_all()
    return start(placed_job(run))


def offered(path: str, data: bytes) -> Offered:
    return Offered(path, len(data), hashlib.sha256(data).hexdigest())


def keep(job: Job, path: str, data: bytes) -> Taken:
    return take(job.pk, offered(path, data), 0, data)


def content(run: Run, path: str) -> bytes:
    return b"".join(artifacts.read(artifacts.find(run, path, 0, None)))


def counted(job: Job) -> tuple[int, int, int]:
    """Files and bytes of the run, and bytes of the project, which a recount confirms."""
    assert [one for one in recount.differences() if "artifacts" in str(one)] == []
    row = RunArtifacts.objects.filter(pk=job.run_id).first()
    return (row.files, row.bytes, ProjectArtifacts.used(job.run.project)) if row else (0, 0, 0)


def end(job: Job) -> None:
    attempts.report_end(job.pk, "done_by_runner", exit_code=0, log_size=0, log_missing=0)


@pytest.fixture(params=["disk", pytest.param("database", marks=pytest.mark.both_sides), "s3"])
def kind(request: pytest.FixtureRequest, settings: LazySettings) -> str:
    chosen: str = request.param
    where = {"disk": "", "database": "database"}
    settings.DSTACKWEB_STORAGE = where[chosen] if chosen in where else request.getfixturevalue("bucket")
    return chosen


@pytest.mark.django_db
def test_a_file_is_kept_in_pieces_and_read_from_any_byte(job: Job, kind: str) -> None:
    data = bytes(range(256)) * 1024
    file, half = offered("plots/loss.png", data), len(data) // 2
    assert take(job.pk, file, 0, b"") == Taken(0)
    assert take(job.pk, file, 0, data[:half]) == Taken(half)
    with pytest.raises(NotFound):
        artifacts.find(job.run, "plots/loss.png", 0, None)
    with pytest.raises(Gap) as gap:
        take(job.pk, file, half + 1, b"x")
    assert gap.value.expected == half
    assert take(job.pk, file, 0, data[:half]) == Taken(half)  # once more, by a runner that got no answer
    assert take(job.pk, file, half, data[half:]) == Taken(len(data), done=True)
    kept = artifacts.find(job.run, "plots/loss.png", 0, None)
    StoredPart.objects.update(at=timezone.now() - dt.timedelta(hours=1))
    assert storage().settle()
    assert b"".join(artifacts.read(kept)) == data
    assert b"".join(artifacts.read(kept, 1000, 1003)) == data[1000:1003]
    assert (kept.content_type, counted(job)) == ("image/png", (1, len(data), len(data)))


@pytest.mark.django_db
def test_a_file_that_is_there_is_not_taken_again(job: Job, kind: str) -> None:
    assert keep(job, "a", b"abc") == Taken(3, done=True)
    first = Artifact.objects.get()
    assert keep(job, "a", b"abc") == take(job.pk, offered("a", b"abc"), 0, b"") == Taken(3, done=True)
    assert Artifact.objects.get().stored_at == first.stored_at
    assert counted(job) == (1, 3, 3)


@pytest.mark.django_db
def test_other_content_replaces_a_file(job: Job, kind: str) -> None:
    keep(job, "a", b"abc")
    before = Artifact.objects.get().key
    assert take(job.pk, offered("a", b"longer"), 0, b"lon") == Taken(3)
    assert keep(job, "a", b"longer") == Taken(6, done=True)
    assert content(job.run, "a") == b"longer"
    assert storage().size(before) is None
    assert counted(job) == (1, 6, 6)


@pytest.mark.django_db
def test_bytes_that_are_not_what_was_announced_are_not_kept(job: Job, kind: str) -> None:
    file = offered("a", b"abcd")
    take(job.pk, file, 0, b"ab")
    key = Artifact.objects.get().key
    assert take(job.pk, file, 2, b"XX") == Taken(refused="changed")
    assert (Artifact.objects.count(), storage().size(key), counted(job)) == (0, None, (0, 0, 0))
    assert keep(job, "a", b"abcd").done


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../b", "", "a\0b", "a\nb", "a//b", "./a", "x" * 600])
def test_paths_that_lead_elsewhere_are_refused(job: Job, path: str) -> None:
    with pytest.raises(Invalid):
        keep(job, path, b"x")
    assert not Artifact.objects.exists()


@pytest.mark.django_db
def test_no_storage_key_has_a_name_that_a_job_chose(job: Job) -> None:
    keep(job, "secret-name", b"x")
    assert "secret-name" not in Artifact.objects.get().key


@pytest.mark.django_db
def test_more_bytes_than_announced_are_refused(job: Job) -> None:
    with pytest.raises(Invalid):
        take(job.pk, offered("a", b"abc"), 1, b"bcd")


@pytest.mark.django_db
def test_limits_of_a_file_a_run_and_a_project(job: Job, project: Project) -> None:
    def refused(path: str, size: int) -> str:
        return take(job.pk, Offered(path, size, "0" * 64), 0, b"").refused

    assert refused("file", MIB + 1) == ArtifactLeft.FILE_LIMIT
    assert [refused(name, MIB) for name in "ab"] == ["", ""]
    assert refused("c", 1) == ArtifactLeft.RUN_LIMIT
    assert counted(job) == (2, 2 * MIB, 2 * MIB)
    ProjectArtifacts.objects.update(bytes=1024**3 - 10)
    other = make_run(project, job.run.user)
    place_all()
    assert take(placed_job(other).pk, Offered("d", 11, "0" * 64), 0, b"").refused == ArtifactLeft.PROJECT_QUOTA
    assert take(placed_job(other).pk, Offered("d", 10, "0" * 64), 0, b"").refused == ""
    elsewhere = make_run(make_project("other"), job.run.user, role="admin")
    place_all()
    assert take(placed_job(elsewhere).pk, Offered("d", 11, "0" * 64), 0, b"").refused == ""


@pytest.mark.django_db
def test_a_run_has_so_many_files_at_most(job: Job) -> None:
    keep(job, "first", b"")
    RunArtifacts.objects.update(files=MOST_FILES)
    assert keep(job, "one more", b"") == Taken(refused="too_many")
    assert keep(job, "first", b"").done
    assert Artifact.objects.count() == 1


@pytest.mark.both_sides
@pytest.mark.django_db(transaction=True)
def test_of_several_uploads_at_once_as_many_are_kept_as_fit(job: Job, project: Project) -> None:
    ProjectArtifacts.objects.create(project=project, bytes=1024**3 - 25)

    def send(number: int) -> str:
        try:
            return keep(job, f"file-{number}", b"%010d" % number).refused
        finally:
            connection.close()

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(send, range(6)))
    assert sorted(outcomes) == ["", ""] + ["project_quota"] * 4
    assert ProjectArtifacts.objects.get().bytes == 1024**3 - 5
    row = RunArtifacts.objects.get()
    assert (row.files, row.bytes, Artifact.objects.filter(stored_at__isnull=False).count()) == (2, 20, 2)


@pytest.mark.both_sides
@pytest.mark.django_db(transaction=True)
def test_a_file_that_is_sent_twice_at_once_counts_once(job: Job) -> None:
    """As by a runner that repeats a call whose answer was lost, to another server."""
    data = b"x" * 1000

    def send(_number: int) -> bool:
        try:
            return keep(job, "a", data).done
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(send, range(4)))
    assert content(job.run, "a") == data
    assert counted(job) == (1, 1000, 1000)


@pytest.mark.django_db
def test_artifacts_go_with_their_run(job: Job, project: Project, kind: str) -> None:
    keep(job, "a", b"abc")
    take(job.pk, offered("half", b"abc"), 0, b"a")
    keys = list(Artifact.objects.values_list("key", flat=True))
    end(job)
    left = RemovedRun.objects
    assert removal.remove([job.run_id], Q()) == 1
    assert left.get().has_logs
    assert set(left.get().artifacts) == set(keys)
    removal.remove_logs()
    assert [storage().size(key) for key in keys] == [None, None]
    assert (left.get().artifacts, left.get().has_logs) == ([], False)
    assert not StoredFile.objects.exists()
    assert ProjectArtifacts.used(project) == 0
    assert [one for one in recount.differences() if "artifacts" in str(one)] == []


@pytest.mark.django_db
def test_old_artifacts_are_deleted_and_their_run_remembers_it(job: Job, settings: LazySettings) -> None:
    keep(job, "a", b"abc")
    key = Artifact.objects.get().key
    later = timezone.now() + dt.timedelta(days=settings.DSTACKWEB_ARTIFACTS_DAYS + 1)
    assert not retention.old_artifacts(later).exists(), "its run has not ended"
    end(job)
    assert not retention.old_artifacts(later - dt.timedelta(days=2)).exists()
    retention.prune(later)
    assert (Artifact.objects.count(), storage().size(key), counted(job)) == (0, None, (0, 0, 0))
    assert RunArtifacts.objects.get().removed_at == later
    assert Run.objects.filter(pk=job.run_id).exists()


@pytest.mark.django_db
def test_a_file_that_was_never_sent_to_its_end_is_dropped_after_its_job(job: Job) -> None:
    take(job.pk, offered("half", b"abc"), 0, b"a")
    later = timezone.now() + dt.timedelta(hours=2)
    retention.prune(later)
    assert Artifact.objects.exists(), "its runner may go on"
    end(job)
    retention.prune(later)
    assert (Artifact.objects.count(), counted(job)) == (0, (0, 0, 0))
    [left] = artifacts.left_out(job.run)
    unfinished = {"path": "half", "why": "unfinished", "size": 3}
    assert left.artifacts_left == {"left_out": [unfinished], "number": 1}


@pytest.mark.django_db
def test_lost_bytes_are_said(job: Job) -> None:
    keep(job, "a", b"abc")
    storage().remove(Artifact.objects.get().key)
    with pytest.raises(Gone):
        artifacts.read(artifacts.find(job.run, "a", 0, None))


@pytest.mark.django_db
def test_bytes_that_one_server_got_are_there_on_another(job: Job, settings: LazySettings, tmp_path: Path) -> None:
    """Of a file in two pieces, with homes of their own and the storage in common."""
    settings.DSTACKWEB_STORAGE = f"file://{tmp_path}/shared"
    (tmp_path / "shared").mkdir()
    for number, (offset, data) in enumerate([(0, b"ab"), (2, b"cd")]):
        settings.DSTACKWEB_HOME = tmp_path / f"home-{number}"
        take(job.pk, offered("a", b"abcd"), offset, data)
    assert content(job.run, "a") == b"abcd"
