"""Runs, their attempts' jobs, what the jobs hold, and the queues they wait in.

A status is written by `transitions` alone; a rank is written behind the row of its queue.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterable
from typing import Any, ClassVar

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from dstackweb.lib.models import watch_time
from dstackweb.runs.codes import DependencyOutcome
from dstackweb.runs.queue import ordering
from dstackweb.runs.states import ACTIVE, JobStatus, RunStatus

MAX_LIMIT = 1_000_000


def _values(statuses: Iterable[RunStatus | JobStatus]) -> list[str]:
    """Plain strings, which migrations can hold."""
    return [status.value for status in statuses]


def _status(kind: type[RunStatus] | type[JobStatus], default: RunStatus | JobStatus) -> models.CharField[str, str]:
    choices = [(value, value) for value in _values(kind)]
    return models.CharField(max_length=12, choices=choices, default=default.value)


def _limit(what: str) -> models.PositiveIntegerField[int | None, int | None]:
    """A limit of a queue; empty means none, 0 lets nothing start."""
    return models.PositiveIntegerField(
        null=True, blank=True, validators=[MaxValueValidator(MAX_LIMIT)], help_text=f"{what} Empty: no limit."
    )


def _count() -> models.PositiveIntegerField[int, int]:
    return models.PositiveIntegerField(default=0)


class Queue(models.Model):
    """The submitted runs of a project in their order. A transaction that changes the order updates this row first."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="queues")
    name = models.SlugField(max_length=60, default="default")
    ageing_minutes = models.PositiveIntegerField(
        null=True,
        blank=True,
        default=ordering.DEFAULT_AGEING_MINUTES,
        validators=[MinValueValidator(1), MaxValueValidator(60 * 24 * 365)],
        help_text="Minutes of waiting for +1 priority. Empty: strict priority.",
    )
    paused = models.BooleanField(default=False, help_text="No run starts from a paused queue; running runs continue.")
    draining = models.BooleanField(
        default=False, help_text="A draining queue accepts no new runs; waiting runs still start."
    )
    max_running = _limit("Runs of this queue that may be placed at once.")
    max_gpus = _limit("GPUs that the queue's runs may hold at once.")
    max_running_per_user = _limit("Runs that one member may have placed at once.")
    max_gpus_per_user = _limit("GPUs that one member's runs may hold at once.")
    preempt_points = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(ordering.PRIORITY_MAX)],
        help_text="A waiting run may displace preemptible runs with so many points of priority less. Empty: none.",
    )
    fair_share_minutes = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(60 * 24 * 30)],
        help_text="Fair share: most minutes that a run of a member who uses much ranks behind. Empty: off.",
    )
    fair_share_half_life_days = models.PositiveSmallIntegerField(
        default=7,
        validators=[MinValueValidator(1), MaxValueValidator(90)],
        help_text="Days after which past usage counts half for the fair share.",
    )
    last_seniority_us = models.BigIntegerField(default=0, editable=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "name"], name="queue_name_in_project")]
        ordering = ["project", "name"]

    def __str__(self) -> str:
        return f"{self.project}/{self.name}"

    @property
    def step_us(self) -> int:
        return ordering.step_us(self.ageing_minutes)

    @property
    def max_penalty_s(self) -> int:
        return (self.fair_share_minutes or 0) * 60


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


class QueueCount(StatusCount):
    """Those of a queue."""

    has_sweeps: bool
    """Whether a sweep of it is active: read by the queue page."""

    queue = models.OneToOneField(Queue, on_delete=models.CASCADE, primary_key=True, related_name="count")

    def __str__(self) -> str:
        return f"{self.queue}: version {self.version}"


