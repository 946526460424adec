"""Counters of tasks by prefix and group, and the rows that keep them exact under retries, duplicates and reordering.

All counters of a scope change while the scope's row is locked, in the transaction that writes the rows they count
(`counters.shift`). Times are milliseconds since 1970 (UTC) by the server's clock.
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import F, Q

NAME_MAX = 200
"""Characters of a prefix, and of a group."""
KEY_MAX = 300


HAS_FAILED = Q(erred__gt=0) | Q(released_failed__gt=0) | Q(forgotten_failed__gt=0)


class StateCounts(models.Model):
    """Number of tasks in each state (states.TaskState), and their processing times."""

    memory = models.BigIntegerField(default=0)
    released_done = models.BigIntegerField(default=0)
    forgotten_done = models.BigIntegerField(default=0)
    erred = models.BigIntegerField(default=0)
    released_failed = models.BigIntegerField(default=0)
    forgotten_failed = models.BigIntegerField(default=0)
    released = models.BigIntegerField(default=0, help_text="Neither done nor failed before, or not known")
    processing = models.BigIntegerField(default=0)
    queued = models.BigIntegerField(default=0)
    no_worker = models.BigIntegerField(default=0)
    waiting = models.BigIntegerField(default=0)
    forgotten = models.BigIntegerField(
        default=0, help_text="Dropped by their reporter: neither done nor failed before, or not known"
    )
    duration_n = models.BigIntegerField(default=0, help_text="Number of timed tasks")
    duration_s = models.FloatField(default=0, help_text="Total processing time of timed tasks, seconds")

    class Meta:
        abstract = True


class StateCounters(StateCounts):
    """The counters of a scope, a prefix or a group."""

    total = models.BigIntegerField(default=0, help_text="Sum of all states")
    duration_ewma_s = models.FloatField(null=True, help_text="Moving average: each batch weighs half, as in Dask")

    version = models.BigIntegerField(default=0, help_text="The scope's version at the last change")
    changed_ms = models.BigIntegerField(default=0)

    class Meta:
        abstract = True


class RateCounters(models.Model):
    """Finished tasks in two exponential windows, of one minute and ten minutes, and all that a time left needs."""

    first_ms = models.BigIntegerField(default=0, help_text="Time of the first report")
    finished_1m = models.FloatField(
        default=0, help_text="Finished tasks weighted by exp(-age / 1 min), at the time of the rates"
    )
    finished_10m = models.FloatField(default=0, help_text="The same with 10 min")
    rated_ms = models.BigIntegerField(default=0)
    pace: models.JSONField[Any, Any] = models.JSONField(
        default=list, db_default=[], help_text="Sums of the pace of work"
    )

    class Meta:
        abstract = True


class Scope(StateCounters, RateCounters):
    """What one progress page counts: a project's runs (`run_id` 0), or the tasks of one attempt of a run.

    Every writer locks this row first. It also holds the sums of its prefixes, so totals are read from one row.
    """

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="+")
    run_id = models.BigIntegerField(default=0)
    attempt = models.PositiveIntegerField(default=0)
    prefixes = models.IntegerField(default=0)
    groups = models.IntegerField(default=0, help_text="Number of groups")
    tasks = models.IntegerField(default=0, help_text="Number of tasks kept one by one")
    counted = models.IntegerField(default=0, help_text="Number of counts by reporter")
    ended_ms = models.BigIntegerField(null=True, help_text="End of the attempt: its live tasks are to be released")
    quiet_ms = models.BigIntegerField(
        default=0, db_default=0, help_text="End of the latest silence of its reporters: that was no time of work"
    )
    time_left: models.JSONField[Any, Any] = models.JSONField(
        default=list, db_default=[], help_text="Of a run: the estimate that is shown"
    )
    settled = models.BooleanField(default=False, help_text="Live tasks of the ended attempt were released")

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
            return str(self.project)
        return f"{self.project} {self.run_id}/{self.attempt}"


class TaskPrefix(StateCounters, RateCounters):
    """The tasks of a scope whose names begin alike."""

    scope = models.ForeignKey(Scope, on_delete=models.CASCADE, related_name="task_prefixes", db_index=False)
    name = models.CharField(max_length=NAME_MAX)
    groups = models.IntegerField(default=0)
    durations: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="{bin of estimate.BINS: tasks}, of the timed tasks that were reported one by one"
    )
    failing: models.JSONField[Any, Any] = models.JSONField(
        default=dict, db_default={}, help_text="What failing.Watch keeps, to see a rise of the share of failures"
    )

    class Meta:
        constraints = [models.UniqueConstraint(fields=["scope", "name"], name="progress_prefix_once")]

    def __str__(self) -> str:
        return self.name


class TaskGroup(StateCounters):
    """The tasks of a prefix that were submitted together.

    Deleted when all of them are forgotten and the scope has many groups (counters.GROUPS_KEPT). Its forgotten tasks and
    its total count from its latest creation; prefix and scope count all forgotten tasks.
    """

    prefix = models.ForeignKey(TaskPrefix, on_delete=models.CASCADE, related_name="task_groups", db_index=False)
    name = models.CharField(max_length=NAME_MAX)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["prefix", "name"], name="progress_group_once")]
        indexes = [
            models.Index("prefix", "id", name="progress_group_page"),
            models.Index("prefix", "id", condition=HAS_FAILED, name="progress_group_erred"),
        ]

    def __str__(self) -> str:
        return self.name


class Reporter(models.Model):
    """A source of reports: a process that uses `tracking`, a Dask scheduler, or a job's output."""

    scope = models.ForeignKey(Scope, on_delete=models.CASCADE, related_name="reporters", db_index=False)
    name = models.CharField(max_length=100)
    last_ms = models.BigIntegerField(default=0, help_text="Time of its latest report")
    due_ms = models.BigIntegerField(
        null=True, help_text="It is silent if nothing came by then; null: it promised nothing"
    )
    unfinished = models.BigIntegerField(default=0, help_text="Live tasks of which its report is the newest")
    ended_seq = models.BigIntegerField(
        null=True, help_text="It has ended: live tasks that it reported up to here are released"
    )

    class Meta:
        constraints = [models.UniqueConstraint(fields=["scope", "name"], name="progress_reporter_once")]

    def __str__(self) -> str:
        return self.name


