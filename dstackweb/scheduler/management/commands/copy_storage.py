"""`dstackweb-server copy_storage FROM`: copy logs, code and artifacts to where DSTACKWEB_STORAGE says now.

FROM is a value of DSTACKWEB_STORAGE, or `home` for DSTACKWEB_HOME. What is there already stays. It may be repeated
after an interruption.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from dstackweb.lib.storage import Storage, pieces, storage, storage_at
from dstackweb.runs import logs
from dstackweb.runs.models import Archive, Artifact, Job


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("source", metavar="FROM", help="home, database, file:///folder or s3://bucket/prefix")

    def handle(self, *args: Any, **options: Any) -> None:
        url = "" if options["source"] == "home" else options["source"]
        source, target = storage_at(url, settings.DSTACKWEB_HOME), storage()
        if source is target:
            raise CommandError("FROM is where all is kept now. Set DSTACKWEB_STORAGE to the new place.")
        copied = missing = 0
        for key in _keys():
            size = source.size(key)
            missing += size is None and target.size(key) is None and not key.endswith(logs.MARKS)
            copied += size is not None and _copy(source, target, key, size)
        self.stdout.write(f"{copied} files copied; {missing} are in neither place. The originals were left.")


def _keys() -> Iterator[str]:
    """All files that rows speak of."""
    for job_id in Job.objects.filter(log_removed_at=None).order_by("pk").values_list("pk", flat=True).iterator():
        yield logs.log_key(job_id)
        yield logs.marks_key(job_id)
    yield from Archive.objects.filter(removed_at=None).order_by("pk").values_list("key", flat=True).iterator()
    yield from Artifact.objects.order_by("pk").values_list("key", flat=True).iterator()


def _copy(source: Storage, target: Storage, key: str, size: int) -> bool:
    """Add what is missing at the end; False if nothing is."""
    start = target.size(key)
    if start is not None and start >= size:
        return False
    at = start or 0
    for piece in pieces(source, key, at, size) if size else [b""]:
        at = target.append(key, at, piece)
    return True
