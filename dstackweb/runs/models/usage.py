"""What members used and spent, also of runs that were removed."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q
from django.utils import timezone

from dstackweb.runs.models.base import count_field
from dstackweb.runs.models.queues import Queue


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
    (`gpus.samples.idle`).
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="+")
    measured_ms = models.BigIntegerField(default=0)
    idle_ms = models.BigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "day", "user", "queue"], name="usage_day_once"),
        ]
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