class Archive(models.Model):
    """A working directory shipped with a run: a tar.gz named by its hash, kept once per project."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE)
    sha256 = models.CharField(max_length=64)
    size = models.BigIntegerField(help_text="bytes")
    key = models.CharField(max_length=200, help_text="Its file in the storage, a new one with each upload")
    created_at = models.DateTimeField(default=timezone.now)
    used_at = models.DateTimeField(default=timezone.now, help_text="When it was last uploaded, found or submitted")
    removed_at = models.DateTimeField(null=True, help_text="When its file was removed, because nobody used it")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "sha256"], name="archive_once_in_project")]
        indexes = [models.Index("used_at", condition=Q(removed_at=None), name="archive_by_use")]

    def __str__(self) -> str:
        return f"{self.sha256[:12]} ({self.size} bytes)"


class Sweep(models.Model):
    """Many runs of one file (`array`), which are created a few at a time (`sweeps.window`), each by its index from 0.

    `next_index` is the first one that was never created. Its row is locked behind that of its queue.
    """

    uid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="sweeps")
    queue = models.ForeignKey(Queue, on_delete=models.PROTECT, related_name="sweeps")
    user = models.ForeignKey("accounts.User", on_delete=models.PROTECT, related_name="sweeps")
    name = models.CharField(max_length=60)

    size = models.PositiveIntegerField(help_text="Runs in all")
    max_parallel = models.PositiveIntegerField(null=True, help_text="Of its runs so many are active at once; None: any")
    next_index = models.PositiveIntegerField(default=0)
    priority = models.PositiveSmallIntegerField(default=ordering.PRIORITY_DEFAULT)
    seniority_us = models.BigIntegerField(help_text="That of its submission, which all its runs have")
    waits_for_name = models.CharField(max_length=60, blank=True, help_text="Name of its next run, which is taken now")
    retry_before = models.DateTimeField(null=True, help_text="Runs that had failed by then are created once more")
    stopped_at = models.DateTimeField(null=True, help_text="From here on none is created that was not before")
    stopped_by = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    is_stopping = models.BooleanField(default=False, help_text="Its active runs are still to be stopped")
    is_aborted = models.BooleanField(default=False, help_text="They are stopped without time to end by themselves")

    shape = models.CharField(max_length=64)
    array: models.JSONField[Any, Any] = models.JSONField(help_text="`spec.array.Array`")
    spec: models.JSONField[Any, Any] = models.JSONField(help_text="EffectiveSpec of its runs, without their parameters")
    provenance: models.JSONField[Any, Any] = models.JSONField(default=dict)
    config_text = models.TextField(blank=True)
    env_secret = models.TextField(blank=True, help_text="Values taken from the client's environment, encrypted")
    archive = models.ForeignKey(Archive, null=True, on_delete=models.PROTECT)
    idempotency_key = models.CharField(max_length=200, blank=True)
    body_digest = models.CharField(max_length=64, blank=True)

    submitted_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True, help_text="When all its runs had ended")

    class Meta:
        constraints = [
            # As with runs: a name is free again once its sweep has ended.
            models.UniqueConstraint(
                fields=["project", "name"], condition=Q(ended_at=None), name="sweep_name_among_active"
            ),
            models.UniqueConstraint(
                fields=["project", "user", "idempotency_key"],
                condition=~Q(idempotency_key=""),
                name="sweep_idempotency_key",
            ),
        ]
        indexes = [
            # Those that each pass looks at, which are few.
            models.Index("id", condition=Q(ended_at=None), name="sweep_active"),
            models.Index("project", F("id").desc(), name="sweep_newest_in_project"),
            models.Index("project", "name", F("id").desc(), name="sweep_newest_of_name"),
        ]

    def __str__(self) -> str:
        return self.name


class SweepCount(StatusCount):
    """Those of a sweep; removed runs are in none."""

    sweep = models.OneToOneField(Sweep, on_delete=models.CASCADE, primary_key=True, related_name="count")

    def __str__(self) -> str:
        return f"{self.sweep}: version {self.version}"


class Run(models.Model):
    """A submitted run, with its spec as resolved at that moment."""

    uid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="runs")
    queue = models.ForeignKey(Queue, on_delete=models.PROTECT, related_name="runs")
    user = models.ForeignKey("accounts.User", on_delete=models.PROTECT, related_name="runs")
    name = models.CharField(max_length=60)
    sweep = models.ForeignKey(Sweep, null=True, on_delete=models.PROTECT, related_name="runs", db_index=False)
    sweep_index = models.PositiveIntegerField(null=True)

    status = _status(RunStatus, RunStatus.SUBMITTED)
    status_message = models.TextField(blank=True)
    status_detail: models.JSONField[Any, Any] = models.JSONField(
        default=dict, blank=True, help_text="Code and data of the server's own message (`runs.codes.MessageCode`)"
    )
    termination_reason = models.CharField(max_length=60, blank=True)
    exit_code = models.IntegerField(null=True)
    attempt = models.PositiveIntegerField(default=1)
    stop_reason = models.CharField(max_length=60, blank=True, help_text="Why it was stopped, while terminating")
    retry_at = models.DateTimeField(null=True, help_text="When a pending run enters the queue again")
    first_failed_at = models.DateTimeField(null=True, help_text="From here the retry's duration counts")

    priority = models.PositiveSmallIntegerField(default=ordering.PRIORITY_DEFAULT)
    seniority_us = models.BigIntegerField()
    penalty_s = models.BigIntegerField(
        default=0, help_text="Seconds that it ranks behind its seniority by its member's share; set when it is queued"
    )
    penalty_basis: models.JSONField[Any, Any] = models.JSONField(
        default=dict, help_text="The numbers that the penalty comes from (`fair_share.Basis`)"
    )
    rank = models.BigIntegerField()
    shape = models.CharField(max_length=64)
    queued_at = models.DateTimeField(
        default=timezone.now, help_text="When it last entered its queue: from here its waiting counts"
    )
    place_since = models.DateTimeField(
        default=timezone.now, help_text="While it waits: since when it has had this place in this queue (PastPlace)"
    )
    moved_at = models.DateTimeField(null=True, help_text="When a person last moved it by hand")
    moved_by = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    extended_s = models.PositiveIntegerField(default=0, help_text="Seconds by which people lengthened max_duration")

    spec: models.JSONField[Any, Any] = models.JSONField(help_text="EffectiveSpec, as resolved at submit")
    provenance: models.JSONField[Any, Any] = models.JSONField(default=dict)
    config_text = models.TextField(blank=True)
    env_secret = models.TextField(blank=True, help_text="Values taken from the client's environment, encrypted")
    archive = models.ForeignKey(Archive, null=True, on_delete=models.PROTECT)
    idempotency_key = models.CharField(max_length=200, blank=True)
    body_digest = models.CharField(max_length=64, blank=True)

    submitted_at = models.DateTimeField(default=timezone.now)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    version = models.BigIntegerField(default=0, help_text="Counts every visible change of the run or its jobs")

    class Meta:
        constraints = [
            # Names are free again once a run ends; two active runs never share one.
            models.UniqueConstraint(
                fields=["project", "name"], condition=Q(status__in=_values(ACTIVE)), name="run_name_among_active"
            ),
            models.UniqueConstraint(
                fields=["project", "user", "idempotency_key"],
                condition=~Q(idempotency_key=""),
                name="run_idempotency_key",
            ),
            # No index of a sweep is ever created twice, whoever creates its runs.
            models.UniqueConstraint(
                fields=["sweep", "sweep_index"], condition=Q(sweep__isnull=False), name="run_once_in_sweep"
            ),
            models.CheckConstraint(
                condition=Q(priority__gte=ordering.PRIORITY_MIN, priority__lte=ordering.PRIORITY_MAX),
                name="run_priority_0_to_100",
            ),
            models.CheckConstraint(condition=Q(status__in=_values(RunStatus)), name="run_status_known"),
        ]
        indexes = [
            # The next k of n are one index scan, however long the queue is. With the status (always the same) and the
            # shape in it, places are counted and shapes skipped without reading the rows themselves.
            models.Index(
                "queue", "status", "rank", "id", "shape", condition=Q(status="submitted"), name="run_queue_order"
            ),
            # The shapes that wait, and the next runs of each, without reading the others.
            models.Index(
                "queue", "status", "shape", "rank", "id", condition=Q(status="submitted"), name="run_queue_shape_order"
            ),
            models.Index("queue", "status", "seniority_us", condition=Q(status="submitted"), name="run_queue_oldest"),
            # Those that have had their places since before a moment, for the queue's past.
            models.Index(
                "queue", "status", "place_since", condition=Q(status="submitted"), name="run_queue_place_since"
            ),
            # How many wait at each priority, for the history, without reading the rows.
            models.Index("queue", "status", "priority", condition=Q(status="submitted"), name="run_queue_priority"),
            models.Index("project", F("id").desc(), name="run_newest_in_project"),
            models.Index("project", "name", F("id").desc(), name="run_newest_of_name"),
            models.Index("project", "status", F("id").desc(), name="run_newest_of_status"),
            # Whole, since SQLite never sees that one status is among several of a partial index's condition.
            models.Index("status", "retry_at", name="run_by_status"),
            # The runs to prune, oldest end first.
            models.Index("ended_at", condition=Q(ended_at__isnull=False), name="run_by_end"),
            # The failed or active runs of a sweep, in its order.
            models.Index(
                "sweep", "status", "sweep_index", condition=Q(sweep__isnull=False), name="run_of_sweep_by_status"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_hold(self) -> bool:
        """Whether it is a hold."""
        return bool(self.spec.get("hold"))

    @property
    def limit_s(self) -> int | None:
        """Seconds after which its jobs are stopped: `max_duration` and its extensions."""
        limit: int | None = self.spec.get("max_duration_s")
        return None if limit is None else limit + self.extended_s

    @property
    def held_until(self) -> dt.datetime | None:
        """When a running hold ends; None for any other run."""
        if not self.is_hold or self.status != RunStatus.RUNNING or self.started_at is None or self.limit_s is None:
            return None
        return self.started_at + dt.timedelta(seconds=self.limit_s)


class Dependency(models.Model):
    """A run's wait for the end of another, before it enters its queue. `on` and `otherwise` are of `spec.After`."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="dependencies")
    predecessor = models.ForeignKey(Run, null=True, on_delete=models.SET_NULL, related_name="followers")
    name = models.CharField(max_length=60, help_text="The predecessor's, which may be removed")
    on = models.CharField(max_length=10)
    otherwise = models.CharField(max_length=10)
    outcome = models.CharField(max_length=10, default=DependencyOutcome.WAITING.value)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "predecessor"], name="dependency_once")]
        indexes = [
            models.Index("predecessor", condition=Q(outcome="waiting"), name="dependency_waiting"),
        ]

    def __str__(self) -> str:
        return f"{self.run} after {self.name}: {self.outcome}"


