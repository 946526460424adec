"""The sources of backends' offers: read from the cache, and refreshed in the background with one call for all."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from django.db import connection, transaction
from django.db.models import F
from django.dispatch import Signal
from django.utils import timezone

from dstackweb.backends import registry
from dstackweb.backends.contract import Sourced, SourceFailed, SourceFailure, SourceKey, SourceReading, SourceState
from dstackweb.backends.models import Backend
from dstackweb.lib.models import Sequence
from dstackweb.offers import counts, refusals, single_flight, source_rows, store
from dstackweb.offers.models import SourceRow
from dstackweb.offers.single_flight import Lead
from dstackweb.offers.source_rows import AHEAD, Source

if TYPE_CHECKING:
    from typing_extensions import TypeIs

log = logging.getLogger(__name__)

source_updated = Signal()
"""A source of the backend `backend_id` has a new value."""
change_expected = Signal()
"""A source of the backend `backend_id` will have another value within the next second or so."""
refresh_requested = Signal()
"""A person refreshed the backend `backend_id`."""

IN_USE = dt.timedelta(hours=1)
USE_RECORDED_S = 10.0
"""The least time between two writes of `used_at`."""
FAILS = 3
"""Calls in a row after which a source counts as failing."""
THREADS = 8
TICK_S = 1.0
"""How long a tick waits for its calls. Slower calls continue in the process without it, since its worker may be one of
two."""


_refreshes: dict[tuple[int, SourceKey], Future[None]] = {}


def is_sourced(driver: object) -> TypeIs[Sourced]:
    return hasattr(driver, "fetch") and hasattr(driver, "join")


def failing(now: dt.datetime) -> list[SourceRow]:
    """Of each enabled backend whose sources are in use, the first whose last calls have all failed."""
    rows = SourceRow.objects.filter(failures__gte=FAILS, failed_at__gte=now - IN_USE, backend__enabled=True)
    rows = rows.filter(backend__deleted_at=None).exclude(error=None).select_related("backend").order_by("-pk")
    return list({row.backend_id: row for row in rows}.values())


def read_all(backend: Backend, driver: Sourced, keys: Collection[SourceKey]) -> dict[SourceKey, SourceReading]:
    """The cached data of several sources; also records their use. Never calls the cloud.

    While the cache is down, this process refreshes what it lacks by itself, in the background.
    """
    now = timezone.now()
    rows = source_rows.rows_of(backend)
    _record_use([row for key in keys if (row := rows.get(key)) is not None], now)
    wanted = {key: Source(backend, driver, key) for key in keys}
    found = {key: source.reading(rows.get(key), now) for key, source in wanted.items()}
    if store.is_down():
        for key, source in wanted.items():
            if source.is_due(source.known(rows.get(key)), now):
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
    driver: object = registry.driver(current)
    assert is_sourced(driver)
    source = Source(current, driver, key)
    called = False

    def known() -> SourceReading:
        return source.reading(source.row(), timezone.now())

    def find() -> SourceReading | None:
        row, now = source.row(), timezone.now()
        return None if source.is_due(source.known(row), now, share) else source.reading(row, now)

    def call(lead: Lead) -> SourceReading:
        nonlocal called
        called = True
        _fetch(source, driver, lead)
        return known()

    if (found := find()) is not None:
        return found
    patience_s = wait_s if known().state is SourceState.FAILED else 0.0
    found = single_flight.run(f"source:{backend.pk}:{key.source}:{key.region}", patience_s, find, call)
    if wait_s and not called:
        counts.add(backend.pk, coalesced=1)
    return found or known()


def refresh_now(backend: Backend) -> None:
    """Refresh all of a backend's sources in the background, after the calls that are in progress. Until then the known
    data is served."""

    def publish() -> None:
        store.restamp(source_rows.catalog_name(backend.pk))
        refusals.clear(backend)
        refresh_requested.send_robust(sender=Backend, backend_id=backend.pk)

    with transaction.atomic():
        Backend.objects.filter(pk=backend.pk).update(refresh_generation=F("refresh_generation") + 1)
        # Retry failures at once, since their cause may be fixed; throttled ones, and those of just now, still wait.
        just_now = timezone.now() - dt.timedelta(seconds=source_rows.REFRESH_EVERY_S)
        failed = SourceRow.objects.filter(backend=backend).exclude(failed_at=None).exclude(asked_at__gt=just_now)
        failed.exclude(error__code=SourceFailure.THROTTLED).update(failed_at=None)
        transaction.on_commit(publish)


def invalidate(backend: Backend, key: SourceKey) -> None:
    """Refresh one source within some seconds, because it has just changed; until then the known data is served."""
    rows = SourceRow.objects.filter(backend=backend, source=key.source, region=key.region)
    rows.filter(generation__gte=0).update(generation=source_rows.OUTDATED)


def expect_change(backend: Backend, key: SourceKey) -> None:
    """Refresh one source once it has changed, as it is about to; until then the known data is served."""
    invalidate(backend, key)
    change_expected.send_robust(sender=Backend, backend_id=backend.pk)


def refute(backend: Backend, key: SourceKey) -> None:
    """Trust no reading that has begun by now: an order was refused for lack of room that one of them shows."""
    rows = SourceRow.objects.filter(backend=backend, source=key.source, region=key.region)
    rows.update(refuted_reading=Sequence.current(source_rows.READINGS))


def refresh_due(now: dt.datetime) -> int:
    """Refresh all due sources: never read, refreshed by hand, or in use and about to expire. Returns how many.

    A few threads run them; a slow one is not waited for, and never started twice.
    """
    started: list[Future[None]] = []
    for backend, driver in sourced_backends():
        wanted, rows = driver.wanted(), source_rows.rows_of(backend)
        for key in wanted:
            source, row = Source(backend, driver, key), rows.get(key)
            known = source.known(row)
            in_use = row is not None and row.used_at is not None and abs(now - row.used_at) <= IN_USE
            if source.must_refresh(known, now) or (in_use and source.is_due(known, now, AHEAD)):
                started.append(_start_refresh(backend, key, AHEAD))
        gone = [row.pk for key, row in rows.items() if key not in set(wanted)]
        if gone:
            SourceRow.objects.filter(pk__in=gone).delete()
    wait(started, timeout=TICK_S)
    return len(started)


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


def forget() -> None:
    source_rows.forget()
    _refreshes.clear()


def _record_use(rows: Collection[SourceRow], now: dt.datetime) -> None:
    """Write that they are used, unless that was done just now; rows that are being written are skipped."""
    unrecorded = [
        row.pk for row in rows if row.used_at is None or abs(now - row.used_at) > dt.timedelta(seconds=USE_RECORDED_S)
    ]
    if unrecorded:
        with transaction.atomic():
            free = SourceRow.objects.select_for_update(skip_locked=True).filter(pk__in=unrecorded)
            SourceRow.objects.filter(pk__in=list(free.values_list("pk", flat=True))).update(used_at=now)


def _fetch(source: Source, driver: Sourced, lead: Lead) -> None:
    backend, key = source.backend, source.key
    counts.add(backend.pk, calls=1)
    number = source.note_call(lead)
    try:
        value = store.checked(driver.fetch(key), source.spec.type)
    except SourceFailed as failure:
        source.store_error(lead, {"code": failure.code, **failure.data})
    except Exception as failure:
        log.exception("backend %s: %s %s can't be read", backend.name, key.source, key.region)
        text = f"{type(failure).__name__}: {failure}"
        source.store_error(lead, {"code": SourceFailure.SERVICE_ERROR, "text": text[:1000]})
    else:
        if source.store_value(lead, value, number):
            source_updated.send_robust(sender=Backend, backend_id=backend.pk)


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
