"""Leases, rate limits, circuit breakers and cached data that processes share, by name; the watcher's time; the schema's
version; stored files."""

from __future__ import annotations

import datetime as dt
import random
import time
from collections.abc import Callable
from typing import Any

from django.db import IntegrityError, models, transaction
from django.db.models import F, FloatField, Q, Subquery, Value
from django.db.models.functions import Coalesce
from django.utils import timezone

from dstackweb.lib.network import full_jitter

SKEW_US = 60_000_000
"""Clocks differ by less than this. A bucket further in the future was written before a clock was set back."""
BASE_S, CAP_S = 2.0, 300.0
LEAST_S = 0.5
"""The minimum time that a circuit stays open, whatever the jitter."""
PROBE_S = 30.0
"""The next probe may start after this time, if the process of a probe was killed."""


class Lease(models.Model):
    """A lock across processes and machines that expires.

    The lease of a holder that dies blocks others until it expires. A holder that was too slow, and lost its lease,
    notices when it renews: it must then discard its work.
    """

    name = models.CharField(primary_key=True, max_length=200)
    holder = models.CharField(max_length=64)
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.name}: {self.holder}"

    @classmethod
    def take(cls, name: str, holder: str, ttl_s: float, now: dt.datetime) -> bool:
        """Take the lease for `ttl_s` seconds; True if it was free or already held by `holder`.

        An expiry too far in the future is void: it was set before a clock was set back.
        """
        ttl = dt.timedelta(seconds=ttl_s)
        free = Q(holder=holder) | Q(expires_at__lte=now) | Q(expires_at__gt=now + 2 * ttl)
        if cls.objects.filter(free, pk=name).update(holder=holder, expires_at=now + ttl):
            return True
        if cls.objects.filter(pk=name).exists():
            return False
        try:
            with transaction.atomic():
                cls.objects.create(pk=name, holder=holder, expires_at=now + ttl)
        except IntegrityError:  # another holder was faster
            return False
        return True

    @classmethod
    def renew(cls, name: str, holder: str, ttl_s: float, now: dt.datetime) -> bool:
        """Extend the lease to `ttl_s` from now; False if `holder` has lost it."""
        until = now + dt.timedelta(seconds=ttl_s)
        return bool(cls.objects.filter(pk=name, holder=holder).update(expires_at=until))

    @classmethod
    def release(cls, name: str, holder: str) -> None:
        cls.objects.filter(pk=name, holder=holder).delete()


class Sequence(models.Model):
    """A number by name that only rises: it orders what several processes do, whatever their clocks say."""

    name = models.CharField(primary_key=True, max_length=60)
    value = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"

    @classmethod
    def advance(cls, name: str) -> int:
        """Raise the number by one, and return it. It counts for others once the transaction ends."""
        with transaction.atomic():
            cls.objects.get_or_create(pk=name)
            cls.objects.filter(pk=name).update(value=F("value") + 1)
            return cls.current(name)

    @classmethod
    def current(cls, name: str) -> int:
        return cls.objects.filter(pk=name).values_list("value", flat=True).first() or 0


