"""Backends, the team's own hosts with their GPUs, and cloud instances."""

from __future__ import annotations

import re
import uuid
from enum import StrEnum
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy

from dstackweb.accounts.models import Project, User
from dstackweb.lib.network import HOST_NAME, HOST_NAME_TEXT
from dstackweb.spec.labels import check_labels


class Ports(models.TextChoices):
    """Whether jobs on the server's own machine can connect to its database and Redis."""

    NONE = "", gettext_lazy("no ports there")
    CLOSED = "closed", gettext_lazy("closed to jobs")
    OPEN = "open", gettext_lazy("open to jobs")


class Isolation(models.TextChoices):
    """How a host isolates jobs from the server's files and from each other (docs/design.md#execution)."""

    SANDBOX = "sandbox", gettext_lazy("a sandbox")
    PROJECT = "project", gettext_lazy("a user for each project")
    USER = "user", gettext_lazy("another user")
    CONTAINER = "container", gettext_lazy("a container")
    SHARED = "shared", gettext_lazy("none: jobs share the server's user")
    NONE = "none", gettext_lazy("none: jobs are refused")


def check_host_name(name: str) -> None:
    """Raises ValueError unless it can be a host's name, and so part of its address in the API."""
    if not re.fullmatch(HOST_NAME, name):
        shown = name if len(name) <= 100 else f"{name[:20]}…"
        raise ValueError(
            _("%(name)s is not a valid host name: use %(allowed)s")
            % {"name": repr(shown), "allowed": _(HOST_NAME_TEXT)}
        )


def validate_host_name(name: str) -> None:
    """Raises ValidationError unless it can be a host's name."""
    try:
        check_host_name(name)
    except ValueError as error:
        raise ValidationError(str(error)) from None


class PresentBackends(models.Manager["Backend"]):
    """Without deleted backends, which keep their rows because past jobs refer to them."""

    def get_queryset(self) -> models.QuerySet[Backend]:
        return super().get_queryset().filter(deleted_at=None)


class Backend(models.Model):
    """A configured source of capacity, of the whole deployment."""

    name = models.SlugField(max_length=60)
    kind = models.CharField(max_length=60, help_text="The entry point of its kind (docs/writing-a-backend.md)")
    config: models.JSONField[Any, Any] = models.JSONField(default=dict, blank=True)
    secret = models.TextField(blank=True, default="", editable=False, help_text="Encrypted secrets; never shown")
    version = models.BigIntegerField(
        default=1, editable=False, help_text="Rises with each change, so that outdated results are discarded"
    )
    refresh_generation = models.BigIntegerField(
        default=0, editable=False, help_text="Rises with each refresh by hand: what was read before is read again"
    )
    enabled = models.BooleanField(default=True, help_text="A disabled backend gets no new runs; running ones continue.")
    deleted_at = models.DateTimeField(
        null=True, editable=False, help_text="Deleted backends are hidden, and their names are free"
    )

    with_deleted = models.Manager()
    objects = PresentBackends()

    class Meta:
        default_manager_name = "objects"
        constraints = [models.UniqueConstraint(fields=["name"], condition=Q(deleted_at=None), name="backend_name_once")]
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def instances_in_use(self) -> models.QuerySet[Instance]:
        """Return the instances that count against quotas: from their order until they begin to shut down."""
        return self.instances.exclude(status=InstanceStatus.GONE).exclude(status=InstanceStatus.STOPPING)


def validate_labels(labels: object) -> None:
    """Raises ValidationError unless the labels are names with texts."""
    try:
        check_labels(labels)
    except ValueError as error:
        text = _('Invalid labels: %s. Use an object of strings, such as {"region": "cellar"}.') % error
        raise ValidationError(text) from None


class JoinedHosts(models.Manager["Host"]):
    """Without removed hosts, which keep their rows because past jobs refer to them."""

    def get_queryset(self) -> models.QuerySet[Host]:
        return super().get_queryset().filter(left_at=None)


class CgroupCode(StrEnum):
    """Why jobs of a host have no cgroups, or no limits by them: `code` of `Host.cgroups`, from `runner.cgroups`."""

    NOT_MOUNTED = "not_mounted"
    READ_ONLY = "read_only"
    NOT_PERMITTED = "not_permitted"
    NO_CONTROLLERS = "no_controllers"
    FAILED = "failed"


