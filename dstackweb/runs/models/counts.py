"""What members used and spent, how long runs waited and lasted, and when they are expected to start."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from dstackweb.runs.models.queues import Queue, count_field
from dstackweb.runs.models.runs import Run


class BudgetMark(models.Model):
    """A share of a project's monthly budget that it has spent: reported once a month."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="budget_marks")
    month = models.DateField(help_text="Its first day, UTC")
    percent = models.PositiveSmallIntegerField()
    at = models.DateTimeField(default=timezone.now)
    spent = models.DecimalField(max_digits=12, decimal_places=4, help_text="USD")
    budget = models.DecimalField(max_digits=12, decimal_places=2, help_text="USD")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "month", "percent"], name="budget_mark_once")]

    def __str__(self) -> str:
        return f"{self.project}: {self.percent} % in {self.month:%Y-%m}"


class RemovedRun(models.Model):
    """What is left of a removed run, until its files are gone everywhere: `removal` writes it."""

    uid = models.UUIDField(primary_key=True, editable=False)
    at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField()
    logs: models.JSONField[Any, Any] = models.JSONField(default=list, help_text="Ids of jobs whose logs remain")
    artifacts: models.JSONField[Any, Any] = models.JSONField(default=list, help_text="Keys of artifacts that remain")
    has_logs = models.BooleanField(default=True, help_text="Whether `logs` or `artifacts` has any")

    class Meta:
        indexes = [
            models.Index("at", name="removed_run_by_age"),
            models.Index("uid", condition=Q(has_logs=True), name="removed_run_with_logs"),
        ]

    def __str__(self) -> str:
        return str(self.uid)


class RemovedSpend(models.Model):
    """What removed runs have cost in a month beside instances, which keep their own cost."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="+")
    month = models.DateField(help_text="Its first day, UTC")
    usd = models.DecimalField(max_digits=16, decimal_places=6, default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "month"], name="removed_spend_once")]

    def __str__(self) -> str:
        return f"{self.project} {self.month:%Y-%m}: {self.usd}"


class _Used(models.Model):
    """What ended jobs held and cost on one day (UTC), and the runs that ended on it."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="+")
    user = models.ForeignKey("accounts.User", on_delete=models.PROTECT, related_name="+")
    day = models.DateField(help_text="UTC")
    gpu_ms = models.BigIntegerField(default=0, help_text="GPU-milliseconds from placement to end")
    cpu_ms = models.BigIntegerField(default=0, help_text="CPU-milliseconds likewise")
    micro_usd = models.BigIntegerField(default=0, help_text="Millionths of a USD")
    done = count_field()
    failed = count_field()
    terminated = count_field()

    class Meta:
        abstract = True


class UsageDay(_Used):
    """What a member used in a queue on one day, shifted where jobs and runs end; never computed from runs.

    `measured_ms` is the part of the GPU-milliseconds that samples cover, and `idle_ms` the idle part of that
    (`gpus.averages`).
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="+")
    measured_ms = models.BigIntegerField(default=0)
    idle_ms = models.BigIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "day", "user", "queue"], name="usage_day_once")]
        # Of the whole deployment.
        indexes = [models.Index("day", name="usage_by_day")]

    def __str__(self) -> str:
        return f"{self.user} in {self.queue} on {self.day}"


class RemovedUsage(_Used):
    """What of a member's usage belongs to removed runs, which a recount can't see any more."""

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "day", "user"], name="removed_usage_once")]

    def __str__(self) -> str:
        return f"{self.user} in {self.project} on {self.day}"


class QueueSpan(models.Model):
    """Waits and lengths of one queue and priority band (see `wait_stats.BANDS`) in a span; never computed from runs."""

    TIME: ClassVar[str]
    """The column with the beginning of the span, UTC."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="%(class)ss")
    band = models.PositiveSmallIntegerField()
    placed = models.PositiveIntegerField(default=0, help_text="Runs that left the queue to start")
    wait_s = models.BigIntegerField(default=0, help_text="Their waiting, seconds in all")
    wait_max_s = models.BigIntegerField(default=0)
    # How many waited up to so long, and longer than the column before: plain integers, so that they count atomically.
    waited_1m = count_field()
    waited_5m = count_field()
    waited_15m = count_field()
    waited_1h = count_field()
    waited_4h = count_field()
    waited_12h = count_field()
    waited_1d = count_field()
    waited_longer = count_field()
    length = models.PositiveIntegerField(null=True, help_text="Waiting runs when last sampled")
    length_max = models.PositiveIntegerField(null=True)

    class Meta:
        abstract = True


class QueueHour(QueueSpan):
    TIME = "hour"

    hour = models.DateTimeField(help_text="Its beginning, UTC")
    placed_removed = models.PositiveIntegerField(default=0, help_text="Of those of the project, runs removed since")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["queue", "band", "hour"], name="queue_hour_once")]
        indexes = [models.Index("hour", name="queue_hour_by_age")]

    def __str__(self) -> str:
        return f"{self.queue} band {self.band} {self.hour:%Y-%m-%d %H}:00"


class QueueSlot(QueueSpan):
    """Five minutes (`history.SLOT`), kept for `history.SLOTS_KEPT`."""

    TIME = "at"

    at = models.DateTimeField(help_text="Its beginning, UTC")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["queue", "band", "at"], name="queue_slot_once")]
        indexes = [models.Index("at", name="queue_slot_by_age")]

    def __str__(self) -> str:
        return f"{self.queue} band {self.band} {self.at:%Y-%m-%d %H:%M}"


class StartEstimate(models.Model):
    """When a waiting run starts, as it is shown; written only when that changes by more than a little.

    `first_shown` has the first estimate at each horizon (`start_estimates.ShownEstimate`), to compare with the start.
    """

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="start_estimate")
    p50 = models.DateTimeField(null=True, help_text="As likely before as after; null: no estimate")
    p90 = models.DateTimeField(null=True, help_text="Nine of ten such runs have started by then")
    basis = models.CharField(max_length=20)
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)
    first_shown: models.JSONField[Any, Any] = models.JSONField(default=list)

    def __str__(self) -> str:
        return f"{self.run}: {self.basis} {self.p50 or ''}"


class StartScore(models.Model):
    """Starts beside their estimates: how many took so much of the time shown, and how many were in time.

    `quantile` is 50 or 90, `horizon` an index into `start_estimates.HORIZONS_S`, `bin` the time until the start divided
    by the simulated one (`start_estimates.RATIOS`).
    """

    quantile = models.PositiveSmallIntegerField()
    horizon = models.PositiveSmallIntegerField()
    bin = models.PositiveSmallIntegerField()
    starts = count_field()
    in_time = models.PositiveIntegerField(default=0, help_text="Of these, started by the time shown")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["quantile", "horizon", "bin"], name="start_score_once"),
            models.CheckConstraint(condition=Q(in_time__lte=F("starts")), name="start_score_in_time"),
        ]

    def __str__(self) -> str:
        return f"P{self.quantile}, horizon {self.horizon}: {self.in_time} of {self.starts} in bin {self.bin}"


class LearnedDuration(models.Model):
    """How many ended runs of a member whose names have a prefix lasted so long (`learned_durations.BINS`).

    The prefix "" has what a project with too many prefixes did not count apart.
    """

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="+")
    prefix = models.CharField(max_length=60)
    user = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="+")
    bin = models.PositiveSmallIntegerField()
    runs = count_field()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "prefix", "user", "bin"], name="learned_duration_once")
        ]

    def __str__(self) -> str:
        return f"{self.project} {self.prefix!r} of {self.user}: {self.runs} in bin {self.bin}"
