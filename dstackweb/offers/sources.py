"""The sources of backends' offers: read from the cache, and refreshed in the background with one call for all.

A value is stored only if the backend's version and refresh generation are unchanged since the call, and the caller
still holds the lead. A failure is stored beside the last good value, which is served as stale.
"""

from __future__ import annotations

import copy
import datetime as dt
import functools
import logging
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import connection, transaction
from django.db.models import F
from django.dispatch import Signal
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import (
    Sourced,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceReading,
    SourceSpec,
    SourceState,
)
from dstackweb.backends.models import Backend
from dstackweb.offers import counts, freshness, single_flight, store
from dstackweb.offers.models import SourceRow
from dstackweb.offers.single_flight import Lead

if TYPE_CHECKING:
    from typing_extensions import TypeIs

log = logging.getLogger(__name__)

source_updated = Signal()
"""A source of the backend `backend_id` has a new value."""
refresh_requested = Signal()
"""A person refreshed the backend `backend_id`."""

IN_USE = dt.timedelta(hours=1)
USE_RECORDED_S = 10.0
"""The least time between two writes of `used_at`."""
FAILS = 3
"""Calls in a row after which a source counts as failing."""
KEEP_S = 30 * 86400.0
"""How long the last good value of a failing source is served."""
THREADS = 8
TICK_S = 1.0
"""How long a tick waits for its calls. Slower calls continue in the process without it, since its worker may be one of
two."""


@dataclass(frozen=True)
class _LocalValue:
    """A value in this process's memory, with its row as it was."""

    row: SourceRow
    value: Any


_local: store.LocalCache[tuple[int, SourceKey], _LocalValue] = store.LocalCache(512)
_refreshes: dict[tuple[int, SourceKey], Future[None]] = {}


def is_sourced(driver: object) -> TypeIs[Sourced]:
    return hasattr(driver, "fetch") and hasattr(driver, "join")


def failing(now: dt.datetime) -> list[SourceRow]:
    """Of each enabled backend whose sources are in use, the first whose last calls have all failed."""
    rows = SourceRow.objects.filter(failures__gte=FAILS, failed_at__gte=now - IN_USE, backend__enabled=True)
    rows = rows.filter(backend__deleted_at=None).exclude(error=None).select_related("backend").order_by("-pk")
    return list({row.backend_id: row for row in rows}.values())


def catalog_name(backend_id: int) -> str:
    """The name of the stamp of a backend's offers."""
    return f"catalog:{backend_id}"


def read(backend: Backend, key: SourceKey) -> SourceReading:
    return read_all(backend, _sourced(backend), [key])[key]


def read_all(backend: Backend, driver: Sourced, keys: Collection[SourceKey]) -> dict[SourceKey, SourceReading]:
    """The cached data of several sources; also records their use. Never calls the cloud.

    While the cache is down, this process refreshes what it lacks by itself, in the background.
    """
    now = timezone.now()
    rows = _rows(backend)
    _record_use([row for key in keys if (row := rows.get(key)) is not None], now)
    found = {key: _reading(backend, key, rows.get(key), driver.sources[key.source], now) for key in keys}
    if store.is_down():
        for key in keys:
            if freshness.is_due(backend, _known(backend, key, rows.get(key)), driver.sources[key.source], now):
                _start_refresh(backend, key, 1.0)
    return found


def refresh(
    backend: Backend, key: SourceKey, *, share: float = 1.0, wait_s: float = single_flight.WAIT_S
) -> SourceReading:
    """Read a source from the cloud if its data is older than this share of its TTL.

    One caller of all processes does; the others get the known data, and wait only if there is none.
    """
    current = Backend.objects.filter(pk=backend.pk).first()
    if current is None:
        return SourceReading(SourceState.FAILED, error={"code": SourceFailure.DELETED})
    backend, driver = current, _sourced(current)
    spec = driver.sources[key.source]
    called = False

    def known() -> SourceReading:
        return _reading(backend, key, _row(backend, key), spec, timezone.now())

    def find() -> SourceReading | None:
        row = _row(backend, key)
        now = timezone.now()
        if freshness.is_due(backend, _known(backend, key, row), spec, now, share):
            return None
        return _reading(backend, key, row, spec, now)

    def call(lead: Lead) -> SourceReading:
        nonlocal called
        called = True
        _fetch(backend, driver, key, lead)
        return known()

    if (found := find()) is not None:
        return found
    patience_s = wait_s if known().state is SourceState.FAILED else 0.0
    found = single_flight.run(f"source:{backend.pk}:{key.source}:{key.region}", patience_s, find, call)
    if wait_s and not called:
        counts.add(backend.pk, coalesced=1)
    return found or known()


