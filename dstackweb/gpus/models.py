"""What was seen of GPUs, which policy a job is held to, and what came of it.

Moments of samples are whole milliseconds since 1970 (UTC), as the machine that took them had it: both databases count
and group by them alike.
"""

from __future__ import annotations

from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone


class GpuSeries(models.Model):
    """The samples of one GPU under one job, or (`job` null) of a host's GPU while no job holds it.

    It has what was seen last, so that no page looks for the newest sample; and for a job, how far the GPU's low stretch
    has come (`window`), so that each sample costs the same however long the window is.
    """

    job = models.ForeignKey("runs.Job", null=True, on_delete=models.CASCADE, related_name="gpu_series")
    gpu = models.ForeignKey("backends.Gpu", null=True, on_delete=models.SET_NULL, related_name="series")
    uuid = models.CharField(max_length=80, help_text="NVML's, of a GPU or of a MIG device")
    index = models.PositiveSmallIntegerField(default=0, help_text="NVML's index on its machine")
    name = models.CharField(max_length=120, blank=True)
    memory_mib = models.PositiveBigIntegerField(null=True)
    power_limit_w = models.PositiveSmallIntegerField(null=True)

    first_ms = models.BigIntegerField(null=True, help_text="Its oldest sample that is still kept")
    last_ms = models.BigIntegerField(null=True, help_text="Its newest sample")
    utilization = models.PositiveSmallIntegerField(null=True, help_text="Percent; null: it could not be read")
    memory_used_mib = models.PositiveBigIntegerField(null=True)
    power_w = models.PositiveSmallIntegerField(null=True)
    temperature_c = models.SmallIntegerField(null=True)
    throttle = models.BigIntegerField(null=True, help_text="NVML's bits of why its clocks are held down")
    processes: models.JSONField[Any, Any] = models.JSONField(
        default=list, help_text='[{"pid", "user", "memory_mib"}] at the newest sample'
    )

    low_since_ms = models.BigIntegerField(
        null=True, help_text="First sample of the unbroken stretch below the policy's minimum that goes on"
    )
    low_last_ms = models.BigIntegerField(null=True, help_text="Newest sample that could be judged")
    averaged_ms = models.BigIntegerField(default=0, help_text="Up to here its samples are in averages")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "uuid"], name="gpu_series_of_job"),
            models.UniqueConstraint(fields=["gpu"], condition=Q(job=None), name="gpu_series_of_no_job"),
        ]
        indexes = [
            models.Index("uuid", F("id").desc(), name="gpu_series_of_uuid"),
            # What still has samples, oldest first, for averaging and pruning.
            models.Index("first_ms", condition=Q(first_ms__isnull=False), name="gpu_series_by_oldest"),
        ]
        verbose_name_plural = "GPU series"

    def __str__(self) -> str:
        return f"{self.uuid} of {self.job or 'no job'}"


class GpuSample(models.Model):
    """What one GPU did at one moment. What could not be read is null, and a sample that failed is no row at all."""

    series = models.ForeignKey(GpuSeries, on_delete=models.CASCADE, related_name="samples", db_index=False)
    at_ms = models.BigIntegerField()
    utilization = models.PositiveSmallIntegerField(null=True, help_text="Percent")
    memory_used_mib = models.PositiveIntegerField(null=True)
    power_w = models.PositiveSmallIntegerField(null=True)
    temperature_c = models.SmallIntegerField(null=True)
    throttle = models.BigIntegerField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["series", "at_ms"], name="gpu_sample_once")]

    def __str__(self) -> str:
        return f"{self.series_id} at {self.at_ms}: {self.utilization} %"


class GpuAverage(models.Model):
    """Five minutes of a series: what stays of its samples after a day."""

    series = models.ForeignKey(GpuSeries, on_delete=models.CASCADE, related_name="averages", db_index=False)
    at_ms = models.BigIntegerField(help_text="The beginning of the five minutes")
    samples = models.PositiveSmallIntegerField()
    utilization = models.FloatField(null=True, help_text="Percent, on average")
    utilization_max = models.PositiveSmallIntegerField(null=True)
    memory_used_mib = models.PositiveIntegerField(null=True, help_text="On average")
    memory_max_mib = models.PositiveIntegerField(null=True)
    power_w = models.PositiveSmallIntegerField(null=True, help_text="On average")
    temperature_max_c = models.SmallIntegerField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["series", "at_ms"], name="gpu_average_once")]
        indexes = [models.Index("at_ms", name="gpu_average_by_age")]

    def __str__(self) -> str:
        return f"{self.series_id} from {self.at_ms}: {self.utilization} %"


