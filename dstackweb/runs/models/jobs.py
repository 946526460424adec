"""Jobs: what they hold of hosts, the files that they leave, and the use and health of what they serve."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.translation import gettext as _, pgettext

from dstackweb.accounts.models import Project
from dstackweb.lib.models import watch_time
from dstackweb.runs.models.queues import count_field, status_field, status_values
from dstackweb.runs.models.runs import Run
from dstackweb.runs.states import JobStatus


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
    status = status_field(JobStatus, JobStatus.PROVISIONING)

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
        default=dict, blank=True, help_text="Code and data of the server's own message"
    )
    stop_reason = models.CharField(max_length=60, blank=True)
    stop_grace_s = models.PositiveIntegerField(null=True)
    status_at_s = models.FloatField(default=0, help_text="When its status was set, in the watcher's time")
    log_size = models.BigIntegerField(null=True, help_text="Bytes; known once the runner reported the end")
    log_missing = models.BigIntegerField(default=0, help_text="Bytes of output that a log over its limit lacks")
    log_counted = models.BigIntegerField(default=0, help_text="Bytes of its log that count toward its project’s quota")
    log_cut = models.CharField(max_length=20, blank=True, help_text="Why no more of its output is kept")
    log_removed_at = models.DateTimeField(null=True, help_text="When its log was removed, because it was old")
    artifacts_left: models.JSONField[Any, Any] = models.JSONField(
        default=dict, blank=True, help_text="Files that were not kept, and their number"
    )
    heard_at_s = models.FloatField(default=0, help_text="Its runner's last heartbeat, in the watcher's time")

    status_s: float
    silent_s: float
    """How long its status and its runner's silence have lasted, in the watcher's time: read by `objects.timed()`."""

    objects = JobQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "attempt", "node"], name="job_node_once_in_attempt"),
            models.CheckConstraint(condition=Q(status__in=status_values(JobStatus)), name="job_status_known"),
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
        where = _("attempt %(attempt)s, node %(node)s") % {"attempt": self.attempt, "node": self.node}
        return str(self.run) + pgettext("clause", ", ") + where


class Allocation(models.Model):
    """What a job holds of a host: a row for its CPUs and memory, and one for each GPU, which can be in one row only."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="allocations")
    host = models.ForeignKey("backends.Host", on_delete=models.PROTECT, related_name="allocations")
    gpu = models.OneToOneField("backends.Gpu", null=True, on_delete=models.PROTECT, related_name="allocation")
    cpus = models.PositiveIntegerField(default=0)
    memory_mib = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.job}: {self.gpu or f'{self.cpus} × CPU'}"


class _ProjectBytes(models.Model):
    """What files of one kind of a project take."""

    project = models.OneToOneField("accounts.Project", on_delete=models.CASCADE, primary_key=True, related_name="+")
    bytes = models.BigIntegerField(default=0)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.project}: {self.bytes} bytes"

    @classmethod
    def used(cls, project: Project) -> int:
        return cls._default_manager.filter(pk=project.pk).values_list("bytes", flat=True).first() or 0

    @classmethod
    def take(cls, project_id: int, size: int, most: int) -> bool:
        """Count `size` bytes more, unless that makes more than `most`; whether it was done. The row is there."""
        return bool(cls._default_manager.filter(pk=project_id, bytes__lte=most - size).update(bytes=F("bytes") + size))

    @classmethod
    def uncount(cls, freed: Mapping[int, int]) -> None:
        """Take bytes, by project, out of the counts. Call inside a transaction that has locked what they are of."""
        for project_id, size in sorted(freed.items()):
            if size:
                cls._default_manager.filter(pk=project_id).update(bytes=F("bytes") - size)


class ProjectLogs(_ProjectBytes):
    """The sum of `log_counted` of its jobs."""


class Artifact(models.Model):
    """A file that a job left in its artifacts directory. It is there once `stored_at` is set; it counts from before."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="artifacts")
    path = models.CharField(max_length=512)
    size = models.BigIntegerField(help_text="Bytes")
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
        return f"{self.job}: {self.path}"

    @property
    def name(self) -> str:
        """Without its folders."""
        return self.path.rpartition("/")[2]


class RunArtifacts(models.Model):
    """How many artifacts a run has, and what they take. The row stays when they were removed because they were old."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="artifacts")
    files = count_field()
    bytes = models.BigIntegerField(default=0)
    removed_at = models.DateTimeField(null=True, help_text="When old ones were removed")

    def __str__(self) -> str:
        return f"{self.run}: {self.files} files, {self.bytes} bytes"


class ProjectArtifacts(_ProjectBytes):
    """The sum of the sizes of its artifacts."""


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