class JobQuerySet(models.QuerySet["Job"]):
    def timed(self) -> models.QuerySet[Any]:
        """With `status_s` and `silent_s`."""
        now = watch_time()
        times = {"status_s": now - F("status_at_s"), "silent_s": now - F("heard_at_s")}
        return self.annotate(**times)


class Job(models.Model):
    """One node of one attempt of a run, on the capacity it was placed on."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="jobs")
    attempt = models.PositiveIntegerField()
    node = models.PositiveIntegerField(default=0)
    status = _status(JobStatus, JobStatus.PROVISIONING)

    backend = models.ForeignKey("backends.Backend", on_delete=models.PROTECT)
    host = models.ForeignKey("backends.Host", null=True, on_delete=models.PROTECT)
    instance = models.ForeignKey("backends.Instance", null=True, on_delete=models.RESTRICT, related_name="jobs")
    region = models.CharField(max_length=60, blank=True)
    instance_type = models.CharField(max_length=120, blank=True)
    is_spot = models.BooleanField(default=False, help_text="The cloud may take the machine back at any time")
    price = models.DecimalField(max_digits=10, decimal_places=4, default=0, help_text="USD per hour at the start")
    cpus = models.PositiveIntegerField(default=0)
    memory_mib = models.PositiveBigIntegerField(default=0)
    gpu_count = models.PositiveIntegerField(default=0, help_text="GPUs that it was placed on")
    gpus: models.JSONField[Any, Any] = models.JSONField(default=list, help_text="NVML UUIDs, where they are known")
    image_digest = models.CharField(max_length=300, blank=True, help_text="The image that its container was made of")

    claim_nonce = models.CharField(max_length=64, blank=True, help_text="The one runner that may execute this job")
    is_ready = models.BooleanField(
        default=False, help_text="Its runner has its image, if it needs one: the nodes of an attempt start together"
    )
    secrets_held = models.TextField(
        db_default="", help_text="The values of project secrets that its runners got, encrypted"
    )
    placed_at = models.DateTimeField(default=timezone.now)
    claimed_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    exited_at = models.DateTimeField(null=True, help_text="Its commands have ended, and what they left is being sent")
    reported_at = models.DateTimeField(
        null=True, help_text="Its runner has reported an end that may be its machine's; the cloud is asked for that"
    )
    ended_at = models.DateTimeField(null=True)
    exit_code = models.IntegerField(null=True)
    termination_reason = models.CharField(max_length=60, blank=True)
    message = models.TextField(blank=True)
    detail: models.JSONField[Any, Any] = models.JSONField(
        default=dict, blank=True, help_text="Code and data of the server's own message (`runs.codes.MessageCode`)"
    )
    stop_reason = models.CharField(max_length=60, blank=True)
    stop_grace_s = models.PositiveIntegerField(null=True)
    status_at_s = models.FloatField(default=0, help_text="When its status was set, in the watcher's time")
    log_size = models.BigIntegerField(null=True, help_text="bytes; known once the runner reported the end")
    log_missing = models.BigIntegerField(default=0, help_text="bytes of output that a log over its limit lacks")
    log_counted = models.BigIntegerField(default=0, help_text="bytes that ProjectLogs counts for its log")
    log_cut = models.CharField(
        max_length=20, blank=True, help_text="Why no more of its output is kept (`LogCut`); log_size is what was kept"
    )
    log_removed_at = models.DateTimeField(null=True, help_text="When its log was removed, because it was old")
    artifacts_left: models.JSONField[Any, Any] = models.JSONField(
        default=dict, blank=True, help_text="Files that were not kept: `left_out` (`path`, `why`, `size`) and `number`"
    )
    heard_at_s = models.FloatField(default=0, help_text="Its runner's last heartbeat, in the watcher's time")

    status_s: float
    silent_s: float
    """How long its status and its runner's silence have lasted, in the watcher's time: read by `objects.timed()`."""

    objects = JobQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "attempt", "node"], name="job_node_once_in_attempt"),
            models.CheckConstraint(condition=Q(status__in=_values(JobStatus)), name="job_status_known"),
        ]
        indexes = [
            models.Index("status", name="job_by_status"),
            # The cost of a month is read before each paid placement, and few jobs have a price.
            models.Index("ended_at", condition=Q(price__gt=0), name="job_priced_by_end"),
            # The logs to prune, oldest first.
            models.Index("ended_at", condition=Q(log_removed_at=None), name="job_log_by_end"),
            # The jobs that were there at a moment, for the queue's past.
            models.Index("ended_at", "placed_at", name="job_by_time"),
        ]

    def __str__(self) -> str:
        return f"{self.run} attempt {self.attempt} node {self.node}"


class Allocation(models.Model):
    """What a job holds of a host: a row for its CPUs and memory, and one for each GPU, which can be in one row only."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="allocations")
    host = models.ForeignKey("backends.Host", on_delete=models.PROTECT, related_name="allocations")
    gpu = models.OneToOneField("backends.Gpu", null=True, on_delete=models.PROTECT, related_name="allocation")
    cpus = models.PositiveIntegerField(default=0)
    memory_mib = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.job}: {self.gpu or f'{self.cpus} CPUs'}"


