"""What jobs leave in `$DSTACKWEB_ARTIFACTS`: files with a path, kept in the storage within limits; and their previews.

A file is sent in pieces by offset, to any server, and is there once all of it has arrived and has the announced
SHA-256. Its bytes count from its first piece on, for its run (`RunArtifacts`) and its project (`ProjectArtifacts`).
"""

from __future__ import annotations

import csv
import datetime as dt
import hashlib
import io
import mimetypes
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from dstackweb.lib.errors import Gone, Invalid, NotFound, TooEarly
from dstackweb.lib.storage import Missing, pieces, storage
from dstackweb.lib.text import without_escapes
from dstackweb.runner.limits import LISTED, ArtifactLeft, is_safe
from dstackweb.runs.models import Artifact, Job, ProjectArtifacts, Run, RunArtifacts

MOST_FILES = 1000
"""Of a run, all attempts and nodes together."""
BINARY = "application/octet-stream"
MAGIC = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
IMAGE_MAX = 32 << 20
"""Larger pictures are only downloaded."""
TEXT_BYTES, TABLE_BYTES = 1 << 16, 1 << 18
ROWS, COLUMNS, CELL_CHARS = 200, 50, 200
ENCODING = "utf-8-sig"
"""UTF-8, perhaps with the mark at its beginning that spreadsheets write."""
TABLES = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Offered:
    """A file as its sender describes it; `size` in bytes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Taken:
    """`next` is the offset to continue at. `done`: all of it is there. `refused`: no more of it is wanted."""

    next: int = 0
    done: bool = False
    refused: str = ""


class _Full(Exception):
    def __init__(self, why: ArtifactLeft) -> None:
        super().__init__(why)
        self.why = why


def limit_of(why: ArtifactLeft) -> int:
    limits = {
        ArtifactLeft.FILE_LIMIT: settings.DSTACKWEB_ARTIFACT_LIMIT_MB << 20,
        ArtifactLeft.RUN_LIMIT: settings.DSTACKWEB_RUN_ARTIFACTS_MB << 20,
        ArtifactLeft.PROJECT_QUOTA: settings.DSTACKWEB_PROJECT_ARTIFACTS_GB << 30,
    }
    return limits[why]


def take(job_id: UUID, offered: Offered, offset: int, data: bytes) -> Taken:
    """Add `data`, which begins at `offset`, to a file of a job. Repeatable: what has arrived changes nothing.

    Raises Invalid for a name or sizes that no runner sends, storage.Gap when `offset` lies behind the end, and
    StorageAway.
    """
    if not is_safe(offered.path):
        raise Invalid.at("path", msg=_("this is not the path of an artifact"))
    if offset + len(data) > offered.size:
        raise Invalid.at("offset", msg=_("the file has more bytes than announced"))
    try:
        artifact = _row(job_id, offered)
    except _Full as full:
        return Taken(refused=full.why.value)
    if artifact.stored_at is not None:
        return Taken(offered.size, done=True)
    end = storage().append(artifact.key, offset, data)
    if end < offered.size:
        return Taken(end)
    if _digest(artifact) != offered.sha256:
        forget([artifact], None)  # it was written meanwhile
        return Taken(refused=ArtifactLeft.CHANGED.value)
    if not Artifact.objects.filter(pk=artifact.pk, key=artifact.key).update(stored_at=timezone.now()):
        raise TooEarly(_("the file was replaced meanwhile"))
    return Taken(end, done=True)


def _digest(artifact: Artifact) -> str:
    digest = hashlib.sha256()
    try:
        for piece in pieces(storage(), artifact.key, 0, artifact.size):
            digest.update(piece)
    except Missing:
        return ""
    return digest.hexdigest()


def _row(job_id: UUID, offered: Offered) -> Artifact:
    """The row of a file, a new one for content that is new. Raises _Full."""
    while True:
        found = Artifact.objects.filter(job=job_id, path=offered.path).first()
        if found is not None and (found.size, found.sha256) == (offered.size, offered.sha256):
            return found
        if found is not None:
            forget([found], None)
        if offered.size > limit_of(ArtifactLeft.FILE_LIMIT):
            raise _Full(ArtifactLeft.FILE_LIMIT)
        ids = Job.objects.filter(pk=job_id).values_list("run", "run__project").first()
        if ids is None:
            raise NotFound(_("no such job"))
        try:
            return _reserve(job_id, *ids, offered)
        except IntegrityError:
            continue  # another request was faster


def _reserve(job_id: UUID, run_id: int, project_id: int, offered: Offered) -> Artifact:
    """Make the row of a new file and count it. Raises _Full, and IntegrityError if it is there already."""
    text, size = str(job_id), offered.size
    RunArtifacts.objects.bulk_create([RunArtifacts(run_id=run_id)], ignore_conflicts=True)
    ProjectArtifacts.objects.bulk_create([ProjectArtifacts(project_id=project_id)], ignore_conflicts=True)
    with transaction.atomic():
        artifact = Artifact.objects.create(
            job_id=job_id, path=offered.path, size=size, sha256=offered.sha256,
            key=f"artifacts/{text[:2]}/{text}/{secrets.token_hex(8)}", content_type=content_type(offered.path),
        )  # fmt: skip
        of_run = RunArtifacts.objects.filter(pk=run_id, files__lt=MOST_FILES)
        if not of_run.filter(bytes__lte=limit_of(ArtifactLeft.RUN_LIMIT) - size).update(
            files=F("files") + 1, bytes=F("bytes") + size
        ):
            raise _Full(ArtifactLeft.RUN_LIMIT if of_run.exists() else ArtifactLeft.TOO_MANY)
        if not ProjectArtifacts.take(project_id, size, limit_of(ArtifactLeft.PROJECT_QUOTA)):
            raise _Full(ArtifactLeft.PROJECT_QUOTA)
    return artifact


def content_type(path: str) -> str:
    return (mimetypes.guess_type(path, strict=True)[0] or BINARY)[:100]


def forget(found: Sequence[Artifact], now: dt.datetime | None) -> int:
    """Remove files, then their rows; returns how many. `now`: since they are old, which runs keep. Repeatable."""
    for artifact in found:
        storage().remove(artifact.key)
    keys = [artifact.key for artifact in found]
    with transaction.atomic():
        rows = Artifact.objects.filter(pk__in=[artifact.pk for artifact in found], key__in=keys)
        locked = rows.select_for_update(of=("self",)).order_by("pk")
        counted = list(locked.values_list("pk", "job__run", "job__run__project", "size"))
        Artifact.objects.filter(pk__in=[pk for pk, *_ in counted]).delete()
        files, freed, of_project = Counter[int](), Counter[int](), Counter[int]()
        for _pk, run_id, project_id, size in counted:
            files[run_id] += 1
            freed[run_id] += size
            of_project[project_id] += size
        for run_id in sorted(files):
            values: dict[str, Any] = {"files": F("files") - files[run_id], "bytes": F("bytes") - freed[run_id]}
            RunArtifacts.objects.filter(pk=run_id).update(**values | ({"removed_at": now} if now else {}))
        ProjectArtifacts.uncount(of_project)
    return len(counted)


def note_left_out(job_id: UUID, left_out: Sequence[Mapping[str, Any]], number: int) -> None:
    """Keep what a job's runner did not send, and why."""
    if number:
        left = {"left_out": [dict(one) for one in left_out[:LISTED]], "number": number}
        Job.objects.filter(pk=job_id).update(artifacts_left=left)