class Busy(Exception):
    """The wait of `wait_s` seconds exceeds the caller's limit. No token was taken."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"rate limit: {wait_s:.1f} s to wait")
        self.wait_s = wait_s


class Bucket(models.Model):
    """A token bucket as of `at_us`, in microseconds since the epoch. Negative tokens are callers that wait.

    It holds up to `burst` tokens and gains `rate` per second. A caller takes a token at once, into debt if the bucket
    is empty, and waits until the debt is paid: callers proceed one by one in the order of their requests.
    """

    name = models.CharField(primary_key=True, max_length=200)
    tokens = models.FloatField()
    at_us = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.name}: {self.tokens:g}"

    @classmethod
    def reserve(
        cls, name: str, rate: float, burst: float, most_s: float, now_us: int | None = None, *, amount: float = 1
    ) -> float:
        """Take a token of `name`, or an amount; returns the seconds to wait. Raises Busy if they exceed `most_s`."""
        return cls.take(name, rate, burst, most_s, now_us, amount=amount)[0]

    @classmethod
    def take(
        cls, name: str, rate: float, burst: float, most_s: float, now_us: int | None = None, *, amount: float = 1
    ) -> tuple[float, float]:
        """Take tokens as `reserve` does; return the seconds to wait, and how many tokens are left."""
        with transaction.atomic():
            now_us = time.time_ns() // 1000 if now_us is None else now_us
            cls.objects.get_or_create(pk=name, defaults={"tokens": burst, "at_us": now_us})
            bucket = cls.objects.select_for_update().get(pk=name)
            tokens, at_us, wait_s = spend(bucket.tokens, bucket.at_us, rate, burst, now_us, amount)
            if wait_s > most_s:
                raise Busy(wait_s)
            cls.objects.filter(pk=name).update(tokens=tokens, at_us=at_us)
        return wait_s, tokens


def spend(
    tokens: float, at_us: int, rate: float, burst: float, now_us: int, amount: float = 1
) -> tuple[float, int, float]:
    """Take `amount` from a bucket that had `tokens` at `at_us`: its new tokens, their time, and the seconds to wait.

    `rate` is per second. A clock that was set back adds no tokens.
    """
    left = room(tokens, at_us, rate, burst, now_us) - amount
    return left, now_us if at_us - now_us > SKEW_US else max(now_us, at_us), max(0.0, -left / rate)


def room(tokens: float, at_us: int, rate: float, burst: float, now_us: int) -> float:
    """The current tokens of a bucket that had `tokens` at `at_us`; a negative number is how many callers wait."""
    since_us = now_us if at_us - now_us > SKEW_US else at_us
    return min(burst, tokens + (max(now_us, since_us) - since_us) * rate / 1e6)


class Open(Exception):
    """`name` must not be called before `until`."""

    def __init__(self, name: str, until: dt.datetime) -> None:
        super().__init__(f"{name} is throttled until {until:%H:%M:%S} UTC")
        self.name, self.until = name, until


class Circuit(models.Model):
    """The circuit breaker of an API that has throttled calls. Without a row, or without failures, it is closed.

    Closed: all callers may call. A throttled call opens the circuit for a time that doubles with each one, with full
    jitter. After that time one caller probes: success closes the circuit, another throttled call opens it for longer.
    """

    name = models.CharField(primary_key=True, max_length=200)
    failures = models.PositiveIntegerField(default=0)
    open_until = models.DateTimeField(null=True)
    probe_until = models.DateTimeField(null=True, help_text="A caller probes the API until then")

    def __str__(self) -> str:
        return f"{self.name}: {self.failures} failures"

    @classmethod
    def enter(cls, name: str, now: dt.datetime) -> bool:
        """True if the caller probes, False if the circuit is closed: both may call. Raises Open."""
        circuit = cls.objects.filter(pk=name).first()
        if circuit is None or circuit.open_until is None:
            return False
        if now < circuit.open_until <= now + dt.timedelta(seconds=CAP_S):
            raise Open(name, circuit.open_until)
        until = now + dt.timedelta(seconds=PROBE_S)
        free = Q(probe_until=None) | Q(probe_until__lte=now) | Q(probe_until__gt=until)
        if cls.objects.filter(free, pk=name, open_until=circuit.open_until).update(probe_until=until):
            return True
        raise Open(name, circuit.probe_until or until)

    @classmethod
    def succeeded(cls, name: str) -> None:
        """The probe succeeded: close the circuit."""
        cls.objects.filter(pk=name).update(failures=0, open_until=None, probe_until=None)

    @classmethod
    def failed(cls, name: str) -> None:
        """The probe failed, but was not throttled: another one may start at once."""
        cls.objects.filter(pk=name).update(probe_until=None)

    @classmethod
    def throttled(cls, name: str, now: dt.datetime, rnd: Callable[[], float] = random.random) -> dt.datetime:
        """Open the circuit for longer than the last time; returns until when.

        If several callers are throttled at once, only the first one counts.
        """
        circuit, _ = cls.objects.get_or_create(pk=name)
        if circuit.open_until is not None and now < circuit.open_until <= now + dt.timedelta(seconds=CAP_S):
            return circuit.open_until
        wait_s = max(LEAST_S, full_jitter(circuit.failures, BASE_S, CAP_S, rnd))
        until = now + dt.timedelta(seconds=wait_s)
        cls.objects.filter(pk=name, failures=circuit.failures).update(
            failures=circuit.failures + 1, open_until=until, probe_until=None
        )
        return until


class Watch(models.Model):
    """The watcher's time, in which silence and deadlines are measured: it advances only while a watcher is at work.

    Seconds count only between two checks of one machine, and only once where several check in turn.
    """

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    counted_s = models.FloatField(default=0, help_text="Seconds counted by all machines together: the watcher's time")
    checks: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="By boot id: the machine's monotonic seconds, and the seconds counted by then"
    )

    class Meta:
        verbose_name_plural = "watch"
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="one_watch_row")]

    def __str__(self) -> str:
        return f"{self.counted_s:.0f} s"

    @classmethod
    def now_s(cls) -> float:
        return cls.objects.filter(pk=1).values_list("counted_s", flat=True).first() or 0.0


def watch_time() -> Coalesce:
    """The watcher's time (seconds) as an expression: rows store it when something happens, and what has passed since
    is derived. So a check of the watcher writes one row, however many it watches."""
    return Coalesce(Subquery(Watch.objects.filter(pk=1).values("counted_s")), Value(0.0), output_field=FloatField())


class CacheRow(models.Model):
    """An entry of `lib.cache.RowCache`. `value` is JSON."""

    key = models.CharField(primary_key=True, max_length=255)
    value = models.TextField()
    expires_at = models.DateTimeField(null=True, db_index=True)

    def __str__(self) -> str:
        return self.key

    @classmethod
    def expired(cls) -> models.QuerySet[CacheRow]:
        return cls.objects.filter(expires_at__lte=timezone.now())


class SchemaVersion(models.Model):
    """The schema that the database has, in the row 1: `lib.schema` compares programs with it."""

    version = models.PositiveIntegerField()
    compatible = models.PositiveIntegerField(help_text="The oldest schema whose programs work with this one")
    release = models.CharField(max_length=40, help_text="The dstackweb that has migrated last")
    at = models.DateTimeField()

    def __str__(self) -> str:
        return f"schema {self.version}, for programs of schema {self.compatible} and newer"


class StoredFile(models.Model):
    """A log or an archive of `lib.storage`, where the database keeps it, or knows its objects."""

    key = models.CharField(max_length=200, unique=True)
    size = models.BigIntegerField(default=0, help_text="Bytes")

    def __str__(self) -> str:
        return f"{self.key}: {self.size} bytes"


class StoredPart(models.Model):
    """The bytes of a file from `offset` to `end`: here, or in the object of that name."""

    file = models.ForeignKey(StoredFile, on_delete=models.CASCADE, related_name="parts")
    offset = models.BigIntegerField()
    end = models.BigIntegerField()
    data = models.BinaryField(null=True)
    object = models.CharField(max_length=400, blank=True)
    settled = models.BooleanField(default=False, help_text="It will not be put together with others")
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["file", "offset"], name="part_once_in_file")]
        indexes = [models.Index("file", condition=Q(settled=False), name="loose_parts")]

    def __str__(self) -> str:
        return f"{self.file_id}: {self.offset}-{self.end}"