class Task(models.Model):
    """One task that was reported with its name. Its prefix and group are those of its first event.

    There are many rows with many writes, so the database checks no foreign keys and no index contains the state.
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
        help_text="Null for a forgotten task, which is kept until the attempt ends",
    )
    reporter = models.ForeignKey(
        Reporter, on_delete=models.CASCADE, related_name="+", db_index=False, db_constraint=False
    )
    key = models.CharField(max_length=KEY_MAX)
    state = models.SmallIntegerField(help_text="states.CODES")
    seq = models.BigIntegerField(help_text="Of the latest event; increases per reporter")
    since_ms = models.BigIntegerField(help_text="When it entered this state")
    before = models.BigIntegerField(
        null=True, help_text="Of a released or forgotten task: its newest other report (task_events.Before)"
    )
    before_by = models.BigIntegerField(null=True, help_text="The reporter of `before`")
    message = models.TextField(db_default="", help_text="The newest one; of a failure: TaskFailure.message")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["scope", "key"], name="progress_task_once")]
        indexes = [
            models.Index("group", "id", name="progress_task_of_group"),
            models.Index("reporter", name="progress_task_of_reporter"),
        ]

    def __str__(self) -> str:
        return self.key


class ReporterCount(StateCounts):
    """The latest absolute counts of a group by a reporter. Later counts are applied as differences to it.

    Also kept for groups whose tasks are all forgotten, until the attempt ends, so that repeated batches add nothing.
    """

    reporter = models.ForeignKey(
        Reporter, on_delete=models.CASCADE, related_name="counts", db_index=False, db_constraint=False
    )
    prefix = models.ForeignKey(
        TaskPrefix, on_delete=models.CASCADE, related_name="+", db_index=False, db_constraint=False
    )
    group = models.CharField(max_length=NAME_MAX, help_text="Name of the group")
    seq = models.BigIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["reporter", "prefix", "group"], name="progress_count_once")]

    def __str__(self) -> str:
        return f"{self.group} reported by {self.reporter}"


class TaskFailure(models.Model):
    """A failed task and its message. Deleted when the task is done after a retry."""

    scope = models.ForeignKey(Scope, on_delete=models.CASCADE, related_name="+", db_index=False)
    prefix = models.ForeignKey(TaskPrefix, on_delete=models.CASCADE, related_name="+", db_index=False)
    key = models.CharField(max_length=KEY_MAX)
    group = models.CharField(max_length=NAME_MAX, help_text="Name of the group")
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
