"""GPU samples, the utilization policies that jobs are bound to, and the stops they caused. Times of samples are whole
milliseconds since 1970 (UTC) by the clock of the sampling machine, which both databases group in the same way."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.db.models.deletion import Collector
from django.utils import timezone

from dstackweb.spec.codes import UtilizationAction, UtilizationScope


def interval_ms() -> int:
    """Between two samples."""
    return round(settings.DSTACKWEB_SAMPLE_EVERY_S * 1000)


def keep_series(collector: Collector, _field: object, series: Any, using: str) -> None:
    """When a job is deleted: its GPUs' series stay, without it, for the GPUs' own history."""
    for name in ("gpu", "job"):  # in this order: a GPU has one series without a job
        column: Any = GpuSeries._meta.get_field(name)
        collector.add_field_update(column, None, series)


class GpuSeries(models.Model):
    """The samples of one GPU under one job, or (`job` null) of a host's GPU while no job holds it; a removed job's has
    neither. It holds the newest values, so that no page searches for them, and for a job the GPU's low stretch
    (`window`), so that a sample costs the same however long the policy's window is."""

    job = models.ForeignKey("runs.Job", null=True, on_delete=keep_series, related_name="gpu_series")
    gpu = models.ForeignKey("backends.Gpu", null=True, on_delete=models.SET_NULL, related_name="series")
    uuid = models.CharField(max_length=80, help_text="NVML's UUID of the GPU or MIG device")
    index = models.PositiveSmallIntegerField(default=0, help_text="NVML's index on its machine")
    name = models.CharField(max_length=120, blank=True)
    memory_mib = models.PositiveBigIntegerField(null=True)
    power_limit_w = models.PositiveSmallIntegerField(null=True)

    first_ms = models.BigIntegerField(null=True, help_text="Its oldest stored sample")
    last_ms = models.BigIntegerField(null=True, help_text="Its newest sample")
    utilization = models.PositiveSmallIntegerField(null=True, help_text="Percent; null: could not be read")
    memory_used_mib = models.PositiveBigIntegerField(null=True)
    power_w = models.PositiveSmallIntegerField(null=True)
    temperature_c = models.SmallIntegerField(null=True)
    throttle = models.BigIntegerField(null=True, help_text="NVML's clock throttle reasons, as bits")
    processes: models.JSONField[Any, Any] = models.JSONField(
        default=list, help_text='[{"pid", "user", "memory_mib"}] in the newest sample'
    )

    low_since_ms = models.BigIntegerField(
        null=True, help_text="First sample of the current stretch below the policy's minimum"
    )
    low_last_ms = models.BigIntegerField(null=True, help_text="Newest sample with a utilization")
    averaged_ms = models.BigIntegerField(default=0, help_text="Samples before this are averaged")
    uncounted: models.JSONField[Any, Any] = models.JSONField(
        null=True, help_text="{day since 1970: [ms that samples cover, ms idle]} that usage does not have yet"
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "uuid"], name="gpu_series_of_job"),
            models.UniqueConstraint(fields=["gpu"], condition=Q(job=None), name="gpu_series_of_no_job"),
        ]
        indexes = [
            models.Index("uuid", F("id").desc(), name="gpu_series_of_uuid"),
            # Series with samples, oldest first, for averaging and pruning.
            models.Index("first_ms", condition=Q(first_ms__isnull=False), name="gpu_series_by_oldest"),
            models.Index("id", condition=Q(uncounted__isnull=False), name="gpu_series_uncounted"),
        ]
        verbose_name_plural = "GPU series"

    def __str__(self) -> str:
        return f"{self.uuid} of {self.job or 'no job'}"


class GpuSample(models.Model):
    """One GPU at one moment. Values that could not be read are null; a failed sample has no row."""

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
    """Five minutes of a series: kept when its samples are pruned after a day."""

    series = models.ForeignKey(GpuSeries, on_delete=models.CASCADE, related_name="averages", db_index=False)
    at_ms = models.BigIntegerField(help_text="Start of the five minutes")
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
    """The result of the last snapshot of a host's GPUs."""

    host = models.OneToOneField("backends.Host", on_delete=models.CASCADE, primary_key=True, related_name="sampling")
    at = models.DateTimeField(default=timezone.now)
    took_ms = models.FloatField(default=0)
    library = models.BooleanField(default=True, help_text="Whether the NVML library is installed")
    error = models.TextField(blank=True, help_text="What could not be read, with NVML's error")

    def __str__(self) -> str:
        return f"{self.host}: {self.error or 'ok'}"