class StartError(StrEnum):
    """Codes in `Host.start_error`, beside texts of runners."""

    COMMANDS_FAIL = "commands_fail"


class EngineCode(StrEnum):
    """Why a host runs no containers: `code` of `Host.engine`, from `runner.engine`."""

    NOT_FOUND = "not_found"
    AWAY = "away"
    NOT_PERMITTED = "not_permitted"
    FAILED = "failed"


class Host(models.Model):
    """A machine of the team, which writes its own hardware.

    `cpus_used` and `memory_used_mib` are the sums of the jobs' claims, guarded by this row. They may exceed the
    capacity when a machine comes back smaller: the schema keeps them at zero or more, each
    claim's UPDATE below the capacity.
    """

    backend = models.ForeignKey(Backend, on_delete=models.PROTECT, related_name="hosts")
    name = models.CharField(max_length=100, unique=True, validators=[validate_host_name])
    address = models.CharField(max_length=255, blank=True, help_text="Where the host's other nodes reach it")
    cluster = models.CharField(
        max_length=120, blank=True, help_text="The server's django-q2 cluster on this machine; empty: it has an agent"
    )
    token_digest = models.CharField(
        max_length=64, blank=True, db_index=True, editable=False, help_text="Digest of its agent's token; empty: none"
    )
    agent_process = models.CharField(
        max_length=64, blank=True, editable=False, help_text="The process whose calls count; empty: any"
    )
    agent_place = models.CharField(
        max_length=140, blank=True, editable=False, help_text="That process's boot and home: a successor's are the same"
    )
    agent_version = models.CharField(max_length=40, blank=True, help_text="dstackweb's version on an agent's machine")
    labels: models.JSONField[Any, Any] = models.JSONField(
        default=dict,
        blank=True,
        validators=[validate_labels],
        help_text='Names with texts that runs can require, such as {"region": "eu", "disk": "nvme"}',
    )
    setup = models.TextField(
        blank=True, help_text="Shell lines run before each job's commands: conda, modules, caches."
    )
    draining = models.BooleanField(default=False, help_text="Accepts no new jobs; running ones continue.")
    leaving = models.BooleanField(default=False, help_text="Is removed when no job uses it")
    left_at = models.DateTimeField(null=True, blank=True, help_text="Removed; hidden until it joins again")

    cpus = models.PositiveIntegerField(default=0)
    memory_mib = models.PositiveBigIntegerField(default=0)
    cpus_used = models.PositiveIntegerField(default=0, editable=False)
    memory_used_mib = models.PositiveBigIntegerField(default=0, editable=False)

    isolation = models.CharField(max_length=10, choices=Isolation.choices, default=Isolation.NONE)
    cgroups: models.JSONField[Any, Any] = models.JSONField(
        default=dict, blank=True, help_text="Whether cgroups end and limit its jobs: version, memory, cpu, code, error"
    )
    engine: models.JSONField[Any, Any] = models.JSONField(
        default=dict,
        blank=True,
        help_text="Its container engine: name, version, code and error if it can't be used, volumes",
    )
    ports = models.CharField(
        max_length=10,
        blank=True,
        choices=Ports.choices,
        help_text="Whether its jobs can connect to the server's database and Redis there, which need passwords",
    )
    job_user = models.CharField(max_length=60, blank=True, help_text="The user jobs run as; empty: the host's own")
    runs_dir = models.CharField(max_length=1024, blank=True, help_text="The directory of runs on the host")
    boot_id = models.CharField(max_length=64, blank=True)
    error = models.TextField(blank=True, help_text="Errors reported by the host")

    start_failures = models.PositiveIntegerField(default=0, help_text="Failed starts of jobs in a row")
    start_error = models.TextField(blank=True, help_text="Why the last of them failed; empty: no runner called")
    held_back_at = models.DateTimeField(
        null=True, blank=True, help_text="Since when it gets no jobs because starts fail there"
    )

    heartbeats = models.BigIntegerField(default=0, help_text="Rises with each heartbeat of the host")
    seen_at = models.DateTimeField(null=True)
    heartbeats_seen = models.BigIntegerField(default=0)
    silent_s = models.FloatField(default=0, help_text="Silence while the watcher was up, in its monotonic time")
    offline_since = models.DateTimeField(null=True, help_text="When the watcher noticed its silence")

    objects = models.Manager()
    joined = JoinedHosts()

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(isolation__in=Isolation.values), name="host_isolation_known"),
            # Claims look at `draining` alone.
            models.CheckConstraint(
                condition=Q(leaving=False, left_at=None) | Q(draining=True), name="host_that_leaves_is_drained"
            ),
        ]
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Gpu(models.Model):
    """A GPU of a host, identified by its NVML UUID: its index and host may change."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="gpus")
    uuid = models.CharField(max_length=80, unique=True)
    index = models.PositiveIntegerField(help_text="NVML's index, which is not CUDA's default order")
    name = models.CharField(max_length=120)
    memory_mib = models.PositiveBigIntegerField()
    present = models.BooleanField(default=True)
    stranger: models.JSONField[Any, Any] = models.JSONField(
        null=True, blank=True, help_text="A process on it that belongs to no run: pid and user"
    )

    class Meta:
        verbose_name = "GPU"
        ordering = ["host", "index"]

    def __str__(self) -> str:
        return f"{self.host} {self.index}: {self.name}"


class HostEventKind(StrEnum):
    JOINED = "joined"
    STARTED = "started"
    LABELLED = "labelled"
    DRAINED = "drained"
    UNDRAINED = "undrained"
    LEAVING = "leaving"
    LEFT = "left"
    OFFLINE = "offline"
    ONLINE = "online"
    HELD_BACK = "held_back"
    TAKES_JOBS = "takes_jobs"
    GONE = "gone"
    REVOKED = "revoked"
    ADMITTED = "admitted"
    NVML_MISSING = "nvml_missing"
    NVML_FOUND = "nvml_found"
    SAMPLING_FAILS = "sampling_fails"
    SAMPLING_WORKS = "sampling_works"


class HostEvent(models.Model):
    """An event of a host: a code with its data."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(default=timezone.now)
    kind = models.CharField(max_length=20)
    actor = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    data: models.JSONField[Any, Any] = models.JSONField(default=dict)

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["host", "-at"], name="host_events_newest_first")]

    def __str__(self) -> str:
        return f"{self.host}: {self.kind}"


