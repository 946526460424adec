"""Leases, rate limits and circuit breakers that processes share, by name."""

from __future__ import annotations

from typing import Any

from django.db import models


class Lease(models.Model):
    """A lock that expires."""

    name = models.CharField(primary_key=True, max_length=200)
    holder = models.CharField(max_length=64)
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.name}: {self.holder}"


class Bucket(models.Model):
    """A token bucket as of `at_us`, in microseconds since the epoch. Negative tokens are callers that wait."""

    name = models.CharField(primary_key=True, max_length=200)
    tokens = models.FloatField()
    at_us = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.name}: {self.tokens:g}"


class Circuit(models.Model):
    """The circuit breaker of an API that has throttled calls. Without a row, or without failures, it is closed."""

    name = models.CharField(primary_key=True, max_length=200)
    failures = models.PositiveIntegerField(default=0)
    open_until = models.DateTimeField(null=True)
    probe_until = models.DateTimeField(null=True, help_text="A caller probes the API until then")
    told: models.JSONField[Any, Any] = models.JSONField(default=dict, help_text="Its last error")

    def __str__(self) -> str:
        return f"{self.name}: {self.failures} failures"