class JobPolicy(models.Model):
    """The utilization policy that a job is bound to with its first sample (R17), copied from its run's spec: none
    without `min_gpu_utilization`. A changed spec is bound anew."""

    job = models.OneToOneField("runs.Job", on_delete=models.CASCADE, primary_key=True, related_name="policy")
    min_gpu_utilization = models.PositiveSmallIntegerField(null=True, help_text="Percent")
    time_window_s = models.PositiveIntegerField(default=0)
    scope = models.CharField(max_length=3, default=UtilizationScope.ANY.value)
    action = models.CharField(max_length=9, default=UtilizationAction.TERMINATE.value)
    from_ms = models.BigIntegerField(default=0, help_text="Samples before this, its start plus warm-up, don't count")
    noticed_ms = models.BigIntegerField(null=True, help_text="Start of the low stretch that a notice was sent for")
    acted_ms = models.BigIntegerField(
        null=True, help_text="Start of the low stretch that stopped the run, or was reported as one that would have"
    )

    class Meta:
        verbose_name_plural = "job policies"

    def __str__(self) -> str:
        return f"{self.job}: below {self.min_gpu_utilization} % for {self.time_window_s} s"


class PolicyExemption(models.Model):
    """A user keeps a run from being stopped by its policy until `until`, with a reason. Its verdict is unaffected."""

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="policy_exemptions")
    by = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    at = models.DateTimeField(default=timezone.now)
    until = models.DateTimeField()
    reason = models.CharField(max_length=200)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.run} until {self.until:%H:%M}: {self.reason}"


class ProjectPolicies(models.Model):
    """How a project enforces its utilization policies. A project without a row has the defaults."""

    project = models.OneToOneField(
        "accounts.Project", on_delete=models.CASCADE, primary_key=True, related_name="policies"
    )
    observe_only = models.BooleanField(default=False, help_text="Report violations without stopping runs.")
    max_exemptions = models.PositiveSmallIntegerField(
        default=3, validators=[MaxValueValidator(1000)], help_text="How often a run can be kept from being stopped."
    )
    exemption_minutes = models.PositiveSmallIntegerField(
        default=30,
        validators=[MinValueValidator(1), MaxValueValidator(24 * 60)],
        help_text="Minutes for which a run is kept each time.",
    )

    class Meta:
        verbose_name_plural = "project policies"

    def __str__(self) -> str:
        return f"{self.project}: {'observe only' if self.observe_only else 'enforced'}"


class PolicyStop(models.Model):
    """A run that its policy stopped, or (`observed`) would have: an entry of the ledger. Otherwise it could have held
    its GPUs `until` the end of its `max_duration`; null without one."""

    project = models.ForeignKey("accounts.Project", on_delete=models.CASCADE, related_name="policy_stops")
    run = models.ForeignKey("runs.Run", null=True, on_delete=models.SET_NULL, related_name="policy_stops")
    run_name = models.CharField(max_length=60)
    user = models.ForeignKey("accounts.User", null=True, on_delete=models.SET_NULL, related_name="+")
    attempt = models.PositiveIntegerField(default=1)
    node = models.PositiveIntegerField(default=0)
    at = models.DateTimeField(default=timezone.now)
    observed = models.BooleanField(
        default=False, help_text="Not stopped: observe-only mode, or a policy that only notifies"
    )
    min_gpu_utilization = models.PositiveSmallIntegerField()
    time_window_s = models.PositiveIntegerField()
    scope = models.CharField(max_length=3)
    low_since = models.DateTimeField(help_text="When it fell below the minimum")
    gpu_index = models.PositiveSmallIntegerField(null=True, help_text="The low GPU; null: all")
    gpus: models.JSONField[Any, Any] = models.JSONField(default=list, help_text="UUIDs of all GPUs that the run held")
    price = models.DecimalField(max_digits=10, decimal_places=4, default=0, help_text="USD per hour of all its nodes")
    until = models.DateTimeField(null=True)
    next_run = models.ForeignKey("runs.Run", null=True, on_delete=models.SET_NULL, related_name="+")
    next_at = models.DateTimeField(null=True, help_text="When the next run got the first of its GPUs")

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index("project", F("at").desc(), name="policy_stop_newest")]

    def __str__(self) -> str:
        return f"{self.run_name} at {self.at:%Y-%m-%d %H:%M}"
