"""Files of runs: the log of each job, and the working directories shipped with runs.

A log is raw bytes, addressed by offset (docs/design.md, rule 5). The size of its file says what has arrived: overlap is
trimmed, a gap is refused. An archive is one tar.gz per content, named by its hash.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from dstackweb.accounts.models import Project
from dstackweb.lib.errors import Invalid, TooLarge
from dstackweb.runs.models import Archive


class LogGap(Exception):
    """Bytes are missing before the offered offset; `expected` is the offset to continue at."""

    def __init__(self, expected: int) -> None:
        super().__init__(f"the log continues at offset {expected}")
        self.expected = expected


def log_path(job_id: UUID) -> Path:
    """The file of a job's log, which may not exist yet."""
    text = str(job_id)
    return Path(settings.DSTACKWEB_HOME) / "joblogs" / text[:2] / text


def append_log(job_id: UUID, offset: int, data: bytes) -> int:
    """Add `data`, which begins at `offset`; returns the log's new size in bytes.

    Raises LogGap when `offset` lies behind the end. Two senders at once are put in order by a lock on the file.
    """
    target = log_path(job_id)
    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        end = os.fstat(fd).st_size
        if offset > end:
            raise LogGap(end)
        rest = memoryview(data)[end - offset :]
        while rest:
            written = os.pwrite(fd, rest, end)
            end += written
            rest = rest[written:]
        return end
    finally:
        os.close(fd)


def log_size(job_id: UUID) -> int:
    try:
        return log_path(job_id).stat().st_size
    except FileNotFoundError:
        return 0


def read_log(job_id: UUID, offset: int, limit: int) -> bytes:
    """Up to `limit` bytes from `offset`; empty behind the end."""
    try:
        with log_path(job_id).open("rb") as file:
            if offset >= os.fstat(file.fileno()).st_size:
                return b""  # a file system may refuse to seek as far
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""


def tail_offset(job_id: UUID, lines: int, window: int = 1 << 20) -> int:
    """The offset at which the last `lines` lines begin, looking back at most `window` bytes."""
    end = log_size(job_id)
    start = max(0, end - window)
    data = read_log(job_id, start, end - start)
    at = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(lines):
        found = data.rfind(b"\n", 0, at)
        if found < 0:
            return start
        at = found
    return start + at + 1


def archive_path(project_id: int, sha256: str) -> Path:
    return Path(settings.DSTACKWEB_HOME) / "archives" / str(project_id) / f"{sha256}.tar.gz"


def archive_limit() -> int:
    """The largest archive that is accepted, in bytes."""
    return int(settings.DSTACKWEB_ARCHIVE_LIMIT_MB) * 1024 * 1024


def store_archive(project: Project, chunks: Iterable[bytes], sha256: str | None = None) -> tuple[Archive, bool]:
    """Keep an upload; returns it and whether it is new. `sha256` is what the sender says it is.

    Raises TooLarge over the limit and Invalid when the bytes aren't what was announced; nothing is kept then.
    """
    home = archive_path(project.pk, "x").parent
    home.mkdir(parents=True, exist_ok=True)
    digest, total, limit = hashlib.sha256(), 0, archive_limit()
    with tempfile.NamedTemporaryFile(dir=home, prefix=".upload-", delete=False) as file:
        try:
            for chunk in chunks:
                total += len(chunk)
                if total > limit:
                    raise TooLarge(
                        f"the archive is over the limit of {settings.DSTACKWEB_ARCHIVE_LIMIT_MB} MB; nothing was kept. "
                        "Leave data out with .gitignore, or fetch it in the run."
                    )
                digest.update(chunk)
                file.write(chunk)
            actual = digest.hexdigest()
            if sha256 is not None and actual != sha256:
                raise Invalid.at("archive", msg=f"the bytes that arrived hash to {actual[:12]}…: upload it again")
            return _keep_archive(project, actual, total, Path(file.name))
        except BaseException:
            os.unlink(file.name)
            raise


def _keep_archive(project: Project, sha256: str, size: int, upload: Path) -> tuple[Archive, bool]:
    """Put an upload in place, behind its row's lock: an unused archive is removed behind the same."""
    with transaction.atomic():
        archive, made = Archive.objects.get_or_create(project=project, sha256=sha256, defaults={"size": size})
        Archive.objects.filter(pk=archive.pk).update(used_at=timezone.now(), removed_at=None)
        os.replace(upload, archive_path(project.pk, sha256))
    return archive, made or archive.removed_at is not None


def use_archive(project: Project, sha256: str) -> Archive | None:
    """The archive with this hash, marked as used now; None when its bytes are not there, whatever its row says."""
    if not archive_path(project.pk, sha256).exists():
        return None
    mine = Archive.objects.filter(project=project, sha256=sha256, removed_at=None)
    return mine.get() if mine.update(used_at=timezone.now()) else None


def remove_archive(archive: Archive, unused: Q, now: dt.datetime) -> bool:
    """Remove an archive's file if the condition `unused` still holds behind its row's lock. Its row stays."""
    with transaction.atomic():
        if not Archive.objects.filter(unused, pk=archive.pk, removed_at=None).update(removed_at=now):
            return False
        archive_path(archive.project_id, archive.sha256).unlink(missing_ok=True)
    return True


def remove_log(job_id: UUID) -> None:
    log_path(job_id).unlink(missing_ok=True)