class RunEvent(models.Model):
    """An event of a run: a code with data (`runs.codes.RunEventKind`)."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(default=timezone.now)
    kind = models.CharField(max_length=60)
    actor = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL)
    attempt = models.PositiveIntegerField(default=1)
    node = models.PositiveIntegerField(null=True)
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)

    class Meta:
        indexes = [models.Index("run", "id", name="event_of_run")]
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.kind} of {self.run}"


class QueueEvent(models.Model):
    """A change of a queue's settings: `data` has `{setting: [old, new]}`."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(default=timezone.now)
    actor = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{', '.join(self.data)} of {self.queue}"


class Move(models.Model):
    """One move or priority change, which can be undone for a moment.

    `changes` has `[run id, place before, place after, moved before]` per run. A place is `[seniority_us, priority,
    penalty_s]`. The last is `[moved_at, moved_by id]` of a run that was moved itself, null for one that only gave way.
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="moves")
    user = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="+")
    at = models.DateTimeField(default=timezone.now)
    changes: models.JSONField[Any, Any] = models.JSONField()
    undone_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index("at", name="move_by_age")]

    def __str__(self) -> str:
        return f"{len(self.changes)} of {self.queue} by {self.user}"


class PastPlace(models.Model):
    """A place that a waiting run had in a queue, over a time that has ended; kept for `past.KEPT`.

    Its rank then follows from this and the queue's step then. The run's present place is in its own row, since
    `Run.place_since`. Written with each change of a place and as the run leaves, by one statement from its row.
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="+", db_index=False)
    run_id = models.BigIntegerField(help_text="Also of a run that has been deleted since; it orders equal ranks")
    since = models.DateTimeField()
    until = models.DateTimeField()
    queued_at = models.DateTimeField(help_text="From here its waiting counted")
    seniority_us = models.BigIntegerField()
    priority = models.PositiveSmallIntegerField()
    penalty_s = models.BigIntegerField()
    ended_by = models.CharField(max_length=12, help_text="`codes.PlaceEnd`")

    class Meta:
        indexes = [
            # Those of a moment: from the ones that ended after it, in the index alone.
            models.Index("queue", "until", "since", name="past_place_by_time"),
            # What happened next to a run.
            models.Index("run_id", "until", name="past_place_of_run"),
        ]

    def __str__(self) -> str:
        return f"run {self.run_id} in {self.queue} until {self.until:%Y-%m-%d %H:%M}: {self.ended_by}"


