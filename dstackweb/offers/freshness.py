"""The age of each source and when it is read next: from its row and the time alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.utils.dateparse import parse_datetime

from dstackweb.backends.contract import Sourced, SourceFailure, SourceKey, SourceState
from dstackweb.backends.models import Backend
from dstackweb.offers.models import SourceRow


@dataclass(frozen=True)
class Freshness:
    """One source in one region. `due_at` is its next read if in use; None: due now."""

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


EMPTY_TTL_S = 10.0
AHEAD = 0.8
"""The share of its TTL after which a source in use is refreshed, so that it never becomes stale."""
SKEW = dt.timedelta(seconds=5)
"""Clocks of two machines differ by less: a value from later in the future is older than a clock change."""
RETRY_S, RETRY_MOST_S = 10.0, 300.0
"""The pause after a failure, doubled with each further one."""

_S = dt.timedelta(seconds=1)


def expires_at(row: SourceRow, ttl_s: float) -> dt.datetime | None:
    """Until when its value is fresh."""
    if row.fetched_at is None:
        return None
    return row.fetched_at + min(ttl_s, EMPTY_TTL_S if row.empty else ttl_s) * _S


def source_state(backend: Backend, row: SourceRow | None, ttl_s: float, now: dt.datetime) -> SourceState:
    if row is None or not row.stamp or row.version != backend.version:
        return SourceState.FAILED
    if row.error is not None or is_due(backend, row, ttl_s, now):
        return SourceState.STALE
    return SourceState.FRESH


def is_due(backend: Backend, row: SourceRow | None, ttl_s: float, now: dt.datetime, share: float = 1.0) -> bool:
    """Whether to refresh a source: it must be, or is older than this share of its TTL, and did not just fail."""
    if must_refresh(backend, row, now):
        return True
    assert row is not None
    if _is_backing_off(backend, row, now):
        return False
    until = expires_at(row, ttl_s * share)
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


def must_refresh(backend: Backend, row: SourceRow | None, now: dt.datetime) -> bool:
    """Whether to refresh it even if unused: it has no value, or a person refreshed the backend."""
    if row is None:
        return True
    if _is_backing_off(backend, row, now):
        return False
    return not row.stamp or row.version != backend.version or row.generation < backend.refresh_generation


def _is_backing_off(backend: Backend, row: SourceRow, now: dt.datetime) -> bool:
    """Whether it failed just now, under this version."""
    until = retry_at(row)
    if until is None or row.version != backend.version:
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
        _freshness(backend, key, rows.get((backend.pk, key)), driver.sources[key.source].ttl_s, now)
        for backend, driver in pairs
        for key in sorted(driver.wanted())
    ]


def _freshness(backend: Backend, key: SourceKey, row: SourceRow | None, ttl_s: float, now: dt.datetime) -> Freshness:
    state = source_state(backend, row, ttl_s, now)
    if row is None or row.version != backend.version:
        return Freshness(backend.name, backend.kind, *key, state, None, None, None, None, None)
    is_known = state is not SourceState.FAILED
    until = expires_at(row, ttl_s) if is_known else None
    due_at = retry_at(row) or (expires_at(row, ttl_s * AHEAD) if is_known else None)
    if due_at is not None and (due_at <= now or is_due(backend, row, ttl_s, now)):
        due_at = None
    fetched_at = row.fetched_at if is_known else None
    return Freshness(backend.name, backend.kind, *key, state, fetched_at, until, due_at, row.error, row.failed_at)
