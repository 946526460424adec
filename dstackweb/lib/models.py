"""What processes share by name: who does something just now, how fast they may ask, and what is not to be asked."""

from __future__ import annotations

from typing import Any

from django.db import models


class Lease(models.Model):
    """Somebody is at it, until they have not said so for a while."""

    name = models.CharField(primary_key=True, max_length=200)
    holder = models.CharField(max_length=64)
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.name}: {self.holder}"


class Bucket(models.Model):
    """A token bucket as it was at `at_us`, in microseconds since the epoch. Below zero is what waits already."""

    name = models.CharField(primary_key=True, max_length=200)
    tokens = models.FloatField()
    at_us = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.name}: {self.tokens:g}"


class Circuit(models.Model):
    """An API that has said that it is asked too often. Without a row, or with no failures, it is asked freely."""

    name = models.CharField(primary_key=True, max_length=200)
    failures = models.PositiveIntegerField(default=0)
    open_until = models.DateTimeField(null=True)
    probe_until = models.DateTimeField(null=True, help_text="Until then one caller is trying whether it answers again")
    told: models.JSONField[Any, Any] = models.JSONField(default=dict, help_text="What it said last")

    def __str__(self) -> str:
        return f"{self.name}: {self.failures} failures"