class HostSampling(models.Model):
    """How the last look at a host's GPUs went."""

    host = models.OneToOneField("backends.Host", on_delete=models.CASCADE, primary_key=True, related_name="sampling")
    at = models.DateTimeField(default=timezone.now)
    took_ms = models.FloatField(default=0)
    library = models.BooleanField(default=True, help_text="Whether NVML's library is there")
    error = models.TextField(blank=True, help_text="What could not be read, as NVML says it")

    def __str__(self) -> str:
        return f"{self.host}: {self.error or 'in order'}"


class JobPolicy(models.Model):
    """The utilization policy that a job is held to, bound when its first sample comes (R17).

    Without `min_gpu_utilization` its run has none. The run's spec is where it comes from; a changed spec is bound anew.
    """

    job = models.OneToOneField("runs.Job", on_delete=models.CASCADE, primary_key=True, related_name="policy")
    min_gpu_utilization = models.PositiveSmallIntegerField(null=True, help_text="Percent")
    time_window_s = models.PositiveIntegerField(default=0)
    scope = models.CharField(max_length=3, default="any")
    action = models.CharField(max_length=9, default="terminate")
    from_ms = models.BigIntegerField(default=0, help_text="Samples before this do not count: its start and the warm-up")
    bound_at = models.DateTimeField(default=timezone.now)
    noticed_ms = models.BigIntegerField(
        null=True, help_text="The low stretch (its beginning) that people have been told of"
    )
    acted_ms = models.BigIntegerField(
        null=True, help_text="The low stretch that was acted on: it was stopped, or told that it would have been"
    )

    class Meta:
        verbose_name_plural = "job policies"

    def __str__(self) -> str:
        return f"{self.job}: below {self.min_gpu_utilization} % for {self.time_window_s} s"


class Keep(models.Model):
    """Somebody asked that a run is not stopped by its policy for a while, and said why. The verdict stays as it is."""

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="keeps")
    by = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    at = models.DateTimeField(default=timezone.now)
    until = models.DateTimeField()
    reason = models.CharField(max_length=200)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.run} until {self.until:%H:%M}: {self.reason}"


class ProjectPolicies(models.Model):
    """How a project's utilization policies are carried out. A project without a row has the defaults."""

    project = models.OneToOneField(
        "accounts.Project", on_delete=models.CASCADE, primary_key=True, related_name="policies"
    )
    observe_only = models.BooleanField(
        default=False, help_text="Judge and tell, but stop no run: for trying policies before they count."
    )
    keeps = models.PositiveSmallIntegerField(
        default=3, validators=[MaxValueValidator(1000)], help_text="How often a run may be kept from being stopped."
    )
    keep_minutes = models.PositiveSmallIntegerField(
        default=30,
        validators=[MinValueValidator(1), MaxValueValidator(24 * 60)],
        help_text="For how many minutes each time.",
    )

    class Meta:
        verbose_name_plural = "project policies"

    def __str__(self) -> str:
        return f"{self.project}: {'observed only' if self.observe_only else 'in force'}"


class PolicyStop(models.Model):
    """A run that its policy stopped, or (`observed`) would have: the ledger of what that gave back.

    What it would have held without the stop is known only as far as its `max_duration`: `until` is that moment, and
    null where it has none.
    """

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="policy_stops")
    run = models.ForeignKey("runs.Run", null=True, on_delete=models.SET_NULL, related_name="policy_stops")
    run_name = models.CharField(max_length=60)
    user = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    attempt = models.PositiveIntegerField(default=1)
    node = models.PositiveIntegerField(default=0)
    at = models.DateTimeField(default=timezone.now)
    observed = models.BooleanField(default=False, help_text="Nothing was stopped: observe-only, or it only notifies")
    min_gpu_utilization = models.PositiveSmallIntegerField()
    time_window_s = models.PositiveIntegerField()
    scope = models.CharField(max_length=3)
    low_since = models.DateTimeField(help_text="From when it was below the minimum")
    gpu_index = models.PositiveSmallIntegerField(null=True, help_text="The GPU that was; null: all")
    gpus: models.JSONField[Any, Any] = models.JSONField(default=list, help_text="UUIDs of all that the run held")
    price = models.DecimalField(max_digits=10, decimal_places=4, default=0, help_text="USD per hour of all its nodes")
    until = models.DateTimeField(null=True)
    next_run = models.ForeignKey("runs.Run", null=True, on_delete=models.SET_NULL, related_name="+")
    next_at = models.DateTimeField(null=True, help_text="When the first of its GPUs went to the next run")

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index("project", F("at").desc(), name="policy_stop_newest")]

    def __str__(self) -> str:
        return f"{self.run_name} at {self.at:%Y-%m-%d %H:%M}"
