"""What is known of backends' sources, which results are kept, and what the cache has done: rows, without the objects.

The objects themselves lie in the cache (`store`), each under a random stamp that its row names.
"""

from __future__ import annotations

from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models

from dstackweb.backends.models import Backend


class SourceRow(models.Model):
    """One source of a backend in one region: its last good value by its stamp, and its latest failure beside that."""

    backend = models.ForeignKey(Backend, on_delete=models.CASCADE, related_name="source_rows")
    source = models.CharField(max_length=60)
    region = models.CharField(max_length=60, blank=True, help_text="Empty where it is the same everywhere")
    version = models.BigIntegerField(default=0, help_text="The backend's version that it was asked under")
    generation = models.BigIntegerField(default=0, help_text="The refresh by hand that its value answers")
    stamp = models.CharField(max_length=32, blank=True, help_text="Of the value in the cache; empty: there is none")
    empty = models.BooleanField(default=False, help_text="The value was empty, which counts for a few seconds only")
    fetched_at = models.DateTimeField(null=True, help_text="When the value was had")
    asked_at = models.DateTimeField(null=True, help_text="When it was last asked for, whatever came of it")
    error: models.JSONField[Any, Any] = models.JSONField(
        null=True, encoder=DjangoJSONEncoder, help_text="Code and data of the latest failure, if none was better since"
    )
    failed_at = models.DateTimeField(null=True)
    failures = models.PositiveIntegerField(default=0, help_text="In a row")
    used_at = models.DateTimeField(null=True, help_text="When somebody last looked at it, to some seconds")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["backend", "source", "region"], name="one_row_for_each_source"),
        ]
        ordering = ["backend", "source", "region"]

    def __str__(self) -> str:
        return f"{self.backend_id}: {self.source} {self.region}".rstrip()


class Result(models.Model):
    """Which of a backend's few slots for results belongs to which question; the one unused for longest is given away.

    As each object lies under its slot, there are never more of them than slots.
    """

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
    """What the cache of a backend's offers has done in an hour, by all processes together. docs/offers.md says more."""

    backend = models.ForeignKey(Backend, on_delete=models.CASCADE, related_name="cache_counts")
    hour = models.DateTimeField()
    hits = models.BigIntegerField(default=0, help_text="Questions answered from a kept result")
    misses = models.BigIntegerField(default=0, help_text="Questions for which there was none")
    coalesced = models.BigIntegerField(default=0, help_text="Calls that somebody else was at already")
    calls = models.BigIntegerField(default=0, help_text="Times that the backend itself was asked")
    failures = models.BigIntegerField(default=0, help_text="Those of them that came to nothing")
    throttles = models.BigIntegerField(default=0, help_text="Failures because it was asked too often")
    stale_served = models.BigIntegerField(default=0, help_text="Answers made of something older than it should be")
    uncached = models.BigIntegerField(default=0, help_text="Calls that the answers would have cost without the cache")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["backend", "hour"], name="one_count_for_each_hour"),
        ]
        indexes = [models.Index(fields=["hour"], name="cache_counts_by_hour")]

    def __str__(self) -> str:
        return f"{self.backend_id}: {self.hour:%Y-%m-%d %H}"