def drop_unfinished(found: Sequence[Artifact]) -> int:
    """Forget files that were begun by runners that are lost, and keep that on their jobs; returns how many."""
    of_job = defaultdict[UUID, list[dict[str, Any]]](list)
    for artifact in found:
        entry = {"path": artifact.path, "why": ArtifactLeft.UNFINISHED.value, "size": artifact.size}
        of_job[artifact.job_id].append(entry)
    for job_id, entries in of_job.items():
        before = Job.objects.values_list("artifacts_left", flat=True).get(pk=job_id)
        known = before.get("left_out", [])
        new = [one for one in entries if one not in known]
        note_left_out(job_id, [*known, *new], before.get("number", 0) + len(new))
    return forget(found, None)


def of_run(run: Run) -> QuerySet[Artifact]:
    """All that are there, of the newest attempt first."""
    there = Artifact.objects.filter(job__run=run, stored_at__isnull=False)
    return there.select_related("job").order_by("-job__attempt", "job__node", "path")


def left_out(run: Run) -> list[Job]:
    """The run's jobs that left files which were not kept, the newest attempt first."""
    return list(run.jobs.exclude(artifacts_left={}).order_by("-attempt", "node"))


def find(run: Run, path: str, node: int, attempt: int | None) -> Artifact:
    """An artifact by its path, of the newest attempt that has it. Raises NotFound."""
    found = of_run(run).filter(path=path, job__node=node)
    if attempt is not None:
        found = found.filter(job__attempt=attempt)
    artifact = found.first()
    if artifact is None:
        raise NotFound(_("run %(run)s has no artifact %(path)s there") % {"run": run.name, "path": repr(path)})
    return artifact


