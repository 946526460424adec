"""What the scheduler itself remembers. Every row may be lost or late: passes find what is due from the runs' rows."""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from typing import Any

from django.db import models, transaction
from django.db.models import F, Q, Value
from django.db.models.functions import Coalesce
from django.utils import timezone

from dstackweb.lib import sql


class ClaimLost(Exception):
    """A newer pass has begun: this one must not write."""


class PeriodicJob(models.Model):
    """Work that is due every so often. The ticker whose guarded UPDATE of `due_at` succeeds enqueues it."""

    name = models.CharField(max_length=120, primary_key=True)
    due_at = models.DateTimeField(default=timezone.now)
    outstanding_until = models.DateTimeField(null=True, help_text="A tick is queued or running, at most until then")
    last_started_at = models.DateTimeField(null=True)
    last_ended_at = models.DateTimeField(null=True)
    last_error = models.TextField(blank=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def host_names(host: str) -> tuple[str, str, str, str]:
        """The names of one host's work: checking its jobs, sampling its GPUs, removing old files, trying a start."""
        return f"jobs:{host}", f"gpus:{host}", f"files:{host}", f"probe:{host}"


class PassRequest(models.Model):
    """Whether a placement pass is requested that has not begun: one row, apart from PassState, so that what requests a
    pass never waits for one that is being written."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    waiting = models.BooleanField(default=False)
    urgent = models.BooleanField(default=False, help_text="Something was freed or changed; not only runs were added")

    class Meta:
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="one_pass_request")]

    def __str__(self) -> str:
        return "waiting" if self.waiting else "none"

    @classmethod
    def make(cls, *, urgent: bool = True) -> bool:
        """Request a pass; True when the caller must enqueue it, False when one is queued already."""
        found = cls.objects.filter(pk=1).values_list("waiting", "urgent").first()
        if found is None:
            cls.objects.get_or_create(pk=1)
        waiting, is_urgent = found or (False, False)
        if not waiting and cls.objects.filter(pk=1, waiting=False).update(waiting=True, urgent=urgent):
            return True
        if urgent and not is_urgent:
            cls.objects.filter(pk=1, urgent=False).update(urgent=True)
        return False

    @classmethod
    def is_waiting(cls) -> bool:
        """Whether a pass was requested since the last one was claimed."""
        return cls.objects.filter(pk=1, waiting=True).exists()

    @classmethod
    def is_urgent(cls) -> bool:
        """Whether more than runs that were added waits for a pass."""
        return cls.objects.filter(pk=1, waiting=True, urgent=True).exists()

    @classmethod
    def take(cls) -> None:
        """A pass begins, and reads what was committed before each request so far."""
        cls.objects.filter(pk=1, waiting=True).update(waiting=False, urgent=False)


class PassState(models.Model):
    """The one row that makes placement passes exclusive: a claim raises `generation`, which each transaction of a pass
    checks first."""

    EXPIRES_S = 10.0
    """A killed pass delays the next one this long at most."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    generation = models.BigIntegerField(default=0)
    expires_at = models.DateTimeField(null=True, help_text="Null: no pass is at work")
    ended_at = models.DateTimeField(null=True)
    duration_ms = models.FloatField(default=0)
    placed = models.PositiveIntegerField(default=0, help_text="Runs placed by the last pass")
    is_full = models.BooleanField(default=False, help_text="Runs waited, and the last pass placed none")

    class Meta:
        verbose_name_plural = "pass state"
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="one_pass_row")]

    def __str__(self) -> str:
        return str(self.generation)

    @classmethod
    def claim(cls, now: dt.datetime) -> int | None:
        """Claim the right to run a pass, and return its generation; None while another pass runs. A claim that ends
        further ahead than it could have been set is void (the clock was put back), but for a renewal since `now` was
        read."""
        lifetime = dt.timedelta(seconds=cls.EXPIRES_S)
        free = Q(expires_at=None) | Q(expires_at__lte=now) | Q(expires_at__gt=now + 2 * lifetime)
        with transaction.atomic():
            if cls.objects.filter(free, pk=1).update(generation=F("generation") + 1, expires_at=now + lifetime):
                PassRequest.take()
                generation: int = cls.objects.values_list("generation", flat=True).get(pk=1)
                return generation
        if cls.objects.filter(pk=1).exists():
            PassRequest.make(urgent=False)  # the running pass checks this when it ends, so the request is not lost
            return None
        cls.objects.get_or_create(pk=1)
        return cls.claim(now)

    @classmethod
    def renew(cls, generation: int) -> None:
        """Renew a claim: first in each transaction in which its pass writes. Raises ClaimLost."""
        until = timezone.now() + dt.timedelta(seconds=cls.EXPIRES_S)
        if not cls.objects.filter(pk=1, generation=generation).update(expires_at=until):
            raise ClaimLost

    @classmethod
    def release(cls, generation: int, duration_ms: float, placed: int, *, is_full: bool = False) -> None:
        """Release a claim, unless a newer pass has begun; `placed`: how many runs it placed."""
        cls.objects.filter(pk=1, generation=generation).update(
            expires_at=None, ended_at=timezone.now(), duration_ms=duration_ms, placed=placed, is_full=is_full
        )


