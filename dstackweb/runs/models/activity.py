"""The use of runs that people connect to."""

from __future__ import annotations

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
