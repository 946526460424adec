"""Files as rows of the database: `StoredFile` has the size, and `StoredPart` the bytes.

What is appended becomes a row of its own, and is soon put together with its neighbours to parts of a MiB.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from django.db import transaction
from django.db.models import Max, Q, Sum
from django.utils import timezone

from dstackweb.lib.models import StoredFile, StoredPart
from dstackweb.lib.storage import Gap, Storage

PART = 1 << 20
SETTLED_AFTER = dt.timedelta(minutes=10)
"""Small parts are put together once there is a whole one, or nothing was appended for this long."""
AT_ONCE = 50
SECONDS = 5.0


class RowStorage(Storage):
    def append(self, key: str, offset: int, data: bytes) -> int:
        """As Storage.append. The file's row orders senders: one of two at once finds that it has grown."""
        while True:
            end = self.size(key)
            if end is None:
                StoredFile.objects.bulk_create([StoredFile(key=key)], ignore_conflicts=True)
                continue
            if offset > end:
                raise Gap(end)
            rest = data[end - offset :]
            if not rest:
                return end
            with transaction.atomic():
                if StoredFile.objects.filter(key=key, size=end).update(size=end + len(rest)):
                    file = StoredFile.objects.only("pk").get(key=key)
                    StoredPart.objects.create(file=file, offset=end, end=end + len(rest), data=rest)
                    return end + len(rest)

    def put(self, key: str, path: Path) -> None:
        with path.open("rb") as source, transaction.atomic():
            file = StoredFile.objects.create(key=key, size=path.stat().st_size)
            self._put_parts(file, source)

    def _put_parts(self, file: StoredFile, source: BinaryIO) -> None:
        offset = 0
        while data := source.read(PART):
            end = offset + len(data)
            StoredPart.objects.create(file=file, offset=offset, end=end, data=data, settled=True)
            offset = end

    def size(self, key: str) -> int | None:
        return StoredFile.objects.filter(key=key).values_list("size", flat=True).first()

    def read(self, key: str, offset: int, limit: int) -> bytes:
        """As Storage.read. One statement finds all parts: none is lost to `settle` between two of them."""
        stop = offset + limit
        parts = StoredPart.objects.filter(file__key=key, offset__lt=stop, end__gt=offset).order_by("offset")
        return b"".join(self._bytes(key, part, max(0, offset - part.offset), stop - part.offset) for part in parts)

    def _bytes(self, key: str, part: StoredPart, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, counted in the part."""
        return bytes(part.data or b"")[start:stop]

    def remove(self, key: str) -> None:
        StoredFile.objects.filter(key=key).delete()

    def settle(self) -> bool:
        ends = time.monotonic() + SECONDS
        loose = StoredPart.objects.filter(settled=False).values("file").order_by()
        sums = loose.annotate(bytes=Sum("end") - Sum("offset"), newest=Max("at"))
        ready = sums.filter(Q(bytes__gte=PART) | Q(newest__lt=timezone.now() - SETTLED_AFTER))
        found = list(ready.values_list("file", flat=True)[:AT_ONCE])
        for file in StoredFile.objects.filter(pk__in=found):
            while time.monotonic() < ends and self._settle_next(file):
                pass
        return len(found) < AT_ONCE and time.monotonic() < ends

    def _settle_next(self, file: StoredFile) -> bool:
        """Put the next small parts together: to a whole one, or to a shorter one if they are old. False if not.

        Where another process did the same meanwhile, its work stays.
        """
        loose: list[StoredPart] = []
        for part in file.parts.filter(settled=False).order_by("offset").iterator(chunk_size=100):
            loose.append(part)
            if part.end - loose[0].offset >= PART:
                break
        if not loose or (loose[-1].end - loose[0].offset < PART and not loose[-1].at < timezone.now() - SETTLED_AFTER):
            return False
        data = b"".join(bytes(part.data or b"") for part in loose)
        whole = self._settled(file, loose[0].offset, data)
        with transaction.atomic():
            if _delete(loose) < len(loose):
                transaction.set_rollback(True)
            else:
                whole.save()
        return True

    def _settled(self, file: StoredFile, offset: int, data: bytes) -> StoredPart:
        """The part that small ones become, not saved yet."""
        return StoredPart(file=file, offset=offset, end=offset + len(data), data=data, settled=True)


def _delete(parts: Sequence[StoredPart]) -> int:
    return StoredPart.objects.filter(pk__in=[part.pk for part in parts], settled=False).delete()[0]