def refresh_now(backend: Backend) -> None:
    """Refresh all of a backend's sources in the background; calls already in progress will not be stored.

    Until then the known data is served as stale.
    """

    def publish() -> None:
        store.restamp(catalog_name(backend.pk))
        refresh_requested.send_robust(sender=Backend, backend_id=backend.pk)

    with transaction.atomic():
        Backend.objects.filter(pk=backend.pk).update(refresh_generation=F("refresh_generation") + 1)
        # Retry failures at once, since their cause may be fixed; throttled ones still wait.
        failed = SourceRow.objects.filter(backend=backend).exclude(failed_at=None)
        failed.exclude(error__code=SourceFailure.THROTTLED).update(failed_at=None)
        transaction.on_commit(publish)


def invalidate(backend: Backend, key: SourceKey) -> None:
    """Refresh one source within some seconds, because it has just changed; until then the known data is served."""
    rows = SourceRow.objects.filter(backend=backend, source=key.source, region=key.region)
    rows.filter(generation__gte=0).update(generation=-1)


def refresh_due(now: dt.datetime) -> int:
    """Refresh all due sources: never read, refreshed by hand, or in use and about to expire. Returns how many.

    A few threads run them; a slow one is not waited for, and never started twice.
    """
    started: list[Future[None]] = []
    for backend, driver in sourced_backends():
        wanted, rows = driver.wanted(), _rows(backend)
        for key in wanted:
            row = rows.get(key)
            known = _known(backend, key, row)
            in_use = row is not None and row.used_at is not None and abs(now - row.used_at) <= IN_USE
            if freshness.must_refresh(backend, known, driver.sources[key.source], now) or (
                in_use and freshness.is_due(backend, known, driver.sources[key.source], now, freshness.AHEAD)
            ):
                started.append(_start_refresh(backend, key, freshness.AHEAD))
        gone = [row.pk for key, row in rows.items() if key not in set(wanted)]
        if gone:
            SourceRow.objects.filter(pk__in=gone).delete()
    wait(started, timeout=TICK_S)
    return len(started)


def is_current(backend: Backend, lead: Lead) -> bool:
    """Whether a call's result may be stored: the backend is unchanged since, and the caller still leads.

    Call it first in the storing transaction: it locks the backend's row.
    """
    current = Backend.objects.select_for_update(no_key=True).filter(pk=backend.pk)
    version = current.values_list("version", "refresh_generation").first()
    return version == (backend.version, backend.refresh_generation) and lead.holds()


def preload(now: dt.datetime) -> None:
    """At the start of a server: count all sources as in use, so that old ones are refreshed."""
    SourceRow.objects.update(used_at=now)


def sourced_backends() -> list[tuple[Backend, Sourced]]:
    found = ((backend, driver_of(backend)) for backend in Backend.objects.filter(enabled=True, kind__in=registry.KINDS))
    return [(backend, driver) for backend, driver in found if driver is not None]


def driver_of(backend: Backend) -> Sourced | None:
    """A backend's driver, if it has sources and its settings are valid."""
    try:
        driver: object = registry.driver(backend)
        if is_sourced(driver):
            driver.wanted()
            return driver
    except Exception as error:
        log.warning("backend %s can't be used: %s: %s", backend.name, type(error).__name__, error)
    return None


def has_sourced_backends() -> bool:
    kinds = [name for name, kind in registry.KINDS.items() if is_sourced(kind.driver_class)]
    return bool(kinds) and Backend.objects.filter(enabled=True, kind__in=kinds).exists()


def drop(backend_id: int) -> None:
    _local.drop(lambda key: key[0] == backend_id)


def objects_of(backend_id: int) -> list[str]:
    stamps = SourceRow.objects.filter(backend=backend_id).exclude(stamp="").values_list("stamp", flat=True)
    return [_object(backend_id, stamp) for stamp in stamps]


def forget() -> None:
    _local.forget()
    _refreshes.clear()


def _sourced(backend: Backend) -> Sourced:
    driver: object = registry.driver(backend)
    if not is_sourced(driver):
        raise TypeError(f"backend {backend.name} has no sources")
    return driver


def _object(backend_id: int, stamp: str) -> str:
    return f"source:{backend_id}:{stamp}"


def _rows(backend: Backend) -> dict[SourceKey, SourceRow]:
    return {SourceKey(row.source, row.region): row for row in SourceRow.objects.filter(backend=backend)}


def _row(backend: Backend, key: SourceKey) -> SourceRow | None:
    return SourceRow.objects.filter(backend=backend, source=key.source, region=key.region).first()


def _known(backend: Backend, key: SourceKey, row: SourceRow | None) -> SourceRow | None:
    """The row that counts: the shared one, or this process's own while the cache is down."""
    if not store.is_down():
        return row
    local = _local.get((backend.pk, key))
    return local.row if local else None