class ForecastState(models.Model):
    """The last simulation of starts: one row. `fingerprint` is of all that it depends on."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    fingerprint = models.CharField(max_length=64, blank=True)
    at = models.DateTimeField(null=True)
    duration_ms = models.FloatField(default=0)
    waiting = models.PositiveIntegerField(default=0, help_text="Runs that were simulated")

    class Meta:
        verbose_name_plural = "forecast state"
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="one_forecast_row")]

    def __str__(self) -> str:
        return f"{self.waiting} runs in {self.duration_ms:.0f} ms"


class RetentionKind(StrEnum):
    """What is pruned when it is old."""

    RUNS = "runs"
    LOGS = "logs"
    ARTIFACTS = "artifacts"
    ARCHIVES = "archives"
    TASKS = "tasks"
    AVERAGES = "averages"
    HISTORY = "history"
    QUEUE_PAST = "queue_past"
    HOST_EVENTS = "host_events"
    AUDIT = "audit"
    NOTIFICATIONS = "notifications"
    PROJECTS = "projects"
    LEFTOVERS = "leftovers"
    RUN_DIRS = "run_dirs"
    JOB_FILES = "job_files"


class RestoredHost(models.Model):
    """A host that is asked, after a restore, which jobs were started there: nothing is placed while there are rows.

    `scheduler.restored` makes and removes them, all at once.
    """

    host = models.OneToOneField("backends.Host", on_delete=models.CASCADE, primary_key=True, related_name="restored")
    since_s = models.FloatField(help_text="When the backup was restored, in the watcher's time")
    reported = models.BooleanField(default=False, help_text="It has named all of them")
    jobs: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="Those that the database does not know, by id: their tickets, nonces, and which ended"
    )

    def __str__(self) -> str:
        return f"{self.host}: {len(self.jobs)} jobs{'' if self.reported else ' so far'}"


class Retention(models.Model):
    """How much of one kind of data waits to be pruned, as of the last tick: of the deployment, or on one host."""

    kind = models.CharField(max_length=20)
    host = models.CharField(max_length=60, blank=True)
    at = models.DateTimeField(default=timezone.now)
    waiting = models.PositiveIntegerField(default=0)
    behind_since = models.DateTimeField(null=True, help_text="Since when something has been left at each tick's end")
    pruned = models.PositiveBigIntegerField(default=0, help_text="In all")
    pruned_at = models.DateTimeField(null=True, help_text="When something was last pruned")

    class Meta:
        verbose_name_plural = "retention"
        constraints = [models.UniqueConstraint(fields=["kind", "host"], name="retention_once")]

    def __str__(self) -> str:
        return f"{self.kind} {self.host}".rstrip()

    @staticmethod
    def note(kind: RetentionKind, host: str, *, waiting: int, pruned: int, now: dt.datetime) -> None:
        """Write the figures at the end of a tick."""
        behind = Coalesce("behind_since", Value(now, models.DateTimeField())) if waiting else None
        values: dict[str, Any] = {"at": now, "waiting": waiting, "behind_since": behind}
        if pruned:
            values |= {"pruned": F("pruned") + pruned, "pruned_at": now}
        sql.shift(Retention, {"kind": kind, "host": host}, values)


class Reservation(models.Model):
    """Hosts and GPUs kept for a run that has waited long for them, written by passes. A host is in one at most. Once it
    has expired, the row remembers that it is another run's turn."""

    run = models.OneToOneField("runs.Run", on_delete=models.CASCADE, primary_key=True, related_name="reservation")
    made_at = models.DateTimeField(default=timezone.now)
    starts_at = models.DateTimeField(null=True, help_text="All of it is free by then; null: unknown")
    expires_at = models.DateTimeField(null=True, help_text="When it ends if the start is unknown; it never moves")
    lapsed_at = models.DateTimeField(null=True, help_text="When it expired; null: it is kept")
    reclaims = models.BooleanField(
        default=False,
        help_text="Runs of other queues of its cohort were displaced for it, and their GPUs are kept for it",
    )
    nodes: models.JSONField[Any, Any] = models.JSONField(
        help_text="One per node: host_id, host, cpus, memory_mib, gpus (UUIDs)"
    )

    class Meta:
        ordering = ["made_at", "run"]

    def __str__(self) -> str:
        return f"{len(self.nodes)} nodes for {self.run}"

    @classmethod
    def kept(cls) -> models.QuerySet[Reservation]:
        """Those that are kept now, with their runs and projects."""
        return cls.objects.filter(lapsed_at=None).select_related("run__project")
