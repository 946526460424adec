"""How old each source of a backend's offers is, from rows alone: for pages, API and command line."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dstackweb.backends.contract import Sourced, SourceKey, SourceState
from dstackweb.backends.models import Backend
from dstackweb.offers import age
from dstackweb.offers.models import SourceRow


@dataclass(frozen=True)
class Freshness:
    """One source in one region. `due_at` is when it is read next, if it is in use; None: it is due now."""

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


def of_backends(backends: Iterable[tuple[Backend, Sourced]], now: dt.datetime) -> list[Freshness]:
    """Every source that the backends ask for, by backend, source and region; one query."""
    asked = list(backends)
    rows = {
        (row.backend_id, SourceKey(row.source, row.region)): row
        for row in SourceRow.objects.filter(backend__in=[backend for backend, _ in asked])
    }
    return [
        _freshness(backend, key, rows.get((backend.pk, key)), driver.sources[key.source], now)
        for backend, driver in asked
        for key in sorted(driver.wanted())
    ]


def _freshness(backend: Backend, key: SourceKey, row: SourceRow | None, ttl_s: float, now: dt.datetime) -> Freshness:
    state = age.state_of(backend, row, ttl_s, now)
    if row is None or row.version != backend.version:
        return Freshness(backend.name, backend.kind, *key, state, None, None, None, None, None)
    is_known = state is not SourceState.FAILED
    until = age.expires_at(row, ttl_s) if is_known else None
    due_at = age.retry_at(row) or (age.expires_at(row, ttl_s * age.AHEAD) if is_known else None)
    if due_at is not None and (due_at <= now or age.is_due(backend, row, ttl_s, now)):
        due_at = None
    fetched_at = row.fetched_at if is_known else None
    return Freshness(backend.name, backend.kind, *key, state, fetched_at, until, due_at, row.error, row.failed_at)
