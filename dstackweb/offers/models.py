"""Rows of backends' sources, cached results and statistics. The objects themselves are in the cache (`store`)."""

from __future__ import annotations

from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models

from dstackweb.backends.models import Backend


class SourceRow(models.Model):
    """One source of a backend in one region: the stamp of its last good value, and its latest failure."""

    backend = models.ForeignKey(Backend, on_delete=models.CASCADE, related_name="source_rows")
    source = models.CharField(max_length=60)
    region = models.CharField(max_length=60, blank=True, help_text="Empty where it is the same everywhere")
    digest = models.CharField(max_length=64, blank=True, help_text="Of the settings that it depends on, at the call")
    generation = models.BigIntegerField(default=0, help_text="The refresh generation of its value")
    stamp = models.CharField(max_length=32, blank=True, help_text="Of the value in the cache; empty if there is none")
    empty = models.BooleanField(default=False, help_text="The value was empty, and is fresh for a few seconds only")
    fetched_at = models.DateTimeField(null=True, help_text="When the value was read")
    reading = models.BigIntegerField(
        db_default=0, help_text="The number of the call that read the value: it rises with each call of all sources"
    )
    refuted_reading = models.BigIntegerField(
        db_default=0,
        help_text="The last reading that had begun when an order was refused for lack of room: that one and earlier "
        "ones show room that is not there",
    )
    error: models.JSONField[Any, Any] = models.JSONField(
        null=True, encoder=DjangoJSONEncoder, help_text="Code and data of the latest failure since the last success"
    )
    asked_at = models.DateTimeField(null=True, help_text="When the latest call began")
    failed_at = models.DateTimeField(null=True)
    failures = models.PositiveIntegerField(default=0, help_text="In a row")
    used_at = models.DateTimeField(null=True, help_text="Last use, to some seconds")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["backend", "source", "region"], name="one_row_for_each_source")]
        ordering = ["backend", "source", "region"]

    def __str__(self) -> str:
        return f"{self.backend_id}: {self.source} {self.region}".rstrip()


class Result(models.Model):
    """A slot for a cached result of a backend; the least recently used one is replaced. Objects are stored by slot."""

    backend = models.ForeignKey(Backend, on_delete=models.CASCADE, related_name="results")
    slot = models.PositiveSmallIntegerField()
    digest = models.CharField(max_length=64, help_text="Of the version, the requirements and the image")
    used_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["backend", "slot"], name="one_result_in_each_slot"),
            models.UniqueConstraint(fields=["backend", "digest"], name="one_slot_for_each_result"),
        ]

    def __str__(self) -> str:
        return f"{self.backend_id}: {self.slot}"


class CacheCount(models.Model):
    """Statistics of the cache of a backend's offers in an hour, of all processes (docs/offers.md)."""

    backend = models.ForeignKey(Backend, on_delete=models.CASCADE, related_name="cache_counts")
    hour = models.DateTimeField()
    hits = models.BigIntegerField(default=0, help_text="Lookups answered from a cached result")
    misses = models.BigIntegerField(default=0, help_text="Lookups without a cached result")
    coalesced = models.BigIntegerField(default=0, help_text="Calls saved because one was already in progress")
    calls = models.BigIntegerField(default=0, help_text="Calls of the backend")
    failures = models.BigIntegerField(default=0, help_text="Failed calls")
    throttles = models.BigIntegerField(default=0, help_text="Throttled calls")
    stale_served = models.BigIntegerField(default=0, help_text="Answers with stale values")
    uncached = models.BigIntegerField(default=0, help_text="Calls that the answers would need without the cache")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["backend", "hour"], name="one_count_for_each_hour")]
        indexes = [models.Index(fields=["hour"], name="cache_counts_by_hour")]

    def __str__(self) -> str:
        return f"{self.backend_id}: {self.hour:%Y-%m-%d %H}"
