"""The rows of sources: how old each value is and when it is read next; and the values, in the cache and this process.

A value is stored only if the backend's version and refresh generation are unchanged since the call, and the caller
still holds the lead. A failure is stored beside the last good value, which is served as stale.
"""

from __future__ import annotations

import copy
import datetime as dt
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from dstackweb.backends.contract import Sourced, SourceFailure, SourceKey, SourceReading, SourceSpec, SourceState
from dstackweb.backends.models import Backend
from dstackweb.offers import counts, store
from dstackweb.offers.models import SourceRow
from dstackweb.offers.single_flight import Lead

EMPTY_TTL_S = 10.0
AHEAD = 0.8
"""The share of its TTL after which a source in use is refreshed, so that it never becomes stale."""
SKEW = dt.timedelta(seconds=5)
"""Clocks of two machines differ by less: a value from later in the future is older than a clock change."""
ASKED_MOST = dt.timedelta(minutes=5)
"""A call that took longer was lost with its process."""
RETRY_S, RETRY_MOST_S = 10.0, 300.0
"""The pause after a failure, doubled with each further one."""

_S = dt.timedelta(seconds=1)
KEEP_S = 30 * 86400.0
"""How long the last good value of a failing source is served."""


@dataclass(frozen=True)
class Freshness:
    """One source in one region. `due_at` is its next read if in use; None: due now.

    `asked_at` is when the call that is under way began; None: there is none.
    """

    backend: str
    kind: str
    source: str
    region: str
    state: SourceState
    fetched_at: dt.datetime | None
    expires_at: dt.datetime | None
    due_at: dt.datetime | None
    error: dict[str, Any] | None
    failed_at: dt.datetime | None
    asked_at: dt.datetime | None = None


