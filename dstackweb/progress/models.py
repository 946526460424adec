"""Counters of tasks by prefix and group, and what keeps them right under retries, duplicates and reordering.

All counters of one scope are shifted behind the scope's row, in the transaction that records what they count
(`counters.shift`). Moments are whole milliseconds since 1970 (UTC), by this server's clock.
"""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

NAME_MAX = 200
"""Characters of a prefix, and of a group."""
KEY_MAX = 300


class Counts(models.Model):
    """How many tasks are in each state (states.TaskState), and what their processing took."""

    memory = models.BigIntegerField(default=0)
    erred = models.BigIntegerField(default=0)
    released = models.BigIntegerField(default=0)
    processing = models.BigIntegerField(default=0)
    queued = models.BigIntegerField(default=0)
    no_worker = models.BigIntegerField(default=0)
    waiting = models.BigIntegerField(default=0)
    forgotten = models.BigIntegerField(default=0, help_text="Finished, and dropped by who reported them")
    total = models.BigIntegerField(default=0, help_text="All of these")

    duration_n = models.BigIntegerField(default=0, help_text="Tasks whose processing was timed")
    duration_s = models.FloatField(default=0, help_text="Their processing, seconds in all")
    duration_ewma_s = models.FloatField(null=True, help_text="Moving average: each batch weighs half, as Dask's does")

    version = models.BigIntegerField(default=0, help_text="The scope's version at the last change")
    changed_ms = models.BigIntegerField(default=0)

    class Meta:
        abstract = True


class Rated(models.Model):
    """How fast tasks finish: finishes that are forgotten exponentially, over one and over ten minutes."""

    first_ms = models.BigIntegerField(default=0, help_text="When the first of its tasks was heard of")
    finished_1m = models.FloatField(default=0, help_text="Finishes, each weighing exp(-age / 1 min), at rated_ms")
    finished_10m = models.FloatField(default=0, help_text="Likewise with 10 min")
    rated_ms = models.BigIntegerField(default=0)

    class Meta:
        abstract = True


class Scope(Counts, Rated):
    """What one progress page tells of: a project's runs (`run_id` 0), or the tasks inside one attempt of a run.

    Every writer updates this row first; it holds the sums of its prefixes, so that totals are one row, too.
    """

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="+")
    run_id = models.BigIntegerField(default=0)
    attempt = models.PositiveIntegerField(default=0)
    prefixes = models.IntegerField(default=0)
    groups = models.IntegerField(default=0, help_text="Groups that have tasks which are not forgotten")
    tasks = models.IntegerField(default=0, help_text="Rows of Task, for the limit")
    counted = models.IntegerField(default=0, help_text="Rows of ReporterCount, for the limit")
    ended_ms = models.BigIntegerField(null=True, help_text="The attempt is over: its live states are to be released")
    settled = models.BooleanField(default=False, help_text="They have been; nothing changes any more")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "run_id", "attempt"], name="progress_scope_once")]
        indexes = [
            models.Index("run_id", "attempt", name="progress_scope_of_run"),
            models.Index("ended_ms", condition=Q(ended_ms__isnull=False), name="progress_scope_by_end"),
            models.Index("run_id", condition=Q(ended_ms__isnull=True), name="progress_scope_open"),
            models.Index(
                "ended_ms", condition=Q(ended_ms__isnull=False, settled=False), name="progress_scope_to_settle"
            ),
        ]

    def __str__(self) -> str:
        if not self.run_id:
            return f"runs of {self.project}"
        return f"tasks of run {self.run_id} attempt {self.attempt}"


class TaskPrefix(Counts, Rated):
    """All tasks of a scope whose names begin alike."""

    scope = models.ForeignKey(Scope, on_delete=models.CASCADE, related_name="task_prefixes", db_index=False)
    name = models.CharField(max_length=NAME_MAX)
    groups = models.IntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["scope", "name"], name="progress_prefix_once")]

    def __str__(self) -> str:
        return self.name


class TaskGroup(Counts):
    """The tasks of a prefix that were submitted together. Deleted when all of them are forgotten.

    Its own `forgotten`, and with it its total, counts from its last making: prefix and scope know of all of them.
    """

    prefix = models.ForeignKey(TaskPrefix, on_delete=models.CASCADE, related_name="task_groups", db_index=False)
    name = models.CharField(max_length=NAME_MAX)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["prefix", "name"], name="progress_group_once")]
        indexes = [
            models.Index("prefix", "id", name="progress_group_page"),
            models.Index("prefix", "id", condition=Q(erred__gt=0), name="progress_group_erred"),
        ]

    def __str__(self) -> str:
        return self.name


