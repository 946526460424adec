"""Runs, with sweeps, archives, dependencies and events."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from dstackweb.runs.codes import DependencyOutcome
from dstackweb.runs.models.queues import Queue, StatusCount, status_field, status_values
from dstackweb.runs.queue import ordering
from dstackweb.runs.states import ACTIVE, RunStatus


class Archive(models.Model):
    """A working directory shipped with a run: a tar.gz named by its hash, kept once per project."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE)
    sha256 = models.CharField(max_length=64)
    size = models.BigIntegerField(help_text="Bytes")
    key = models.CharField(max_length=200, help_text="Its file in the storage, a new one with each upload")
    created_at = models.DateTimeField(default=timezone.now)
    used_at = models.DateTimeField(default=timezone.now, help_text="When it was last uploaded, found or submitted")
    removed_at = models.DateTimeField(null=True, help_text="When its file was removed, because no one used it")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "sha256"], name="archive_once_in_project")]
        indexes = [models.Index("used_at", condition=Q(removed_at=None), name="archive_by_use")]

    def __str__(self) -> str:
        return self.sha256[:12]


class Sweep(models.Model):
    """Many runs of one file (`array`), which are created a few at a time (`sweeps.creation`), each by its index from 0.

    `next_index` is the first one that was never created. Its row is locked behind that of its queue.
    """

    uid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="sweeps")
    queue = models.ForeignKey(Queue, on_delete=models.PROTECT, related_name="sweeps")
    user = models.ForeignKey("accounts.User", on_delete=models.PROTECT, related_name="sweeps")
    name = models.CharField(max_length=60)

    size = models.PositiveIntegerField(help_text="Runs in all")
    max_parallel = models.PositiveIntegerField(null=True, help_text="Of its runs so many are active at once; None: any")
    next_index = models.PositiveIntegerField(default=0)
    is_pending = models.BooleanField(
        default=False, help_text="It waits for the end of others: none of its runs is created before"
    )
    status_detail: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="What it waits for, or why it was canceled"
    )
    priority = models.PositiveSmallIntegerField(default=ordering.PRIORITY_DEFAULT)
    seniority_us = models.BigIntegerField(help_text="Of its submission, or the end of its wait; all its runs have it")
    waits_for_name = models.CharField(max_length=60, blank=True, help_text="Name of its next run, which is taken now")
    retry_before = models.DateTimeField(null=True, help_text="Runs that had failed by then are created once more")
    stopped_at = models.DateTimeField(null=True, help_text="From here on none is created that was not before")
    stopped_by = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    is_stopping = models.BooleanField(default=False, help_text="Its active runs are still to be stopped")
    is_aborted = models.BooleanField(default=False, help_text="They are stopped without time to end by themselves")

    shape = models.CharField(max_length=64)
    array: models.JSONField[Any, Any] = models.JSONField(help_text="The parameters of its runs")
    spec: models.JSONField[Any, Any] = models.JSONField(help_text="Settings of its runs, without their parameters")
    provenance: models.JSONField[Any, Any] = models.JSONField(default=dict)
    config_text = models.TextField(blank=True)
    env_secret = models.TextField(blank=True, help_text="Values taken from the client's environment, encrypted")
    archive = models.ForeignKey(Archive, null=True, on_delete=models.PROTECT)
    idempotency_key = models.CharField(max_length=200, blank=True)
    body_digest = models.CharField(max_length=64, blank=True)

    submitted_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True, help_text="When all its runs had ended")

    class Meta:
        constraints = [
            # As with runs: a name is free again once its sweep has ended.
            models.UniqueConstraint(
                fields=["project", "name"], condition=Q(ended_at=None), name="sweep_name_among_active"
            ),
            models.UniqueConstraint(
                fields=["project", "user", "idempotency_key"],
                condition=~Q(idempotency_key=""),
                name="sweep_idempotency_key",
            ),
        ]
        indexes = [
            # Those that each pass looks at, which are few.
            models.Index("id", condition=Q(ended_at=None), name="sweep_active"),
            models.Index("project", F("id").desc(), name="sweep_newest_in_project"),
            models.Index("project", "name", F("id").desc(), name="sweep_newest_of_name"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def status(self) -> RunStatus:
        """As that of a run: running until all its runs have ended, then done if each was created and is done."""
        if self.ended_at is None:
            return RunStatus.PENDING if self.is_pending else RunStatus.RUNNING
        if not self.next_index:
            return RunStatus.TERMINATED
        is_done = self.next_index == self.size and not self.count.failed and not self.count.terminated
        return RunStatus.DONE if is_done else RunStatus.FAILED

    @property
    def is_complete(self) -> bool:
        """Whether no run is left to be created."""
        return self.retry_before is None and (self.stopped_at is not None or self.next_index >= self.size)

    @property
    def is_over(self) -> bool:
        """Whether all its runs have ended."""
        return self.is_complete and not self.count.waiting and not self.count.placed


class SweepCount(StatusCount):
    """Those of a sweep; removed runs are in none."""

    sweep = models.OneToOneField(Sweep, on_delete=models.CASCADE, primary_key=True, related_name="count")

    def __str__(self) -> str:
        return str(self.sweep)


class Run(models.Model):
    """A submitted run, with its spec as resolved at that moment."""

    uid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    project = models.ForeignKey(
        "accounts.Project", on_delete=models.CASCADE, related_name="runs", db_index=False
    )  # `run_newest_in_project` begins with it
    queue = models.ForeignKey(Queue, on_delete=models.PROTECT, related_name="runs")
    user = models.ForeignKey("accounts.User", on_delete=models.PROTECT, related_name="runs")
    name = models.CharField(max_length=60)
    sweep = models.ForeignKey(Sweep, null=True, on_delete=models.PROTECT, related_name="runs", db_index=False)
    sweep_index = models.PositiveIntegerField(null=True)

    status = status_field(RunStatus, RunStatus.SUBMITTED)
    status_message = models.TextField(blank=True)
    status_detail: models.JSONField[Any, Any] = models.JSONField(
        default=dict, blank=True, help_text="Code and data of the server's own message"
    )
    termination_reason = models.CharField(max_length=60, blank=True)
    exit_code = models.IntegerField(null=True)
    attempt = models.PositiveIntegerField(default=1)
    stop_reason = models.CharField(max_length=60, blank=True, help_text="Why it was stopped, while terminating")
    retry_at = models.DateTimeField(null=True, help_text="When a pending run enters the queue again")
    first_failed_at = models.DateTimeField(null=True, help_text="From here the retry's duration counts")

    priority = models.PositiveSmallIntegerField(default=ordering.PRIORITY_DEFAULT)
    seniority_us = models.BigIntegerField()
    penalty_s = models.BigIntegerField(
        default=0, help_text="Seconds that it ranks behind its seniority by its member's share; set when it is queued"
    )
    penalty_basis: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="The numbers that the penalty comes from"
    )
    rank = models.BigIntegerField()
    shape = models.CharField(max_length=64)
    queued_at = models.DateTimeField(
        default=timezone.now, help_text="When it last entered its queue: from here its waiting counts"
    )
    place_since = models.DateTimeField(
        default=timezone.now, help_text="While it waits: since when it has had this place in this queue"
    )
    moved_at = models.DateTimeField(null=True, help_text="When a person last moved it by hand")
    moved_by = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    extended_s = models.PositiveIntegerField(default=0, help_text="Seconds by which people lengthened max_duration")

    spec: models.JSONField[Any, Any] = models.JSONField(help_text="Its settings, as resolved at submit")
    provenance: models.JSONField[Any, Any] = models.JSONField(default=dict)
    config_text = models.TextField(blank=True)
    env_secret = models.TextField(blank=True, help_text="Values taken from the client's environment, encrypted")
    archive = models.ForeignKey(Archive, null=True, on_delete=models.PROTECT)
    idempotency_key = models.CharField(max_length=200, blank=True)
    body_digest = models.CharField(max_length=64, blank=True)

    submitted_at = models.DateTimeField(default=timezone.now)
    started_at = models.DateTimeField(null=True, help_text="Of its newest attempt")
    ended_at = models.DateTimeField(null=True)
    version = models.BigIntegerField(default=0, help_text="Counts every visible change of the run or its jobs")

    first_events: list[RunEvent] | None = None
    """Its events, while it is as it was stored by this process; None for a run that was read."""

    class Meta:
        constraints = [
            # Names are free again once a run ends; two active runs never share one.
            models.UniqueConstraint(
                fields=["project", "name"], condition=Q(status__in=status_values(ACTIVE)), name="run_name_among_active"
            ),
            models.UniqueConstraint(
                fields=["project", "user", "idempotency_key"],
                condition=~Q(idempotency_key=""),
                name="run_idempotency_key",
            ),
            # Each index of a sweep is created once.
            models.UniqueConstraint(
                fields=["sweep", "sweep_index"], condition=Q(sweep__isnull=False), name="run_once_in_sweep"
            ),
            models.CheckConstraint(
                condition=Q(priority__gte=ordering.PRIORITY_MIN, priority__lte=ordering.PRIORITY_MAX),
                name="run_priority_0_to_100",
            ),
            models.CheckConstraint(condition=Q(status__in=status_values(RunStatus)), name="run_status_known"),
        ]
        indexes = [
            # The next k of n are one index scan, however long the queue is. With the status (always the same) and the
            # shape in it, places are counted and shapes skipped without reading the rows themselves.
            models.Index(
                "queue", "status", "rank", "id", "shape", condition=Q(status="submitted"), name="run_queue_order"
            ),
            # The shapes that wait, and the next runs of each, without reading the others.
            models.Index(
                "queue", "status", "shape", "rank", "id", condition=Q(status="submitted"), name="run_queue_shape_order"
            ),
            models.Index("queue", "status", "seniority_us", condition=Q(status="submitted"), name="run_queue_oldest"),
            # Those that have had their places since before a moment, for the queue's past.
            models.Index(
                "queue", "status", "place_since", condition=Q(status="submitted"), name="run_queue_place_since"
            ),
            # How many wait at each priority, for the history, without reading the rows.
            models.Index("queue", "status", "priority", condition=Q(status="submitted"), name="run_queue_priority"),
            models.Index("project", F("id").desc(), name="run_newest_in_project"),
            models.Index("project", "name", F("id").desc(), name="run_newest_of_name"),
            # With all that lists filter by in it: the rows, which are long, are read for what is shown alone.
            models.Index(
                "project",
                "status",
                F("id").desc(),
                "user",
                "queue",
                "submitted_at",
                "name",
                name="run_newest_of_status",
            ),
            # Whole, since SQLite never sees that one status is among several of a partial index's condition.
            models.Index("status", "retry_at", name="run_by_status"),
            # The runs to prune, oldest end first.
            models.Index("ended_at", condition=Q(ended_at__isnull=False), name="run_by_end"),
            # The failed or active runs of a sweep, in its order.
            models.Index(
                "sweep", "status", "sweep_index", condition=Q(sweep__isnull=False), name="run_of_sweep_by_status"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_hold(self) -> bool:
        return bool(self.spec.get("hold"))

    @property
    def limit_s(self) -> int | None:
        """Seconds after which its jobs are stopped: `max_duration` and its extensions."""
        limit: int | None = self.spec.get("max_duration_s")
        return None if limit is None else limit + self.extended_s

    @property
    def held_until(self) -> dt.datetime | None:
        """When a running hold ends; None for any other run."""
        if not self.is_hold or self.status != RunStatus.RUNNING or self.started_at is None or self.limit_s is None:
            return None
        return self.started_at + dt.timedelta(seconds=self.limit_s)


class Dependency(models.Model):
    """A wait of a run or sweep for the end of another before it enters its queue. `on` and `otherwise` are of
    `spec.After`."""

    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="dependencies")
    waiting_sweep = models.ForeignKey(Sweep, null=True, on_delete=models.CASCADE, related_name="dependencies")
    predecessor = models.ForeignKey(Run, null=True, on_delete=models.SET_NULL, related_name="followers")
    sweep = models.ForeignKey(Sweep, null=True, on_delete=models.SET_NULL, related_name="followers")
    name = models.CharField(max_length=60, help_text="The predecessor's, which may be removed")
    on = models.CharField(max_length=10)
    otherwise = models.CharField(max_length=10)
    outcome = models.CharField(max_length=10, default=DependencyOutcome.WAITING.value)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "predecessor"], name="dependency_once"),
            models.UniqueConstraint(fields=["run", "sweep"], name="dependency_on_sweep_once"),
            models.UniqueConstraint(fields=["waiting_sweep", "predecessor"], name="dependency_of_sweep_once"),
            models.UniqueConstraint(fields=["waiting_sweep", "sweep"], name="dependency_of_sweep_on_sweep_once"),
            models.CheckConstraint(
                condition=Q(run=None, waiting_sweep__isnull=False) | Q(run__isnull=False, waiting_sweep=None),
                name="dependency_of_run_or_sweep",
            ),
        ]
        indexes = [models.Index("predecessor", condition=Q(outcome="waiting"), name="dependency_waiting")]

    def __str__(self) -> str:
        return f"{self.follower} after {self.name}: {self.outcome}"

    @property
    def of(self) -> Run | Sweep | None:
        """What it waits for; None once it was removed."""
        return self.predecessor or self.sweep

    @property
    def follower(self) -> Run | Sweep:
        waiting = self.run or self.waiting_sweep
        assert waiting is not None, "a constraint sees to it"
        return waiting


class RunEvent(models.Model):
    """An event of a run: a code with data (`runs.codes.RunEventKind`)."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(default=timezone.now)
    kind = models.CharField(max_length=60)
    actor = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL)
    attempt = models.PositiveIntegerField(default=1)
    node = models.PositiveIntegerField(null=True)
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)

    class Meta:
        indexes = [models.Index("run", "id", name="event_of_run")]
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.run}, {self.at:%Y-%m-%d %H:%M} UTC"