class QueueSpan(models.Model):
    """Waits and lengths of one queue and priority band (see `history.BANDS`) in a span; never computed from runs."""

    TIME: ClassVar[str]
    """The column with the beginning of the span, UTC."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="%(class)ss")
    band = models.PositiveSmallIntegerField()
    placed = models.PositiveIntegerField(default=0, help_text="Runs that left the queue to start")
    wait_s = models.BigIntegerField(default=0, help_text="Their waiting, seconds in all")
    wait_max_s = models.BigIntegerField(default=0)
    # How many waited up to so long, and longer than the column before: plain integers, so that they count atomically.
    waited_1m = _count()
    waited_5m = _count()
    waited_15m = _count()
    waited_1h = _count()
    waited_4h = _count()
    waited_12h = _count()
    waited_1d = _count()
    waited_longer = _count()
    length = models.PositiveIntegerField(null=True, help_text="Waiting runs when last sampled")
    length_max = models.PositiveIntegerField(null=True)

    class Meta:
        abstract = True


class QueueHour(QueueSpan):
    """An hour."""

    TIME = "hour"

    hour = models.DateTimeField(help_text="Its beginning, UTC")
    placed_removed = models.PositiveIntegerField(default=0, help_text="Of those of the project, runs removed since")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["queue", "band", "hour"], name="queue_hour_once")]
        indexes = [models.Index("hour", name="queue_hour_by_age")]

    def __str__(self) -> str:
        return f"{self.queue} band {self.band} {self.hour:%Y-%m-%d %H}:00"


class QueueSlot(QueueSpan):
    """Five minutes (`history.SLOT`), kept for `history.SLOTS_KEPT`."""

    TIME = "at"

    at = models.DateTimeField(help_text="Its beginning, UTC")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["queue", "band", "at"], name="queue_slot_once")]
        indexes = [models.Index("at", name="queue_slot_by_age")]

    def __str__(self) -> str:
        return f"{self.queue} band {self.band} {self.at:%Y-%m-%d %H:%M}"


class BudgetMark(models.Model):
    """A share of a project's monthly budget that it has spent: reported once a month."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="budget_marks")
    month = models.DateField(help_text="Its first day, UTC")
    percent = models.PositiveSmallIntegerField()
    at = models.DateTimeField(default=timezone.now)
    spent = models.DecimalField(max_digits=12, decimal_places=4, help_text="USD")
    budget = models.DecimalField(max_digits=12, decimal_places=2, help_text="USD")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "month", "percent"], name="budget_mark_once")]

    def __str__(self) -> str:
        return f"{self.project}: {self.percent} % in {self.month:%Y-%m}"