def digest(backend: Backend, spec: SourceSpec) -> str:
    """Of the secret and the settings that a source depends on: values of another digest are not the backend's."""
    settings = {name: backend.config.get(name) for name in spec.settings} if spec.settings else backend.config
    text = json.dumps([backend.kind, backend.secret, settings], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def expires_at(row: SourceRow, ttl_s: float) -> dt.datetime | None:
    """Until when its value is fresh."""
    if row.fetched_at is None:
        return None
    return row.fetched_at + min(ttl_s, EMPTY_TTL_S if row.empty else ttl_s) * _S


def source_state(backend: Backend, row: SourceRow | None, spec: SourceSpec, now: dt.datetime) -> SourceState:
    if row is None or not row.stamp or row.digest != digest(backend, spec):
        return SourceState.FAILED
    if row.error is not None or is_due(backend, row, spec, now):
        return SourceState.STALE
    return SourceState.FRESH


def is_due(backend: Backend, row: SourceRow | None, spec: SourceSpec, now: dt.datetime, share: float = 1.0) -> bool:
    """Whether to refresh a source: it must be, or is older than this share of its TTL, and did not just fail."""
    if must_refresh(backend, row, spec, now):
        return True
    assert row is not None
    if _is_backing_off(backend, row, spec, now):
        return False
    until = expires_at(row, spec.ttl_s * share)
    assert row.fetched_at is not None
    assert until is not None
    return now >= until or row.fetched_at > now + SKEW or row.error is not None


def retry_at(row: SourceRow) -> dt.datetime | None:
    """The next try of a failed source; throttled ones have a time in their error."""
    if row.failed_at is None or row.error is None:
        return None
    if row.error.get("code") == SourceFailure.THROTTLED:
        until = parse_datetime(str(row.error.get("until", "")))
        if until is not None and until.tzinfo is not None:
            return until
    return row.failed_at + min(RETRY_MOST_S, RETRY_S * 2.0 ** min(max(row.failures, 1) - 1, 10)) * _S


def must_refresh(backend: Backend, row: SourceRow | None, spec: SourceSpec, now: dt.datetime) -> bool:
    """Whether to refresh it even if unused: it has no value, or a person refreshed the backend."""
    if row is None:
        return True
    if _is_backing_off(backend, row, spec, now):
        return False
    return not row.stamp or row.digest != digest(backend, spec) or row.generation < backend.refresh_generation


def _is_backing_off(backend: Backend, row: SourceRow, spec: SourceSpec, now: dt.datetime) -> bool:
    """Whether it failed just now, under these settings."""
    until = retry_at(row)
    if until is None or row.digest != digest(backend, spec):
        return False
    return now < until <= now + RETRY_MOST_S * _S


def of_backends(backends: Iterable[tuple[Backend, Sourced]], now: dt.datetime) -> list[Freshness]:
    """All sources of the backends, by backend, source and region; one query."""
    pairs = list(backends)
    rows = {
        (row.backend_id, SourceKey(row.source, row.region)): row
        for row in SourceRow.objects.filter(backend__in=[backend for backend, _ in pairs])
    }
    return [
        _freshness(backend, key, rows.get((backend.pk, key)), driver.sources[key.source], now)
        for backend, driver in pairs
        for key in sorted(driver.wanted())
    ]


def _freshness(
    backend: Backend, key: SourceKey, row: SourceRow | None, spec: SourceSpec, now: dt.datetime
) -> Freshness:
    state = source_state(backend, row, spec, now)
    asked_at = _asked_at(row, now)
    if row is None or row.digest != digest(backend, spec):
        return Freshness(backend.name, backend.kind, *key, state, None, None, None, None, None, asked_at)
    is_known = state is not SourceState.FAILED
    until = expires_at(row, spec.ttl_s) if is_known else None
    due_at = retry_at(row) or (expires_at(row, spec.ttl_s * AHEAD) if is_known else None)
    if due_at is not None and (due_at <= now or is_due(backend, row, spec, now)):
        due_at = None
    fetched_at = row.fetched_at if is_known else None
    name, kind, error, failed_at = backend.name, backend.kind, row.error, row.failed_at
    return Freshness(name, kind, *key, state, fetched_at, until, due_at, error, failed_at, asked_at)


def _asked_at(row: SourceRow | None, now: dt.datetime) -> dt.datetime | None:
    """When the call began that has not ended yet."""
    if row is None or row.asked_at is None or abs(now - row.asked_at) > ASKED_MOST:
        return None
    ended = [at for at in (row.fetched_at, row.failed_at) if at is not None]
    return row.asked_at if all(at < row.asked_at for at in ended) else None


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
    state = source_state(backend, known, spec, now)
    error = known.error if known is not None and known.digest == digest(backend, spec) else None
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
    stamp = store.new_stamp()
    fields: dict[str, Any] = {
        "generation": backend.refresh_generation, "stamp": stamp, "empty": not value, "fetched_at": timezone.now(),
        "error": None, "failed_at": None, "failures": 0,
    }  # fmt: skip
    if lead.holder is None or not store.put(_object(backend.pk, stamp), value, spec.type, KEEP_S):
        row = _row(backend, key, spec, **fields)
        _local.put((backend.pk, key), _LocalValue(row, value))
        store.restamp(catalog_name(backend.pk))
        return False
    written = _write(backend, key, spec, lead, fields)
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
    now = timezone.now()
    if lead.holder is None:
        local, row = _local.get((backend.pk, key)), _row(backend, key, spec)
        if local is not None and local.row.digest == row.digest:
            row = copy.copy(local.row)
        row.error, row.failed_at, row.failures = error, now, row.failures + 1
        _local.put((backend.pk, key), _LocalValue(row, local.value if local else None))
        return
    if _write(backend, key, spec, lead, {"error": error, "failed_at": now}) is not None:
        store.restamp(catalog_name(backend.pk))


def _row(backend: Backend, key: SourceKey, spec: SourceSpec, **fields: Any) -> SourceRow:
    """A row of this process alone, while the cache is down."""
    return SourceRow(
        backend_id=backend.pk, source=key.source, region=key.region, digest=digest(backend, spec), **fields
    )


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
    backend: Backend, key: SourceKey, spec: SourceSpec, lead: Lead, fields: dict[str, Any]
) -> tuple[SourceRow, str] | None:
    """Write the result of a call; returns the row with its former stamp, or None if the result is outdated."""
    with transaction.atomic():
        if not is_current(backend, lead):
            return None
        row, _ = SourceRow.objects.get_or_create(backend_id=backend.pk, source=key.source, region=key.region)
        old_stamp = row.stamp
        if row.digest != (current := digest(backend, spec)):
            row.digest, row.generation, row.failures = current, 0, 0
            row.stamp, row.empty, row.fetched_at = "", False, None
        for name, value in fields.items():
            setattr(row, name, value)
        if "stamp" not in fields:
            row.failures += 1
        row.save(update_fields=["digest", "generation", "failures", "stamp", "empty", "fetched_at", *fields])
    return row, old_stamp


def _object(backend_id: int, stamp: str) -> str:
    return f"source:{backend_id}:{stamp}"
