"""The rows of sources: the age of each value, and when it is read next; and the values, in the cache and this process.
A failure is stored beside the last good value, which is served as stale."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from dstackweb.backends.contract import (
    Hidden,
    Offer,
    OfferPart,
    Sourced,
    SourceFailure,
    SourceKey,
    SourceReading,
    SourceSpec,
    SourceState,
)
from dstackweb.backends.models import Backend
from dstackweb.lib.models import Sequence
from dstackweb.offers import counts, store
from dstackweb.offers.models import SourceRow
from dstackweb.offers.single_flight import Lead

READINGS = "readings"
"""The sequence of the calls that read sources."""
EMPTY_TTL_S = 10.0
AHEAD = 0.8
"""The share of its TTL after which a source in use is refreshed, so that it never becomes stale."""
SKEW = dt.timedelta(seconds=5)
"""Clocks of two machines differ by less: a value from later in the future is older than a clock change."""
ASKED_MOST = dt.timedelta(minutes=5)
"""A call that took longer was lost with its process."""
REFRESH_EVERY_S = 2.0
"""The least time between the beginnings of a call and of the next one for a refresh by hand."""
NO_ANSWER_S = 10.0
"""A call that takes longer is shown as one without an answer."""
OUTDATED = -1
"""The generation of a value that must be read again, even if no person asked for a refresh."""
RETRY_S, RETRY_MOST_S = 10.0, 300.0
"""The pause after a failure, doubled with each further one."""

_S = dt.timedelta(seconds=1)
KEEP_S = 30 * 86400.0
"""How long the last good value of a failing source is served."""


@dataclass(frozen=True)
class Freshness:
    """One source in one region. `due_at` is its next read if in use; None: due now.

    `tells` and `hides` are those of its SourceSpec. `requested`: a refresh by hand is not done yet. `asked_at` is when
    the call that is under way began; None: there is none.
    """

    backend: str
    kind: str
    source: str
    region: str
    state: SourceState
    fetched_at: dt.datetime | None = None
    expires_at: dt.datetime | None = None
    due_at: dt.datetime | None = None
    error: dict[str, Any] | None = None
    failed_at: dt.datetime | None = None
    asked_at: dt.datetime | None = None
    tells: OfferPart = OfferPart.AVAILABILITY
    hides: Hidden = Hidden.ALL
    requested: bool = False


def of_offer(offer: Offer, ages: Iterable[Freshness]) -> list[Freshness]:
    """The sources that tell an offer's price and availability; none for an idle instance, which is known from its
    row."""
    other_pricing = Hidden.ON_DEMAND if offer.spot else Hidden.SPOT
    relevant = (
        age
        for age in ages
        if (age.backend, age.region) == (offer.backend, offer.region)
        and age.tells is not OfferPart.SHAPE
        and age.hides is not other_pricing
        and "instance" not in offer.detail
    )
    return sorted(relevant, key=lambda age: age.tells is not OfferPart.PRICE)


def digest(backend: Backend, spec: SourceSpec) -> str:
    """Of the secret and the settings that a source depends on, and of those that choose a part of it."""
    settings = {name: backend.config.get(name) for name in spec.settings} if spec.settings else backend.config
    choice = {name: backend.config.get(name) for name in spec.choice}
    return _digest([backend.kind, backend.secret, settings]) + _digest(choice)


def _digest(data: Any) -> str:
    """32 characters."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:32]


def expires_at(row: SourceRow, ttl_s: float) -> dt.datetime | None:
    """Until when its value is fresh."""
    if row.fetched_at is None:
        return None
    return row.fetched_at + min(ttl_s, EMPTY_TTL_S if row.empty else ttl_s) * _S


def retry_at(row: SourceRow) -> dt.datetime | None:
    """The next try of a failed source; throttled ones have a time in their error."""
    if row.failed_at is None or row.error is None:
        return None
    if row.error.get("code") == SourceFailure.THROTTLED:
        until = parse_datetime(str(row.error.get("until", "")))
        if until is not None and until.tzinfo is not None:
            return until
    return row.failed_at + min(RETRY_MOST_S, RETRY_S * 2.0 ** min(max(row.failures, 1) - 1, 10)) * _S