class RemovedRun(models.Model):
    """What is left of a removed run, until its files are gone everywhere: `removal` writes it."""

    uid = models.UUIDField(primary_key=True, editable=False)
    at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField()
    logs: models.JSONField[Any, Any] = models.JSONField(default=list, help_text="Ids of jobs whose logs remain")
    artifacts: models.JSONField[Any, Any] = models.JSONField(default=list, help_text="Keys of artifacts that remain")
    has_logs = models.BooleanField(default=True, help_text="Whether `logs` or `artifacts` has any")

    class Meta:
        indexes = [
            models.Index("at", name="removed_run_by_age"),
            models.Index("uid", condition=Q(has_logs=True), name="removed_run_with_logs"),
        ]

    def __str__(self) -> str:
        return str(self.uid)


class RemovedSpend(models.Model):
    """What removed runs have cost in a month beside instances, which keep their own cost."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="+")
    month = models.DateField(help_text="Its first day, UTC")
    usd = models.DecimalField(max_digits=16, decimal_places=6)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "month"], name="removed_spend_once")]

    def __str__(self) -> str:
        return f"{self.project} {self.month:%Y-%m}: {self.usd}"


class _Used(models.Model):
    """What ended jobs held and cost on one day (UTC), and the runs that ended on it."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="+")
    user = models.ForeignKey("accounts.User", on_delete=models.PROTECT, related_name="+")
    day = models.DateField(help_text="UTC")
    gpu_ms = models.BigIntegerField(default=0, help_text="GPU-milliseconds from placement to end")
    cpu_ms = models.BigIntegerField(default=0, help_text="CPU-milliseconds likewise")
    micro_usd = models.BigIntegerField(default=0, help_text="Millionths of a USD")
    done = _count()
    failed = _count()
    terminated = _count()

    class Meta:
        abstract = True