def _record_use(rows: Collection[SourceRow], now: dt.datetime) -> None:
    """Write that they are used, unless that was done just now; rows that are being written are skipped."""
    unrecorded = [
        row.pk for row in rows if row.used_at is None or abs(now - row.used_at) > dt.timedelta(seconds=USE_RECORDED_S)
    ]
    if unrecorded:
        with transaction.atomic():
            free = SourceRow.objects.select_for_update(skip_locked=True).filter(pk__in=unrecorded)
            SourceRow.objects.filter(pk__in=list(free.values_list("pk", flat=True))).update(used_at=now)


def _reading(
    backend: Backend, key: SourceKey, row: SourceRow | None, spec: SourceSpec, now: dt.datetime
) -> SourceReading:
    known = _known(backend, key, row)
    state = freshness.source_state(backend, known, spec, now)
    error = known.error if known is not None and known.digest == freshness.digest(backend, spec) else None
    if known is None or state is SourceState.FAILED:
        return SourceReading(SourceState.FAILED, error=error)
    local = _load(backend, key, known, spec)
    if local is None:
        # A newer value may have replaced it.
        newer = _row(backend, key)
        if newer is not None and newer.stamp and newer.stamp != known.stamp and not store.is_down():
            return _reading(backend, key, newer, spec, now)
        return SourceReading(SourceState.FAILED, error=error)
    return SourceReading(state, local.value, known.fetched_at, error)


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


def _fetch(backend: Backend, driver: Sourced, key: SourceKey, lead: Lead) -> None:
    counts.add(backend.pk, calls=1)
    spec = driver.sources[key.source]
    if lead.holder is not None:
        _write_begin(backend, key, lead)
    try:
        value = store.checked(driver.fetch(key), spec.type)
    except SourceFailed as failure:
        _store_error(backend, key, spec, lead, {"code": failure.code, **failure.data})
    except Exception as failure:
        log.exception("backend %s: %s %s can't be read", backend.name, key.source, key.region)
        text = f"{type(failure).__name__}: {failure}"
        _store_error(backend, key, spec, lead, {"code": SourceFailure.SERVICE_ERROR, "text": text[:1000]})
    else:
        _store_value(backend, key, spec, lead, value)


def _write_begin(backend: Backend, key: SourceKey, lead: Lead) -> None:
    with transaction.atomic():
        if is_current(backend, lead):
            SourceRow.objects.update_or_create(
                backend_id=backend.pk, source=key.source, region=key.region, defaults={"asked_at": timezone.now()}
            )


def _store_value(backend: Backend, key: SourceKey, spec: SourceSpec, lead: Lead, value: Any) -> None:
    stamp, digest = store.new_stamp(), freshness.digest(backend, spec)
    fields: dict[str, Any] = {
        "generation": backend.refresh_generation, "stamp": stamp, "empty": not value, "fetched_at": timezone.now(),
        "error": None, "failed_at": None, "failures": 0,
    }  # fmt: skip
    if lead.holder is None or not store.put(_object(backend.pk, stamp), value, spec.type, KEEP_S):
        row = SourceRow(backend_id=backend.pk, source=key.source, region=key.region, digest=digest, **fields)
        _local.put((backend.pk, key), _LocalValue(row, value))
        store.restamp(catalog_name(backend.pk))
        return
    written = _write_row(backend, key, digest, lead, fields)
    if written is None:
        store.delete(_object(backend.pk, stamp))
        return
    row, old_stamp = written
    _local.put((backend.pk, key), _LocalValue(row, value))
    store.restamp(catalog_name(backend.pk))
    if old_stamp:
        store.delete(_object(backend.pk, old_stamp))
    source_updated.send_robust(sender=Backend, backend_id=backend.pk)


def _store_error(backend: Backend, key: SourceKey, spec: SourceSpec, lead: Lead, error: dict[str, Any]) -> None:
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
    if _write_row(backend, key, digest, lead, fields) is not None:
        store.restamp(catalog_name(backend.pk))


def _write_row(
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


def _start_refresh(backend: Backend, key: SourceKey, share: float) -> Future[None]:
    """Refresh it in a thread of this process, unless one does already."""
    started = _refreshes.get((backend.pk, key))
    if started is None or started.done():
        started = _pool(os.getpid()).submit(_refresh_here, backend, key, share)
        _refreshes[backend.pk, key] = started
    return started


def _refresh_here(backend: Backend, key: SourceKey, share: float) -> None:
    try:
        refresh(backend, key, share=share, wait_s=0.0)
    except Exception:
        log.exception("backend %s: %s %s can't be refreshed", backend.name, key.source, key.region)
    finally:
        counts.flush()
        connection.close()


@functools.lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:
    """The threads of this process; a fork has none of its parent's."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix=f"sources-{pid}")


os.register_at_fork(after_in_child=_refreshes.clear)
