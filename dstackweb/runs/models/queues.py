"""Queues: their settings, counters, events, wait reasons and moves by hand; and fields that several tables have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils import timezone

from dstackweb.runs.codes import Reclaim
from dstackweb.runs.queue import ordering
from dstackweb.runs.states import JobStatus, RunStatus

MAX_LIMIT = 1_000_000


def status_values(statuses: Iterable[RunStatus | JobStatus]) -> list[str]:
    """Plain strings, which migrations can hold."""
    return [status.value for status in statuses]


def status_field(kind: type[RunStatus] | type[JobStatus], default: RunStatus | JobStatus) -> models.CharField[str, str]:
    choices = [(value, value) for value in status_values(kind)]
    return models.CharField(max_length=12, choices=choices, default=default.value)


def limit_field(what: str) -> models.PositiveIntegerField[int | None, int | None]:
    """A limit of a queue; empty means none, 0 lets nothing start."""
    return models.PositiveIntegerField(
        null=True, blank=True, validators=[MaxValueValidator(MAX_LIMIT)], help_text=f"{what} Empty: no limit."
    )


def count_field() -> models.PositiveIntegerField[int, int]:
    return models.PositiveIntegerField(default=0)


class StatusCount(models.Model):
    """How many runs are in each status, shifted by each transition; `version` counts the changes."""

    version = models.BigIntegerField(default=0)
    pending = models.IntegerField(default=0)
    submitted = models.IntegerField(default=0)
    provisioning = models.IntegerField(default=0)
    running = models.IntegerField(default=0)
    terminating = models.IntegerField(default=0)
    done = models.IntegerField(default=0)
    failed = models.IntegerField(default=0)
    terminated = models.IntegerField(default=0)

    class Meta:
        abstract = True

    @property
    def waiting(self) -> int:
        return self.pending + self.submitted

    @property
    def placed(self) -> int:
        return self.provisioning + self.running + self.terminating


class Queue(models.Model):
    """The submitted runs of a project in their order. A transaction that changes the order updates this row first."""

    has_sweep_named: bool
    """Set by `queues.take_seniority`."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="queues")
    name = models.SlugField(max_length=60, default="default")
    ageing_minutes = models.PositiveIntegerField(
        null=True,
        blank=True,
        default=ordering.DEFAULT_AGEING_MINUTES,
        validators=[MinValueValidator(1), MaxValueValidator(60 * 24 * 365)],
        help_text="Minutes of waiting for +1 priority. Empty: strict priority.",
    )
    paused = models.BooleanField(default=False, help_text="No run starts from a paused queue; running runs continue.")
    draining = models.BooleanField(
        default=False, help_text="A draining queue accepts no new runs; waiting runs still start."
    )
    max_running = limit_field("Runs of this queue that may be placed at once.")
    max_gpus = limit_field("GPUs that the queue's runs may hold at once.")
    cohort = models.SlugField(
        max_length=60,
        blank=True,
        default="",
        db_index=False,
        help_text="Queues of the project with the same cohort and a limit of GPUs lend each other unused ones.",
    )
    borrow_gpus = limit_field("GPUs above its limit that the queue may borrow in its cohort.")
    lend_gpus = limit_field("GPUs of its limit that the queue lends in its cohort.")
    reclaim = models.CharField(
        max_length=16,
        choices=[(each.value, each.value) for each in Reclaim],
        default=Reclaim.NEVER,
        help_text="Whether its runs displace preemptible ones of its cohort that hold the GPUs which it has lent.",
    )
    max_running_per_user = limit_field("Runs that one member may have placed at once.")
    max_gpus_per_user = limit_field("GPUs that one member's runs may hold at once.")
    preempt_points = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(ordering.PRIORITY_MAX)],
        help_text="A waiting run may displace preemptible runs with so many points of priority less. Empty: none.",
    )
    preempt_gpu_hours = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(MAX_LIMIT)],
        help_text="GPU-hours of others' work that a member's runs may displace within 24 hours. Empty: no limit.",
    )
    fair_share_minutes = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(60 * 24 * 30)],
        help_text="Most minutes that a run of a member who uses much ranks behind. Empty: off.",
    )
    fair_share_half_life_days = models.PositiveSmallIntegerField(
        default=7,
        validators=[MinValueValidator(1), MaxValueValidator(90)],
        help_text="Days after which past usage counts half for the fair share.",
    )
    last_seniority_us = models.BigIntegerField(default=0, editable=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "name"], name="queue_name_in_project")]
        ordering = ["project", "name"]

    def __str__(self) -> str:
        return f"{self.project}/{self.name}"

    @property
    def step_us(self) -> int:
        return ordering.step_us(self.ageing_minutes)

    @property
    def max_penalty_s(self) -> int:
        return (self.fair_share_minutes or 0) * 60


