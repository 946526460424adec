"""The use of runs that people or programs connect to, and the health of services."""

from __future__ import annotations

from typing import Any

from django.db import models

from dstackweb.runs.models.runs import Run


class RunActivity(models.Model):
    """What the gateway knows of one attempt of a run, as of its last look, every few seconds.

    `idle_s` counts only while its runner was connected: what the gateway can't see is not idleness.
    """

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="activity")
    attempt = models.PositiveIntegerField()
    connected_at = models.DateTimeField(null=True, help_text="When its runner was last connected to the gateway")
    used_at = models.DateTimeField(null=True, help_text="When a person last used it")
    idle_s = models.FloatField(default=0, help_text="Seconds without use since then, while it was connected")
    warned = models.BooleanField(default=False, help_text="That it stops soon, since it was last used")

    class Meta:
        verbose_name_plural = "run activities"

    def __str__(self) -> str:
        return f"{self.run}: idle for {self.idle_s:.0f} s"


class ServiceHealth(models.Model):
    """What the gateway's checks found of one attempt of a service. It is unknown once they are too old."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="service_health")
    attempt = models.PositiveIntegerField()
    state = models.CharField(max_length=20, help_text="runs.service_codes.ServiceState")
    since = models.DateTimeField(help_text="Since when it has this state")
    checked_at = models.DateTimeField(help_text="When it was last checked")
    failures = models.PositiveIntegerField(default=0, help_text="How many of the last checks have failed in a row")
    error = models.CharField(max_length=20, blank=True, help_text="Why the last check failed, if it did (CheckFailure)")
    error_data: models.JSONField[Any, Any] = models.JSONField(default=dict, blank=True)

    class Meta:
        verbose_name_plural = "service health"

    def __str__(self) -> str:
        return f"{self.run}: {self.state}"