class UsageDay(_Used):
    """What a member used in a queue on one day, shifted where jobs and runs end; never computed from runs.

    `measured_ms` is the part of the GPU-milliseconds that samples cover, and `idle_ms` the idle part of that
    (`gpus.samples.idle`).
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="+")
    measured_ms = models.BigIntegerField(default=0)
    idle_ms = models.BigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "day", "user", "queue"], name="usage_day_once"),
        ]
        # Of the whole deployment.
        indexes = [models.Index("day", name="usage_by_day")]

    def __str__(self) -> str:
        return f"{self.user} in {self.queue} on {self.day}"


class RemovedUsage(_Used):
    """What of a member's usage belongs to removed runs, which a recount can't see any more."""

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "day", "user"], name="removed_usage_once")]

    def __str__(self) -> str:
        return f"{self.user} in {self.project} on {self.day}"


class MemberShare(models.Model):
    """A member's load in a queue with fair share (`fair_share.Load`), counted each minute and shifted by each run that
    enters. Members without any have no row."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="shares")
    user = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="+")
    used_gpu_ms = models.BigIntegerField(default=0, help_text="GPU-milliseconds, halved for each half-life since")
    held_gpus = _count()
    queued_gpus = _count()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["queue", "user"], name="member_share_once")]

    def __str__(self) -> str:
        return f"{self.user} in {self.queue}"


class ProjectLogs(models.Model):
    """What the logs of a project take: the sum of its jobs' `log_counted`."""

    project = models.OneToOneField("accounts.Project", on_delete=models.CASCADE, primary_key=True, related_name="+")
    bytes = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.project}: {self.bytes} bytes"


class Artifact(models.Model):
    """A file that a job left in its artifacts directory. It is there once `stored_at` is set; it counts from before."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="artifacts")
    path = models.CharField(max_length=512)
    size = models.BigIntegerField(help_text="bytes")
    sha256 = models.CharField(max_length=64)
    key = models.CharField(max_length=100, help_text="Its file in the storage")
    content_type = models.CharField(max_length=100, help_text="As guessed from its name")
    created_at = models.DateTimeField(default=timezone.now)
    stored_at = models.DateTimeField(null=True, help_text="When all of it had arrived")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "path"], name="artifact_once_in_job")]
        # The ones to prune, oldest first.
        indexes = [models.Index("created_at", name="artifact_by_age")]

    def __str__(self) -> str:
        return f"{self.path} of {self.job}"

    @property
    def name(self) -> str:
        """Without its folders."""
        return self.path.rpartition("/")[2]


class RunArtifacts(models.Model):
    """How many artifacts a run has, and what they take. The row stays when they were removed because they were old."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="artifacts")
    files = _count()
    bytes = models.BigIntegerField(default=0)
    removed_at = models.DateTimeField(null=True, help_text="When old ones were removed")

    def __str__(self) -> str:
        return f"{self.run}: {self.files} files, {self.bytes} bytes"


