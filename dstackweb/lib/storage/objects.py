"""Files in S3-compatible object storage. What is appended waits in rows until there is a MiB of it, or it is old.

So a request that appends never waits for the network, and an object is never changed: `KEY/OFFSET-END`. An object
without a row was written by a process that was killed before it could say so, and goes with the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from django.db import transaction

from dstackweb.lib.models import StoredFile, StoredPart
from dstackweb.lib.storage import Missing, StorageAway
from dstackweb.lib.storage.rows import RowStorage

ABSENT = {"NoSuchKey", "404", "NotFound"}
PATIENCE = Config(connect_timeout=3, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 2})


class ObjectStorage(RowStorage):
    """`s3://bucket/prefix?endpoint_url=https://…&region_name=…`, with boto3's usual ways to find credentials."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.bucket, self.prefix = parts.netloc, parts.path.strip("/")
        options: dict[str, Any] = dict(parse_qsl(parts.query))
        self._s3: Any = boto3.Session().client("s3", config=PATIENCE, **options)

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}".lstrip("/")

    @contextlib.contextmanager
    def _explained(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError, boto3.exceptions.Boto3Error) as error:
            if name and isinstance(error, ClientError) and error.response["Error"]["Code"] in ABSENT:
                raise Missing(name) from error
            raise StorageAway(f"the bucket {self.bucket} does not answer as it should: {error}") from error

    def put(self, key: str, path: Path) -> None:
        size = path.stat().st_size
        name = self._name(f"{key}/0-{size}")
        with self._explained():
            self._s3.upload_file(str(path), self.bucket, name)
        with transaction.atomic():
            file = StoredFile.objects.create(key=key, size=size)
            StoredPart.objects.create(file=file, offset=0, end=size, object=name, settled=True)

    def is_whole(self, key: str) -> bool:
        if self.size(key) is None:
            return False
        names = StoredPart.objects.filter(file__key=key).exclude(object="").values_list("object", flat=True)
        try:
            for name in names:
                with self._explained(name):
                    self._s3.head_object(Bucket=self.bucket, Key=name)
        except Missing:
            return False
        return True

    def _bytes(self, key: str, part: StoredPart, start: int, stop: int) -> bytes:
        if not part.object:
            return super()._bytes(key, part, start, stop)
        last = min(stop, part.end - part.offset) - 1
        with self._explained(part.object):
            answer = self._s3.get_object(Bucket=self.bucket, Key=part.object, Range=f"bytes={start}-{last}")
            data: bytes = answer["Body"].read()
        return data

    def remove(self, key: str) -> None:
        with self._explained():
            for page in self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self._name(f"{key}/")
            ):
                for found in page.get("Contents", ()):
                    self._s3.delete_object(Bucket=self.bucket, Key=found["Key"])
        super().remove(key)

    def _settled(self, file: StoredFile, offset: int, data: bytes) -> StoredPart:
        end = offset + len(data)
        name = self._name(f"{file.key}/{offset}-{end}")
        with self._explained():
            self._s3.put_object(Bucket=self.bucket, Key=name, Body=data)
        return StoredPart(file=file, offset=offset, end=end, object=name, settled=True)

    def check(self) -> None:
        with self._explained():
            self._s3.head_bucket(Bucket=self.bucket)
