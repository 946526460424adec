"""The log of each job: raw bytes, addressed by offset (docs/design.md, rule 5), within limits of its job and project.

A log that may not grow is cut: a last line says why, what follows is acknowledged and dropped, and the job goes on.
`ProjectLogs` counts each log up to an eighth ahead of its size, so that few appends write a row. The number of line
ends in each block is kept beside it, so that one finds one's way in bounded work.
"""

from __future__ import annotations

import datetime as dt
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from django.conf import settings
from django.db import transaction

from dstackweb.lib.storage import Gap, pieces, storage
from dstackweb.runner.spool import MARK, MOST_MARKS
from dstackweb.runs.codes import LogCut, LogCutData, RunEventKind
from dstackweb.runs.models import Job, ProjectLogs
from dstackweb.runs.transitions import lock_job, record

MARKS = ".marks"
TAIL_SEARCHED = 1 << 20
"""Bytes at the end of a log in which its last lines are looked for; they are read in pieces of this size."""
TAIL_LINE = 512
"""So many bytes for each line where that is more."""
BLOCK = 1 << 18
COUNTED_AT_ONCE = 128
"""Blocks that one request counts at most."""
SEARCHED_AT_ONCE = 64
MATCHES_AT_ONCE = 200
TEXT_MOST = 200
"""The longest text that is searched for, in characters."""
MARKS_MOST = MOST_MARKS * MARK.size
MARKS_AT_ONCE = 1 << 20
SLACK = 4096
"""For the runner's own lines in a log of just the limit."""
STEP = 1 << 14


def log_key(job_id: UUID) -> str:
    text = str(job_id)
    return f"joblogs/{text[:2]}/{text}"


def marks_key(job_id: UUID) -> str:
    """Of the records of when its lines were written (`runner.spool`)."""
    return log_key(job_id) + MARKS


def lines_key(job_id: UUID) -> str:
    """Of the number of line ends in each of its blocks."""
    return f"{log_key(job_id)}.lines"


def append_log(job_id: UUID, offset: int, data: bytes) -> int:
    """Add `data` at `offset`; returns the log's new size. Raises storage.Gap behind its end, and StorageAway."""
    return storage().append(log_key(job_id), offset, data)


def log_size(job_id: UUID) -> int:
    return storage().size(log_key(job_id)) or 0


def read_log(job_id: UUID, offset: int, limit: int) -> bytes:
    """Up to `limit` bytes from `offset`; empty behind the end. Raises storage.Missing and StorageAway."""
    return storage().read(log_key(job_id), offset, limit)


def whole_log(job_id: UUID) -> tuple[int, Iterator[bytes]]:
    size = log_size(job_id)
    return size, pieces(storage(), log_key(job_id), 0, size)


def tail_offset(job_id: UUID, lines: int) -> int:
    """The offset at which the last `lines` lines begin, within a bound (TAIL_SEARCHED)."""
    end = begin = log_size(job_id)
    least = max(0, end - max(TAIL_SEARCHED, lines * TAIL_LINE))
    left = lines  # line ends to find, of which the last one is in front of the tail
    while left and begin > least:
        behind, begin = begin, max(least, begin - TAIL_SEARCHED)
        data = read_log(job_id, begin, behind - begin)
        left += behind == end and data.endswith(b"\n")
        if data.count(b"\n") < left:
            left -= data.count(b"\n")
            continue
        at = len(data)
        for _end in range(left):
            at = data.rfind(b"\n", 0, at)
        return begin + at + 1
    return begin


def remove_log(job_id: UUID) -> None:
    for key in (marks_key(job_id), lines_key(job_id), log_key(job_id)):
        storage().remove(key)


@dataclass(frozen=True)
class Lines:
    """The line ends in blocks from the one asked for on, at a log of `size` bytes. `more`: ask again.

    The last block, which is complete only once there is more behind it, is not among them.
    """

    size: int
    counts: list[int]
    more: bool


def lines(job_id: UUID, first: int) -> Lines:
    """The line ends in blocks from the number `first` on. Raises storage.Missing and StorageAway."""
    key = lines_key(job_id)
    size, known = log_size(job_id), (storage().size(key) or 0) // 4
    blocks = max(0, size - 1) // BLOCK
    if known < blocks:
        until = min(blocks, known + COUNTED_AT_ONCE)
        blocks_read = (read_log(job_id, block * BLOCK, BLOCK) for block in range(known, until))
        counts = array("I", (piece.count(b"\n") for piece in blocks_read))
        try:
            storage().append(key, 4 * known, counts.tobytes())
        except Gap:  # its file was removed with the log meanwhile
            until = known
        known = until
    first = min(first, known)
    found = array("I")
    found.frombytes(storage().read(key, 4 * first, 4 * (known - first)))
    return Lines(size, found.tolist(), first + len(found) < blocks)


@dataclass(frozen=True)
class Matches:
    """Offsets of matches, as far as `following`, None at the end of the log."""

    offsets: list[int]
    following: int | None


def search(job_id: UUID, text: str, start: int) -> Matches:
    """Where `text` occurs from the offset `start` on, in any case for ASCII. Raises storage.Missing and StorageAway."""
    wanted = text[:TEXT_MOST].encode().lower()
    if not wanted:
        return Matches([], None)
    found: list[int] = []
    size = log_size(job_id)
    start = min(start, size)
    for offset, data in _windows(job_id, start, len(wanted) - 1):
        at = data.find(wanted)
        while at >= 0:
            if len(found) == MATCHES_AT_ONCE:
                return Matches(found, offset + at)
            found.append(offset + at)
            at = data.find(wanted, at + len(wanted))
    following = start + SEARCHED_AT_ONCE * BLOCK
    return Matches(found, following if following < size else None)