class ProjectArtifacts(models.Model):
    """What the artifacts of a project take."""

    project = models.OneToOneField("accounts.Project", on_delete=models.CASCADE, primary_key=True, related_name="+")
    bytes = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.project}: {self.bytes} bytes"


class Verdict(models.Model):
    """Why runs of one shape in one queue wait, written only when it changes. The shape "" is the whole queue."""

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="verdicts")
    shape = models.CharField(max_length=64)
    reason = models.CharField(max_length=40)
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)
    at = models.DateTimeField(default=timezone.now)
    logged_at = models.DateTimeField(default=timezone.now, help_text="From here its time is not in a PastVerdict yet")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["queue", "shape"], name="verdict_per_shape")]

    def __str__(self) -> str:
        return f"{self.queue} {self.shape[:8]}: {self.reason}"


class PastVerdict(models.Model):
    """Why runs of a shape waited over a time that has ended; kept for `past.KEPT`.

    One row for each reason, and for each `past_verdicts.LOGGED_EVERY` with other numbers: those that it ended with.
    """

    queue = models.ForeignKey(Queue, on_delete=models.CASCADE, related_name="+", db_index=False)
    shape = models.CharField(max_length=64)
    since = models.DateTimeField()
    until = models.DateTimeField()
    reason = models.CharField(max_length=40)
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)

    class Meta:
        indexes = [
            models.Index("queue", "shape", "until", name="past_verdict_by_time"),
            # The ones to prune, oldest first.
            models.Index("until", name="past_verdict_by_age"),
        ]

    def __str__(self) -> str:
        return f"{self.queue} {self.shape[:8]} until {self.until:%Y-%m-%d %H:%M}: {self.reason}"


class StartEstimate(models.Model):
    """When a waiting run starts, as it was last told; written only when that changes by more than a little.

    `first` and `last` are what was told first and last (`start_estimates.Telling`), to be compared with the start.
    """

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="start_estimate")
    p50 = models.DateTimeField(null=True, help_text="As likely before as after; null: no estimate")
    p90 = models.DateTimeField(null=True, help_text="Nine of ten such runs have started by then")
    basis = models.CharField(max_length=20)
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)
    first: models.JSONField[Any, Any] = models.JSONField(null=True)
    last: models.JSONField[Any, Any] = models.JSONField(null=True)

    def __str__(self) -> str:
        return f"{self.run}: {self.basis} {self.p50 or ''}"


class StartScore(models.Model):
    """Starts beside what was told of them: how many took so much of the time told, and how many were in time.

    `quantile` is 50 or 90, `horizon` an index into `start_estimates.HORIZONS_S`, `bin` the time until the start divided
    by the simulated one (`start_estimates.RATIOS`).
    """

    quantile = models.PositiveSmallIntegerField()
    horizon = models.PositiveSmallIntegerField()
    bin = models.PositiveSmallIntegerField()
    starts = _count()
    in_time = models.PositiveIntegerField(default=0, help_text="Of these, started by the time told")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["quantile", "horizon", "bin"], name="start_score_once"),
            models.CheckConstraint(condition=Q(in_time__lte=F("starts")), name="start_score_in_time"),
        ]

    def __str__(self) -> str:
        return f"P{self.quantile}, horizon {self.horizon}: {self.in_time} of {self.starts} in bin {self.bin}"


class LearnedDuration(models.Model):
    """How many ended runs of a member whose names have a prefix lasted so long (`learned_durations.BINS`).

    The prefix "" has what a project with too many prefixes did not count apart.
    """

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="+")
    prefix = models.CharField(max_length=60)
    user = models.ForeignKey("accounts.User", on_delete=models.CASCADE, related_name="+")
    bin = models.PositiveSmallIntegerField()
    runs = _count()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "prefix", "user", "bin"], name="learned_duration_once")
        ]

    def __str__(self) -> str:
        return f"{self.project} {self.prefix!r} of {self.user}: {self.runs} in bin {self.bin}"