def _refresh_at(row: SourceRow) -> dt.datetime | None:
    """The earliest next call for a refresh by hand; None: at once."""
    return None if row.asked_at is None else row.asked_at + REFRESH_EVERY_S * _S


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


class Source:
    """One source of a backend in one region, as the backend is set now. Its row is None until it was read."""

    def __init__(self, backend: Backend, driver: Sourced, key: SourceKey) -> None:
        self.backend, self.key, self.spec = backend, key, driver.sources[key.source]
        self.ttl_s = store.policy(backend.kind, key.source, self.spec.ttl_s)
        self._where: dict[str, Any] = {"backend_id": backend.pk, "source": key.source, "region": key.region}

    @cached_property
    def digest(self) -> str:
        return digest(self.backend, self.spec)

    def row(self) -> SourceRow | None:
        return SourceRow.objects.filter(**self._where).first()

    def known(self, row: SourceRow | None) -> SourceRow | None:
        """The row that counts: the shared one, or this process's own while the cache is down."""
        if not store.is_down():
            return row
        local = _local.get((self.backend.pk, self.key))
        return local.row if local else None

    # Its age, from its row and the time alone.

    def state(self, row: SourceRow | None, now: dt.datetime) -> SourceState:
        """By the age of its value alone: a failed refresh, or one by hand, makes no value older."""
        if row is None or not row.stamp or not self._is_same_source(row):
            return SourceState.FAILED
        until = expires_at(row, self.ttl_s)
        assert row.fetched_at is not None
        assert until is not None
        is_outdated = row.digest != self.digest or row.generation == OUTDATED
        is_young = now < until and row.fetched_at <= now + SKEW
        return SourceState.FRESH if is_young and not is_outdated else SourceState.STALE

    def _is_same_source(self, row: SourceRow) -> bool:
        """Whether its value was read from the same account, if not with the same choice."""
        return row.digest[:32] == self.digest[:32]

    def is_due(self, row: SourceRow | None, now: dt.datetime, share: float = 1.0) -> bool:
        """Whether to refresh it: it must be, or is older than this share of its TTL, and did not just fail."""
        if row is None or self.must_refresh(row, now):
            return True
        if self._is_backing_off(row, now):
            return False
        until = expires_at(row, self.ttl_s * share)
        assert row.fetched_at is not None
        assert until is not None
        return now >= until or row.fetched_at > now + SKEW or row.error is not None

    def must_refresh(self, row: SourceRow | None, now: dt.datetime) -> bool:
        """Whether to refresh it even if unused: it has no value or a refuted one, or a person refreshed the
        backend."""
        if row is None:
            return True
        if self._is_backing_off(row, now):
            return False
        is_refuted = 0 < row.reading <= row.refuted_reading
        if not row.stamp or row.digest != self.digest or row.generation == OUTDATED or is_refuted:
            return True
        until = _refresh_at(row)
        return self._is_requested(row) and (until is None or not now < until <= now + REFRESH_EVERY_S * _S)

    def _is_requested(self, row: SourceRow) -> bool:
        """Whether a person asked for a refresh after the call that read its value began."""
        return row.generation < self.backend.refresh_generation

    def _is_backing_off(self, row: SourceRow, now: dt.datetime) -> bool:
        """Whether it failed just now, under these settings."""
        until = retry_at(row)
        if until is None or row.digest != self.digest:
            return False
        return now < until <= now + RETRY_MOST_S * _S

    def freshness(self, row: SourceRow | None, now: dt.datetime) -> Freshness:
        state, asked_at = self.state(row, now), _asked_at(row, now)
        age = Freshness(
            self.backend.name,
            self.backend.kind,
            *self.key,
            state,
            asked_at=asked_at,
            tells=self.spec.tells,
            hides=self.spec.hides,
            error=self.error(row, now),
        )
        if row is None or not self._is_same_source(row):
            return age
        is_known = state is not SourceState.FAILED
        due_at = retry_at(row) or (expires_at(row, self.ttl_s * AHEAD) if is_known else None)
        is_requested = is_known and self._is_requested(row)
        if is_requested and row.error is None:
            due_at = _refresh_at(row)
        if due_at is not None and (due_at <= now or self.is_due(row, now)):
            due_at = None
        return dataclasses.replace(
            age,
            fetched_at=row.fetched_at if is_known else None,
            expires_at=expires_at(row, self.ttl_s) if is_known else None,
            due_at=due_at,
            failed_at=row.failed_at,
            requested=is_requested,
        )

    def error(self, row: SourceRow | None, now: dt.datetime) -> dict[str, Any] | None:
        """Return why the last call failed, or that the one under way has had no answer for NO_ANSWER_S; else None."""
        asked_at = _asked_at(row, now)
        if asked_at is not None and now - asked_at > NO_ANSWER_S * _S:
            return {"code": SourceFailure.NO_ANSWER, "region": self.key.region, "since": asked_at.isoformat()}
        return row.error if row is not None and row.digest == self.digest else None

    # Its value.

    def reading(self, row: SourceRow | None, now: dt.datetime) -> SourceReading:
        """What is known of it, with its age and the last failure; never asks the backend."""
        known = self.known(row)
        state = self.state(known, now)
        error = self.error(known, now)
        if known is None or state is SourceState.FAILED:
            return SourceReading(SourceState.FAILED, error=error)
        local = self._load(known)
        refuted = row.refuted_reading if row is not None else 0
        if local is None:
            # A newer value may have replaced it.
            newer = self.row()
            if newer is not None and newer.stamp and newer.stamp != known.stamp and not store.is_down():
                return self.reading(newer, now)
            return SourceReading(SourceState.FAILED, error=error)
        return SourceReading(
            state, local.value, known.fetched_at, error, known.reading, is_refuted=0 < known.reading <= refuted
        )

    def _load(self, row: SourceRow) -> _LocalValue | None:
        """The value of a row, from this process or the cache. A lost value is recorded in the row."""
        local = _local.get((self.backend.pk, self.key))
        if local is not None and local.row.stamp == row.stamp:
            return local
        found = store.get(_object(self.backend.pk, row.stamp), self.spec.type)
        if found is not None:
            return self._keep(row, found)
        if not store.is_down():
            SourceRow.objects.filter(pk=row.pk, stamp=row.stamp).update(stamp="")
        return None

    def _keep(self, row: SourceRow, value: Any) -> _LocalValue:
        local = _LocalValue(row, value)
        _local.put((self.backend.pk, self.key), local)
        return local

    def note_call(self, lead: Lead) -> int:
        """Note that a call begins, and return its number."""
        with transaction.atomic():
            if lead.holder is not None and is_current(self.backend, lead):
                SourceRow.objects.update_or_create(**self._where, defaults={"asked_at": timezone.now()})
            return Sequence.advance(READINGS)

    def store_value(self, lead: Lead, value: Any, number: int) -> bool:
        """Store what the call of this number returned; return whether it is the shared value now.

        The first empty answer after one that was not counts as a failure; an empty one after that is stored.
        """
        last = self.known(self.row())
        if not value and last is not None and last.digest == self.digest and last.stamp and not last.empty:
            is_first = (last.error or {}).get("code") != SourceFailure.EMPTIED
            if is_first:
                self.store_error(lead, {"code": SourceFailure.EMPTIED})
                return False
        pk, stamp = self.backend.pk, store.new_stamp()
        fields: dict[str, Any] = {
            "generation": self.backend.refresh_generation, "stamp": stamp, "empty": not value,
            "fetched_at": timezone.now(), "reading": number, "error": None, "failed_at": None, "failures": 0,
        }  # fmt: skip
        if lead.holder is None or not store.put(_object(pk, stamp), value, self.spec.type, KEEP_S):
            self._keep(SourceRow(**self._where, digest=self.digest, refuted_reading=0, **fields), value)
            store.restamp(catalog_name(pk))
            return False
        written = self._write(lead, fields)
        if written is None:
            store.delete(_object(pk, stamp))
            return False
        row, old_stamp = written
        self._keep(row, value)
        store.restamp(catalog_name(pk))
        if old_stamp:
            store.delete(_object(pk, old_stamp))
        return True

    def store_error(self, lead: Lead, error: dict[str, Any]) -> None:
        """Store why a call failed, beside the last good value."""
        counts.add(self.backend.pk, failures=1, throttles=int(error["code"] == SourceFailure.THROTTLED))
        now = timezone.now()
        if lead.holder is None:
            local = _local.get((self.backend.pk, self.key))
            row = SourceRow(**self._where, digest=self.digest, reading=0, refuted_reading=0)
            if local is not None and self._is_same_source(local.row):
                row = copy.copy(local.row)
                self._take_over(row)
            row.error, row.failed_at, row.failures = error, now, row.failures + 1
            self._keep(row, local.value if local else None)
        elif self._write(lead, {"error": error, "failed_at": now}) is not None:
            store.restamp(catalog_name(self.backend.pk))

    def _write(self, lead: Lead, fields: dict[str, Any]) -> tuple[SourceRow, str] | None:
        """Write the result of a call; returns the row with its former stamp, or None if the result is outdated."""
        with transaction.atomic():
            if not is_current(self.backend, lead):
                return None
            row, _ = SourceRow.objects.get_or_create(**self._where)
            old_stamp = row.stamp
            self._take_over(row)
            for name, value in fields.items():
                setattr(row, name, value)
            if "stamp" not in fields:
                row.failures += 1
            row.save(update_fields=["digest", "generation", "failures", "stamp", "empty", "fetched_at", *fields])
        return row, old_stamp

    def _take_over(self, row: SourceRow) -> None:
        """Make a row of other settings one of these: with no value, or an outdated one of another choice."""
        if row.digest == self.digest:
            return
        if not self._is_same_source(row):
            row.stamp, row.empty, row.fetched_at = "", False, None
        row.digest, row.generation, row.failures = self.digest, OUTDATED, 0