def _windows(job_id: UUID, start: int, overlap: int) -> Iterator[tuple[int, bytes]]:
    """Pieces of the log in lower case, each with the `overlap` bytes behind it, in which no further match begins."""
    for offset in range(start, start + SEARCHED_AT_ONCE * BLOCK, BLOCK):
        data = read_log(job_id, offset, BLOCK + overlap)
        if not data:
            return
        yield offset, data.lower()


def append_marks(job_id: UUID, offset: int, data: bytes) -> int:
    """Add records of `runner.spool`; returns the size of what is kept, or was dropped behind the limit. Repeatable."""
    if offset + len(data) > MARKS_MOST:
        return offset + len(data)
    try:
        return storage().append(marks_key(job_id), offset, data)
    except Gap as gap:
        return gap.expected


def marks(job_id: UUID, offset: int) -> bytes:
    """Records from a byte offset of theirs on."""
    return storage().read(marks_key(job_id), min(offset, MARKS_MOST), MARKS_AT_ONCE)


@dataclass(frozen=True)
class Appended:
    """`next` is the offset to continue at. `cut`: no more is kept."""

    next: int
    cut: str = ""


class _Full(Exception):
    """The project's quota has no room."""


def counted_for(size: int) -> int:
    """What a log of `size` bytes counts as: a whole number of steps, which are an eighth of it or STEP."""
    step = max(STEP, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def limit_of(cut: LogCut) -> int:
    is_quota = cut is LogCut.PROJECT_QUOTA
    return settings.DSTACKWEB_PROJECT_LOG_GB << 30 if is_quota else settings.DSTACKWEB_LOG_LIMIT_MB << 20


def append(job_id: UUID, offset: int, data: bytes) -> Appended:
    """Add `data` at `offset` as far as limits allow. Repeatable. Raises storage.Gap behind the end, and StorageAway."""
    end = offset + len(data)
    while True:
        project_id, counted, cut, kept = Job.objects.values_list(
            "run__project", "log_counted", "log_cut", "log_size"
        ).get(pk=job_id)
        if cut:
            return Appended(end if data else kept or 0, cut)
        most = limit_of(LogCut.JOB_LIMIT) + SLACK
        if end <= min(counted, most) or not data:
            return Appended(append_log(job_id, offset, data))
        if offset > (size := log_size(job_id)):
            raise Gap(size)
        try:
            if not _count(job_id, project_id, counted, counted_for(min(end, most))):
                continue  # another sender was faster
        except _Full:
            return _cut(job_id, offset, data, counted, LogCut.PROJECT_QUOTA)
        if end > most:
            return _cut(job_id, offset, data, most, LogCut.JOB_LIMIT)


def _count(job_id: UUID, project_id: int, was: int, now: int) -> bool:
    """Count the log as `now` bytes; False if it does not count as `was` any more. Raises _Full."""
    if now <= was:
        return True
    ProjectLogs.objects.bulk_create([ProjectLogs(project_id=project_id)], ignore_conflicts=True)
    with transaction.atomic():
        if not Job.objects.filter(pk=job_id, log_counted=was, log_cut="").update(log_counted=now):
            return False
        if not ProjectLogs.take(project_id, now - was, limit_of(LogCut.PROJECT_QUOTA)):
            raise _Full
    return True


def _cut(job_id: UUID, offset: int, data: bytes, most: int, why: LogCut) -> Appended:
    """Keep what fits into `most` bytes, and say in the log, in the job and in an event why that is all."""
    kept = append_log(job_id, offset, data[: max(0, most - offset)])
    with transaction.atomic():
        job = lock_job(job_id)
        if won := not job.log_cut:
            Job.objects.filter(pk=job_id).update(log_cut=why, log_size=kept)
            facts: LogCutData = {"why": why, "limit": limit_of(why)}
            record(job.run, RunEventKind.LOG_CUT, dict(facts), node=job.node, attempt=job.attempt, is_locked=True)
    if won:
        append_log(job_id, kept, cut_line(why))
    return Appended(offset + len(data), why)


def cut_line(why: LogCut) -> bytes:
    if why is LogCut.PROJECT_QUOTA:
        reached = f"the project's logs have reached their quota of {settings.DSTACKWEB_PROJECT_LOG_GB} GB"
    else:
        reached = f"the log has reached its limit of {settings.DSTACKWEB_LOG_LIMIT_MB} MB"
    return f"\n[dstackweb: {reached}; output from here on is not kept, and the run goes on]\n".encode()


def at_end(job: Job, size: int | None, missing: int) -> tuple[int | None, int]:
    """The size of the job's log, and the bytes missing in it. What a runner had beyond a cut is missing. Repeatable."""
    if not job.log_cut:
        return size, missing
    kept = job.log_size or 0
    return kept, min(missing + max(0, (size or 0) - kept), 2**62)


def forget(job_ids: Sequence[UUID], now: dt.datetime) -> int:
    """The files of these jobs' logs were removed; returns of how many that was new."""
    with transaction.atomic():
        jobs = Job.objects.filter(pk__in=job_ids, log_removed_at=None).select_for_update(of=("self",)).order_by("pk")
        found = list(jobs.values_list("pk", "run__project", "log_counted"))
        freed = Counter[int]()
        for _pk, project_id, counted in found:
            freed[project_id] += counted
        removed = Job.objects.filter(pk__in=[pk for pk, *_ in found]).update(log_removed_at=now, log_counted=0)
        ProjectLogs.uncount(freed)
    return removed
