"""Fields that several tables of runs have, and counts by status."""

from __future__ import annotations

from collections.abc import Iterable

from django.core.validators import MaxValueValidator
from django.db import models

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
