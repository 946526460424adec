"""The cache of a deployment without Redis: plain data as JSON in rows of the database.

Django's own database cache unpickles what it reads, so anyone who can write a row could run code.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from dstackweb.lib import sql
from dstackweb.lib.models import CacheRow

_CURRENT = f"SELECT value FROM {CacheRow._meta.db_table} WHERE key = %s AND (expires_at IS NULL OR expires_at > %s)"
"""Through the ORM a hit takes nine times as long, and there are many a second."""


class RowCache(BaseCache):
    """A cache backend of Django; caches of different KEY_PREFIX share the table. Housekeeping deletes expired rows."""

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(params)

    def get(self, key: str, default: Any = None, version: int | None = None) -> Any:
        """Raises ValueError for a value that is no JSON."""
        found = sql.rows(_CURRENT, [self._row(key, version), timezone.now()])
        return json.loads(found[0][0]) if found else default

    def set(self, key: str, value: Any, timeout: float | None = DEFAULT_TIMEOUT, version: int | None = None) -> None:
        """`value` must be JSON data. Raises TypeError."""
        row = CacheRow(key=self._row(key, version), value=json.dumps(value), expires_at=self._expiry(timeout))
        with transaction.atomic():
            CacheRow.objects.bulk_create(
                [row], update_conflicts=True, unique_fields=["key"], update_fields=["value", "expires_at"]
            )

    def add(self, key: str, value: Any, timeout: float | None = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        """Among several processes the first one's value counts."""
        name, text = self._row(key, version), json.dumps(value)
        with transaction.atomic():
            CacheRow.expired().filter(pk=name).delete()
            defaults = {"value": text, "expires_at": self._expiry(timeout)}
            _row, is_new = CacheRow.objects.get_or_create(pk=name, defaults=defaults)
        return is_new

    def touch(self, key: str, timeout: float | None = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        current = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
        row = CacheRow.objects.filter(current, pk=self._row(key, version))
        return bool(row.update(expires_at=self._expiry(timeout)))

    def delete(self, key: str, version: int | None = None) -> bool:
        deleted, _ = CacheRow.objects.filter(pk=self._row(key, version)).delete()
        return bool(deleted)

    def clear(self) -> None:
        CacheRow.objects.filter(pk__startswith=f"{self.key_prefix}:").delete()

    def _row(self, key: str, version: int | None) -> str:
        return self.make_and_validate_key(key, version=version)

    def _expiry(self, timeout: float | None) -> dt.datetime | None:
        seconds = self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
        return None if seconds is None else timezone.now() + dt.timedelta(seconds=seconds)
