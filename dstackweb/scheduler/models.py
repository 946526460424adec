"""What the scheduler itself remembers. Every row may be lost or late: passes find what is due from the runs' rows."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils import timezone


class PeriodicJob(models.Model):
    """Work that is due every so often. Whoever's guarded UPDATE of `due_at` wins enqueues it; there is no leader."""

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
    def host_names(host: str) -> tuple[str, str, str]:
        """The names of the jobs that one host has: checking its jobs, sampling its GPUs, removing old files."""
        return f"look:{host}", f"gpus:{host}", f"tidy:{host}"


class PassState(models.Model):
    """The one row that makes placement passes exclusive: who claims it raises `generation`, and each transaction
    of a pass first checks that its generation is still there."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    generation = models.BigIntegerField(default=0)
    expires_at = models.DateTimeField(null=True, help_text="Null: no pass is at work")
    requested = models.BooleanField(default=False, help_text="A pass is queued that has not begun")
    ended_at = models.DateTimeField(null=True)
    duration_ms = models.FloatField(default=0)
    placed = models.PositiveIntegerField(default=0, help_text="Runs placed by the last pass")

    class Meta:
        verbose_name_plural = "pass state"
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="one_pass_row")]

    def __str__(self) -> str:
        return f"generation {self.generation}"


class Reservation(models.Model):
    """Hosts and GPUs kept for the run that has waited longest for them; at most one at a time, written by passes."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    run = models.OneToOneField("runs.Run", on_delete=models.CASCADE, related_name="reservation")
    made_at = models.DateTimeField(default=timezone.now)
    starts_at = models.DateTimeField(null=True, help_text="By then all of it is free; null: nobody knows")
    expires_at = models.DateTimeField(null=True, help_text="When it is judged anew, where nobody knows the start")
    nodes: models.JSONField[Any, Any] = models.JSONField(
        help_text="One per node: host_id, host, cpus, memory_mib, gpus (UUIDs)"
    )

    class Meta:
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="one_reservation")]

    def __str__(self) -> str:
        return f"{len(self.nodes)} nodes for {self.run}"


class Watch(models.Model):
    """What the watcher has counted of all silence, and when each machine last looked for it: silence counts only
    between two looks of one machine, and once only where several look in turn."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    counted_s = models.FloatField(default=0, help_text="Seconds counted by all machines together")
    looks: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="By boot id: the machine's monotonic seconds, and the seconds counted by then"
    )

    class Meta:
        verbose_name_plural = "watch"
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="one_watch_row")]

    def __str__(self) -> str:
        return f"{self.counted_s:.0f} s counted"