class QueueCount(StatusCount):
    has_sweeps: bool
    """Whether a sweep of it is active: read by the queue page."""

    queue = models.OneToOneField(Queue, on_delete=models.CASCADE, primary_key=True, related_name="count")

    def __str__(self) -> str:
        return str(self.queue)


class QueueEvent(models.Model):
    """A change of a queue's settings: `data` has `{setting: [old, new]}`."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(default=timezone.now)
    actor = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.queue}, {self.at:%Y-%m-%d %H:%M} UTC"


class Move(models.Model):
    """One move or priority change, which can be undone for a moment.

    `changes` has `[run id, place before, place after, moved before]` per run. A place is `[seniority_us, priority,
    penalty_s]`. The last is `[moved_at, moved_by id]` of a run that was moved itself, null for one that only gave way.
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="moves")
    user = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="+")
    at = models.DateTimeField(default=timezone.now)
    changes: models.JSONField[Any, Any] = models.JSONField()
    undone_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index("at", name="move_by_age")]

    def __str__(self) -> str:
        return f"{len(self.changes)} of {self.queue} by {self.user}"


class PastPlace(models.Model):
    """A place that a waiting run had in a queue, over a time that has ended; kept for `past.KEPT`.

    Its rank then follows from this and the queue's step then. The run's present place is in its own row, since
    `Run.place_since`. Written with each change of a place and as the run leaves, by one statement from its row.
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="+", db_index=False)
    run_id = models.BigIntegerField(help_text="Also of a run that has been deleted since; it orders equal ranks")
    since = models.DateTimeField()
    until = models.DateTimeField()
    queued_at = models.DateTimeField(help_text="From here its waiting counted")
    seniority_us = models.BigIntegerField()
    priority = models.PositiveSmallIntegerField()
    penalty_s = models.BigIntegerField()
    ended_by = models.CharField(max_length=12, help_text="What ended its time at this place")

    class Meta:
        indexes = [
            # Those of a moment: from the ones that ended after it, in the index alone.
            models.Index("queue", "until", "since", name="past_place_by_time"),
            # What happened next to a run.
            models.Index("run_id", "until", name="past_place_of_run"),
        ]

    def __str__(self) -> str:
        return f"{self.queue} {self.run_id}, {self.until:%Y-%m-%d %H:%M} UTC"


class MemberShare(models.Model):
    """A member's load in a queue with fair share (`ordering.Load`), counted each minute and shifted by each run that
    enters. Members without any have no row."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="shares")
    user = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="+")
    used_gpu_ms = models.BigIntegerField(default=0, help_text="GPU-milliseconds, halved for each half-life since")
    held_gpus = count_field()
    queued_gpus = count_field()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["queue", "user"], name="member_share_once")]

    def __str__(self) -> str:
        return f"{self.queue}: {self.user}"


class DisplacedWork(models.Model):
    """What the displaced runs of one preemption had held, for the daily budget of the member whose run displaced them.

    Kept for a day: the next preemption in the queue deletes older rows.
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="+", db_index=False)
    user = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="+")
    at = models.DateTimeField()
    gpu_ms = models.BigIntegerField(help_text="GPU-milliseconds; a run without GPUs counts as one GPU")

    class Meta:
        indexes = [models.Index("queue", "at", name="displaced_work_by_time")]

    def __str__(self) -> str:
        return f"{self.user} in {self.queue} at {self.at:%Y-%m-%d %H:%M}"


class Verdict(models.Model):
    """Why runs of one shape in one queue wait, written only when it changes. The shape "" is the whole queue."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="verdicts")
    shape = models.CharField(max_length=64)
    reason = models.CharField(max_length=40)
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)
    at = models.DateTimeField(default=timezone.now)
    logged_at = models.DateTimeField(default=timezone.now, help_text="From here its time is not in a past verdict yet")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["queue", "shape"], name="verdict_per_shape")]

    def __str__(self) -> str:
        return f"{self.queue} {self.shape[:8]}"


class PastVerdict(models.Model):
    """Why runs of a shape waited over a time that has ended; kept for `past.KEPT`.

    One row for each reason, and for each `past_log.LOGGED_EVERY` with other numbers: those that it ended with.
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="+", db_index=False)
    shape = models.CharField(max_length=64)
    since = models.DateTimeField()
    until = models.DateTimeField()
    reason = models.CharField(max_length=40)
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)

    class Meta:
        indexes = [
            models.Index("queue", "shape", "until", name="past_verdict_by_time"),
            # The ones to prune, oldest first.
            models.Index("until", name="past_verdict_by_age"),
        ]

    def __str__(self) -> str:
        return f"{self.queue} {self.shape[:8]}, {self.until:%Y-%m-%d %H:%M} UTC"