class HostInvite(models.Model):
    """Lets one machine join once before it expires. Only its token's digest is stored."""

    digest = models.CharField(max_length=64, unique=True, editable=False)
    created_by = models.ForeignKey(User, on_delete=models.CASCADE, related_name="host_invites")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)
    host_name = models.CharField(max_length=100, blank=True, help_text="The host that joined with it")
    nonce = models.CharField(
        max_length=64, blank=True, editable=False, help_text="Of the machine that used it, which may repeat the call"
    )

    class Meta:
        ordering = ["-created_at", "-id"]

    def __str__(self) -> str:
        return f"by {self.created_by} until {self.expires_at:%Y-%m-%d %H:%M} UTC"


class InstanceStatus(models.TextChoices):
    REQUESTED = "requested", gettext_lazy("requested")
    """The launch may have been sent: repeating it launches no second instance."""
    STARTING = "starting", gettext_lazy("starting")
    """The cloud has launched it; its agent has not called yet."""
    RUNNING = "running", gettext_lazy("running")
    STOPPING = "stopping", gettext_lazy("stopping")
    """Termination is requested, and not confirmed by the cloud."""
    GONE = "gone", gettext_lazy("gone")
    """The cloud refused it, or confirmed its end."""


class Instance(models.Model):
    """A cloud instance, stored before its launch. Each try at an offer has its own.

    It serves one job at a time, `holder` (a plain ID: backends know no jobs), and only jobs of its project, which pays
    for it. Its ID is the launch's idempotency token and a tag of the instance.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    backend = models.ForeignKey(Backend, on_delete=models.PROTECT, related_name="instances")
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="instances")
    holder = models.UUIDField(null=True, unique=True, help_text="Its current job, or the one it starts for")
    region = models.CharField(max_length=60)
    zone = models.CharField(max_length=60, blank=True)
    instance_type = models.CharField(max_length=120)
    is_spot = models.BooleanField(default=False)
    price = models.DecimalField(max_digits=10, decimal_places=4, default=0, help_text="USD per hour at the start")
    zone_prices: models.JSONField[Any, Any] = models.JSONField(
        default=dict,
        help_text="USD per hour by zone when it was ordered, where that matters: it starts in one of these",
    )
    cpus = models.PositiveIntegerField(default=0)
    memory_mib = models.PositiveBigIntegerField(default=0)
    gpu_name = models.CharField(max_length=120, blank=True)
    gpu_count = models.PositiveIntegerField(default=0)
    gpu_memory_mib = models.PositiveBigIntegerField(default=0)

    status = models.CharField(max_length=12, choices=InstanceStatus.choices, default=InstanceStatus.REQUESTED)
    cloud_id = models.CharField(max_length=120, blank=True, help_text="The cloud's own name for it")
    address = models.CharField(max_length=255, blank=True, help_text="Where its other nodes reach it")
    why = models.CharField(max_length=60, blank=True, help_text="Code of why it ended or could not start")
    error = models.TextField(blank=True, help_text="Message of the cloud")
    error_detail: models.JSONField[Any, Any] = models.JSONField(
        default=dict, blank=True, help_text="Code and data of the latest failed call to the cloud"
    )
    gpus: models.JSONField[Any, Any] = models.JSONField(default=list, help_text="NVML UUIDs, as its agent sees them")
    usage: models.JSONField[Any, Any] = models.JSONField(
        null=True,
        blank=True,
        help_text="What its engine's accounting says that it used; empty: it keeps none; null: unknown",
    )

    created_at = models.DateTimeField(default=timezone.now)
    answered_at_reading = models.BigIntegerField(
        null=True,
        help_text="The last reading of a cluster that had begun when its order was answered: later ones count it",
    )
    launched_at = models.DateTimeField(null=True, help_text="When its cost began")
    ready_at = models.DateTimeField(null=True, help_text="When its agent first called")
    idle_since = models.DateTimeField(null=True, help_text="Since when it has no job")
    idle_until = models.DateTimeField(null=True, help_text="When it ends unless it gets another job")
    interrupted_at = models.DateTimeField(null=True, help_text="When the cloud reclaims it, as announced")
    ended_at = models.DateTimeField(null=True)

    join_digest = models.CharField(max_length=64, blank=True, help_text="Digest of its one-time join token")
    join_nonce = models.CharField(
        max_length=64, blank=True, help_text="Of the agent that used it, which may repeat the call"
    )
    heartbeats = models.BigIntegerField(default=0, help_text="Rises with each call of its agent")
    seen_at = models.DateTimeField(null=True)
    heartbeats_seen = models.BigIntegerField(default=0)
    silent_s = models.FloatField(default=0, help_text="Silence while the watcher was up, in its monotonic time")
    status_s = models.FloatField(default=0, help_text="How long it has been in this status, in the watcher's time")

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(status__in=InstanceStatus.values), name="instance_status_known")
        ]
        indexes = [
            # Most rows are of ended instances.
            models.Index("status", condition=~Q(status="gone"), name="instance_there"),
            models.Index("project", "ended_at", name="instance_of_project_by_end"),
            # Accounting is asked about those that ended lately.
            models.Index("ended_at", name="instance_by_end"),
        ]
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.instance_type} {self.cloud_id or self.pk}"


class ApiCount(models.Model):
    """Requests to an API of a kind of backend within ten minutes, of all processes (docs/operations.md)."""

    kind = models.CharField(max_length=60)
    api = models.CharField(max_length=120)
    region = models.CharField(max_length=250, blank=True, help_text="Or the address of a cluster")
    at = models.DateTimeField(help_text="When the ten minutes began")
    requests = models.BigIntegerField(default=0, help_text="All that were sent, repeats included")
    retries = models.BigIntegerField(default=0, help_text="Repeats after a failure")
    throttles = models.BigIntegerField(default=0, help_text="Refused because there were too many")
    failures = models.BigIntegerField(default=0, help_text="Other failures")
    tight = models.BigIntegerField(default=0, help_text="After these at most a fifth of the burst was left")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["kind", "api", "region", "at"], name="one_count_for_each_api")]
        indexes = [models.Index(fields=["at"], name="api_counts_by_time")]

    def __str__(self) -> str:
        return f"{self.kind} {self.api} {self.region} {self.at:%Y-%m-%d %H:%M}"
