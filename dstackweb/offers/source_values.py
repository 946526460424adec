"""The values of sources: rows with their age, their objects in the cache, and this process's own copies.

A value is stored only if the backend's version and refresh generation are unchanged since the call, and the caller
still holds the lead. A failure is stored beside the last good value, which is served as stale.
"""

from __future__ import annotations

import copy
import datetime as dt
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.utils import timezone

from dstackweb.backends.contract import SourceFailure, SourceKey, SourceReading, SourceSpec, SourceState
from dstackweb.backends.models import Backend
from dstackweb.offers import counts, freshness, store
from dstackweb.offers.models import SourceRow
from dstackweb.offers.single_flight import Lead

KEEP_S = 30 * 86400.0
"""How long the last good value of a failing source is served."""


@dataclass(frozen=True)
class _LocalValue:
    """A value in this process's memory, with its row as it was."""

    row: SourceRow
    value: Any


_local: store.LocalCache[tuple[int, SourceKey], _LocalValue] = store.LocalCache(512)


def catalog_name(backend_id: int) -> str:
    """The name of the stamp of a backend's offers."""
    return f"catalog:{backend_id}"


def reading(
    backend: Backend, key: SourceKey, row: SourceRow | None, spec: SourceSpec, now: dt.datetime
) -> SourceReading:
    """What is known of a source, with its age and the last failure; never asks the backend."""
    known = known_row(backend, key, row)
    state = freshness.source_state(backend, known, spec, now)
    error = known.error if known is not None and known.digest == freshness.digest(backend, spec) else None
    if known is None or state is SourceState.FAILED:
        return SourceReading(SourceState.FAILED, error=error)
    local = _load(backend, key, known, spec)
    if local is None:
        # A newer value may have replaced it.
        newer = row_of(backend, key)
        if newer is not None and newer.stamp and newer.stamp != known.stamp and not store.is_down():
            return reading(backend, key, newer, spec, now)
        return SourceReading(SourceState.FAILED, error=error)
    return SourceReading(state, local.value, known.fetched_at, error)


def rows_of(backend: Backend) -> dict[SourceKey, SourceRow]:
    return {SourceKey(row.source, row.region): row for row in SourceRow.objects.filter(backend=backend)}


def row_of(backend: Backend, key: SourceKey) -> SourceRow | None:
    return SourceRow.objects.filter(backend=backend, source=key.source, region=key.region).first()


def known_row(backend: Backend, key: SourceKey, row: SourceRow | None) -> SourceRow | None:
    """The row that counts: the shared one, or this process's own while the cache is down."""
    if not store.is_down():
        return row
    local = _local.get((backend.pk, key))
    return local.row if local else None


def is_current(backend: Backend, lead: Lead) -> bool:
    """Whether a call's result may be stored: the backend is unchanged since, and the caller still leads.

    Call it first in the storing transaction: it locks the backend's row.
    """
    current = Backend.objects.select_for_update(no_key=True).filter(pk=backend.pk)
    version = current.values_list("version", "refresh_generation").first()
    return version == (backend.version, backend.refresh_generation) and lead.holds()


def note_call(backend: Backend, key: SourceKey, lead: Lead) -> None:
    """Note that a call begins."""
    with transaction.atomic():
        if is_current(backend, lead):
            SourceRow.objects.update_or_create(
                backend_id=backend.pk, source=key.source, region=key.region, defaults={"asked_at": timezone.now()}
            )


def store_value(backend: Backend, key: SourceKey, spec: SourceSpec, lead: Lead, value: Any) -> bool:
    """Store what a call returned; whether it is the shared value now."""
    stamp, digest = store.new_stamp(), freshness.digest(backend, spec)
    fields: dict[str, Any] = {
        "generation": backend.refresh_generation, "stamp": stamp, "empty": not value, "fetched_at": timezone.now(),
        "error": None, "failed_at": None, "failures": 0,
    }  # fmt: skip
    if lead.holder is None or not store.put(_object(backend.pk, stamp), value, spec.type, KEEP_S):
        row = SourceRow(backend_id=backend.pk, source=key.source, region=key.region, digest=digest, **fields)
        _local.put((backend.pk, key), _LocalValue(row, value))
        store.restamp(catalog_name(backend.pk))
        return False
    written = _write(backend, key, digest, lead, fields)
    if written is None:
        store.delete(_object(backend.pk, stamp))
        return False
    row, old_stamp = written
    _local.put((backend.pk, key), _LocalValue(row, value))
    store.restamp(catalog_name(backend.pk))
    if old_stamp:
        store.delete(_object(backend.pk, old_stamp))
    return True


def store_error(backend: Backend, key: SourceKey, spec: SourceSpec, lead: Lead, error: dict[str, Any]) -> None:
    """Store why a call failed, beside the last good value."""
    counts.add(backend.pk, failures=1, throttles=int(error["code"] == SourceFailure.THROTTLED))
    now, digest = timezone.now(), freshness.digest(backend, spec)
    fields = {"error": error, "failed_at": now}
    if lead.holder is None:
        local = _local.get((backend.pk, key))
        row = SourceRow(backend_id=backend.pk, source=key.source, region=key.region, digest=digest)
        if local is not None and local.row.digest == digest:
            row = copy.copy(local.row)
        row.error, row.failed_at, row.failures = error, now, row.failures + 1
        _local.put((backend.pk, key), _LocalValue(row, local.value if local else None))
        return
    if _write(backend, key, digest, lead, fields) is not None:
        store.restamp(catalog_name(backend.pk))


def drop(backend_id: int) -> None:
    """Drop this process's copies of a backend's values."""
    _local.drop(lambda key: key[0] == backend_id)


def objects_of(backend_id: int) -> list[str]:
    """The names in the cache of a backend's values."""
    stamps = SourceRow.objects.filter(backend=backend_id).exclude(stamp="").values_list("stamp", flat=True)
    return [_object(backend_id, stamp) for stamp in stamps]


def forget() -> None:
    """Drop all of this process's copies."""
    _local.forget()


def _load(backend: Backend, key: SourceKey, row: SourceRow, spec: SourceSpec) -> _LocalValue | None:
    """The value of a row, from this process or the cache. A lost value is recorded in the row."""
    local = _local.get((backend.pk, key))
    if local is not None and local.row.stamp == row.stamp:
        return local
    found = store.get(_object(backend.pk, row.stamp), spec.type)
    if found is not None:
        local = _LocalValue(row, found)
        _local.put((backend.pk, key), local)
        return local
    if not store.is_down():
        SourceRow.objects.filter(pk=row.pk, stamp=row.stamp).update(stamp="")
    return None


def _write(
    backend: Backend, key: SourceKey, digest: str, lead: Lead, fields: dict[str, Any]
) -> tuple[SourceRow, str] | None:
    """Write the result of a call; returns the row with its former stamp, or None if the result is outdated."""
    with transaction.atomic():
        if not is_current(backend, lead):
            return None
        row, _ = SourceRow.objects.get_or_create(backend_id=backend.pk, source=key.source, region=key.region)
        old_stamp = row.stamp
        if row.digest != digest:
            row.digest, row.generation, row.failures = digest, 0, 0
            row.stamp, row.empty, row.fetched_at = "", False, None
        for name, value in fields.items():
            setattr(row, name, value)
        if "stamp" not in fields:
            row.failures += 1
        row.save(update_fields=["digest", "generation", "failures", "stamp", "empty", "fetched_at", *fields])
    return row, old_stamp


def _object(backend_id: int, stamp: str) -> str:
    return f"source:{backend_id}:{stamp}"
