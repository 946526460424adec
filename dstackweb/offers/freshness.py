"""The age of each source and when it is read next: from its row and the time alone."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.utils.dateparse import parse_datetime

from dstackweb.backends.contract import Sourced, SourceFailure, SourceKey, SourceSpec, SourceState
from dstackweb.backends.models import Backend
from dstackweb.offers.models import SourceRow


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