class Reporter(models.Model):
    """Who tells of tasks: a process with `tracking`, a Dask scheduler, a job's own output."""

    scope = models.ForeignKey(Scope, on_delete=models.CASCADE, related_name="reporters", db_index=False)
    name = models.CharField(max_length=100)
    last_seq = models.BigIntegerField(default=0)
    last_ms = models.BigIntegerField(default=0, help_text="When it was last heard")
    ended_seq = models.BigIntegerField(
        null=True, help_text="It has ended: what it said of live tasks up to here means released"
    )

    class Meta:
        constraints = [models.UniqueConstraint(fields=["scope", "name"], name="progress_reporter_once")]

    def __str__(self) -> str:
        return self.name


class Task(models.Model):
    """One task that was reported by itself. Its prefix and group are those of the first event that named it.

    Rows are many and written often: foreign keys are not checked by the database, and no index holds the state.
    """

    scope = models.ForeignKey(Scope, on_delete=models.CASCADE, related_name="+", db_index=False, db_constraint=False)
    prefix = models.ForeignKey(
        TaskPrefix, on_delete=models.CASCADE, related_name="+", db_index=False, db_constraint=False
    )
    group = models.ForeignKey(
        TaskGroup,
        null=True,
        on_delete=models.DO_NOTHING,
        related_name="+",
        db_index=False,
        db_constraint=False,
        help_text="Null once it is forgotten: a tombstone until the attempt ends",
    )
    reporter = models.ForeignKey(
        Reporter, on_delete=models.CASCADE, related_name="+", db_index=False, db_constraint=False
    )
    key = models.CharField(max_length=KEY_MAX)
    state = models.SmallIntegerField(help_text="states.CODES")
    seq = models.BigIntegerField(help_text="Of the event that it follows; rises per reporter")
    since_ms = models.BigIntegerField(help_text="When it entered this state")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["scope", "key"], name="progress_task_once")]
        indexes = [
            models.Index("group", "id", name="progress_task_of_group"),
            models.Index("reporter", name="progress_task_of_reporter"),
        ]

    def __str__(self) -> str:
        return self.key


class ReporterCount(models.Model):
    """What a reporter of absolute counts said last of one group: later counts are differences against it.

    Kept for groups whose tasks are all forgotten, too, until the attempt ends, so that a repeated batch adds nothing.
    """

    reporter = models.ForeignKey(
        Reporter, on_delete=models.CASCADE, related_name="counts", db_index=False, db_constraint=False
    )
    prefix = models.ForeignKey(
        TaskPrefix, on_delete=models.CASCADE, related_name="+", db_index=False, db_constraint=False
    )
    group = models.CharField(max_length=NAME_MAX, help_text="Its name")
    seq = models.BigIntegerField()
    memory = models.BigIntegerField(default=0)
    erred = models.BigIntegerField(default=0)
    released = models.BigIntegerField(default=0)
    processing = models.BigIntegerField(default=0)
    queued = models.BigIntegerField(default=0)
    no_worker = models.BigIntegerField(default=0)
    waiting = models.BigIntegerField(default=0)
    forgotten = models.BigIntegerField(default=0)
    duration_n = models.BigIntegerField(default=0)
    duration_s = models.FloatField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["reporter", "prefix", "group"], name="progress_count_once")]

    def __str__(self) -> str:
        return f"{self.group} as told by {self.reporter}"


class TaskFailure(models.Model):
    """A task that has failed and what it said. Goes when the task is done after all."""

    scope = models.ForeignKey(Scope, on_delete=models.CASCADE, related_name="+", db_index=False)
    prefix = models.ForeignKey(TaskPrefix, on_delete=models.CASCADE, related_name="+", db_index=False)
    key = models.CharField(max_length=KEY_MAX)
    group = models.CharField(max_length=NAME_MAX, help_text="Its name")
    message = models.TextField(blank=True)
    seq = models.BigIntegerField()
    at_ms = models.BigIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["scope", "key"], name="progress_failure_once")]
        indexes = [
            models.Index("prefix", F("at_ms").desc(), F("id").desc(), name="progress_failure_newest"),
            models.Index("scope", F("at_ms").desc(), F("id").desc(), name="progress_failure_of_scope"),
        ]

    def __str__(self) -> str:
        return f"{self.key}: {self.message[:60]}"