def is_current(backend: Backend, lead: Lead) -> bool:
    """Whether a call's result may be stored: the backend is unchanged since, and the caller still leads.

    A refresh by hand that was asked for meanwhile comes after it.

    Call it first in the storing transaction: it locks the backend's row.
    """
    current = Backend.objects.select_for_update(no_key=True).filter(pk=backend.pk)
    return current.filter(version=backend.version).exists() and lead.holds()


def of_backends(backends: Iterable[tuple[Backend, Sourced]], now: dt.datetime) -> list[Freshness]:
    """All sources of the backends, by backend, source and region; one query."""
    pairs = list(backends)
    rows = {
        (row.backend_id, SourceKey(row.source, row.region)): row
        for row in SourceRow.objects.filter(backend__in=[backend for backend, _ in pairs])
    }
    return [
        Source(backend, driver, key).freshness(rows.get((backend.pk, key)), now)
        for backend, driver in pairs
        for key in sorted(driver.wanted())
    ]


def rows_of(backend: Backend) -> dict[SourceKey, SourceRow]:
    return {SourceKey(row.source, row.region): row for row in SourceRow.objects.filter(backend=backend)}


def catalog_name(backend_id: int) -> str:
    """The name of the stamp of a backend's offers."""
    return f"catalog:{backend_id}"


def objects_of(backend_id: int) -> list[str]:
    """The names in the cache of a backend's values."""
    stamps = SourceRow.objects.filter(backend=backend_id).exclude(stamp="").values_list("stamp", flat=True)
    return [_object(backend_id, stamp) for stamp in stamps]


def _object(backend_id: int, stamp: str) -> str:
    return f"source:{backend_id}:{stamp}"


def drop(backend_id: int) -> None:
    """Drop this process's copies of a backend's values."""
    _local.drop(lambda key: key[0] == backend_id)


def forget() -> None:
    """Drop all of this process's copies."""
    _local.forget()