def read(artifact: Artifact, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Its bytes from `start` to `stop`. Raises Gone if they are lost."""
    rest = pieces(storage(), artifact.key, start, artifact.size if stop is None else stop)
    try:
        first = next(rest, b"")
    except Missing:
        raise Gone(_("the bytes of %(path)s are not in the storage any more") % {"path": artifact.path}) from None
    return chain([first], rest)


@dataclass(frozen=True)
class Preview:
    """What a page shows of a file: an image, a table's rows, a text, or nothing of these. `cut`: there is more."""

    image: str = ""
    table: list[list[str]] | None = None
    text: str | None = None
    cut: bool = False


def image_type(data: bytes) -> str:
    """The type of a picture that browsers may show, by its first bytes; empty for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), "")


def image_of(artifact: Artifact) -> str:
    """The type of a picture that pages may show; empty for another file. Raises Gone."""
    return image_type(head(artifact, 16)) if artifact.size <= IMAGE_MAX else ""


def head(artifact: Artifact, size: int) -> bytes:
    """Its first bytes. Raises Gone."""
    return b"".join(read(artifact, 0, min(size, artifact.size)))


def preview(artifact: Artifact) -> Preview:
    """What a page shows of it. Raises Gone."""
    data = head(artifact, TABLE_BYTES)
    if kind := image_type(data):
        return Preview(image=kind) if artifact.size <= IMAGE_MAX else Preview()
    if b"\0" in data[:TEXT_BYTES]:
        return Preview()
    for ending, delimiter in TABLES.items():
        if artifact.path.lower().endswith(ending) and (rows := _rows(data.decode(ENCODING, "replace"), delimiter)):
            shown = [[_short(cell) for cell in row[:COLUMNS]] for row in rows[:ROWS]]
            is_whole = len(data) == artifact.size and shown == rows
            return Preview(table=shown, cut=not is_whole)
    text = without_escapes(data[:TEXT_BYTES].decode(ENCODING, "replace"))
    return Preview(text=text, cut=artifact.size > TEXT_BYTES)


def _rows(text: str, delimiter: str) -> list[list[str]]:
    """The first rows of a table, one more than are shown; none of what is no table."""
    try:
        return list(islice(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), ROWS + 1))
    except csv.Error:
        return []


def _short(cell: str) -> str:
    return cell if len(cell) <= CELL_CHARS else cell[:CELL_CHARS] + "…"
