"""Slurm as a kind of backend: settings, words, and the driver: free capacity is offers, batch jobs are instances."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy, gettext_noop, ngettext
from pydantic import Field

from dstackweb.backends.clusters import (
    FRESH_S,
    PROJECTS,
    ClusterBackend,
    ClusterKind,
    EngineRefused,
    GpuSizes,
    gpu_of,
    unreachable,
)
from dstackweb.backends.contract import (
    Allocation,
    CloudInstance,
    InstanceOrder,
    InstanceState,
    InstanceUsage,
    LaunchFailed,
    LaunchFailure,
    Offer,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceSpec,
)
from dstackweb.backends.kinds import ReportLine
from dstackweb.backends.models import Backend
from dstackweb.backends.slurm import commands
from dstackweb.backends.slurm.commands import Commands, Partition
from dstackweb.lib.models import Lease
from dstackweb.spec.effective import Requirements
from dstackweb.spec.fields import Keys, Text, key, optional

OPTIONS = ("account", "qos", "constraint", "reservation")
"""Settings that sbatch gets as they are."""
LEASE_S, WAIT_S, AGAIN_S = 60.0, 30.0, 0.05
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; export PATH"
"""A line for jobs that get no environment of a login: that of the machine with `sbatch` leads elsewhere."""
REFUSALS = (
    ("QOS", LaunchFailure.QUOTA),
    ("Association", LaunchFailure.QUOTA),
    ("Assoc", LaunchFailure.QUOTA),
    ("node configuration is not available", LaunchFailure.NO_CAPACITY),
    ("More processors requested", LaunchFailure.NO_CAPACITY),
    ("Invalid account", LaunchFailure.NOT_ALLOWED),
    ("Access/permission denied", LaunchFailure.NOT_ALLOWED),
    ("not permitted", LaunchFailure.NOT_ALLOWED),
)
"""Parts of sbatch's messages."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:&|-]*$")]
"""What may follow `--account=` and the like."""

WAITS: dict[str, Any] = {
    "Resources": gettext_lazy("not enough is free"),
    "Priority": gettext_lazy("jobs of higher priority wait in its partition"),
    "Licenses": gettext_lazy("all licenses are in use"),
    "Reservation": gettext_lazy("its reservation has not begun"),
    "ReservationDeleted": gettext_lazy("its reservation was deleted"),
    "ReqNodeNotAvail": gettext_lazy("a node that it needs is down, drained or reserved"),
    "NodeDown": gettext_lazy("a node that it needs is down"),
    "PartitionDown": gettext_lazy("its partition is down"),
    "PartitionInactive": gettext_lazy("its partition is inactive"),
    "PartitionNodeLimit": gettext_lazy("it needs more than its partition may use"),
    "PartitionTimeLimit": gettext_lazy("its max_duration is longer than its partition's time limit"),
    "InvalidAccount": gettext_lazy("its account is not valid"),
    "InvalidQOS": gettext_lazy("its QOS is not valid"),
    "JobHeldAdmin": gettext_lazy("an administrator of the cluster holds it"),
    "JobHeldUser": gettext_lazy("its user holds it"),
    "BurstBufferResources": gettext_lazy("its burst buffer is not available"),
}
"""Slurm's reasons (`squeue`'s `%r`) in words."""
LIMITS: dict[str, Any] = {
    "QOS": gettext_lazy("a limit of its QOS is reached"),
    "Assoc": gettext_lazy("a limit of its account or user is reached"),
}
"""How the many reasons begin that name a limit."""


class SlurmSettings(Keys):
    """What an admin sets."""

    projects: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100)] = key(*PROJECTS)
    partitions: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100)] = key(
        gettext_noop("a list of partitions, such as gpu"), gettext_noop("Partitions to use")
    )
    ssh_host: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9][\w.:-]*$")] | None = optional(
        gettext_noop("a host, such as slurm@login.example"),
        gettext_noop("Login node to reach by SSH; empty: Slurm's commands are here"),
        title="SSH host",
    )
    ssh_key_file: Text | None = optional(
        gettext_noop("a path"), gettext_noop("Private key for SSH, a file of the server"), title="SSH key file"
    )
    account: Name | None = optional(gettext_noop("a name"), gettext_noop("Account to submit with"))
    qos: Name | None = optional(gettext_noop("a name"), gettext_noop("Quality of service"), title="QOS")
    constraint: Name | None = optional(gettext_noop("a list of features"), gettext_noop("Features that nodes need"))
    reservation: Name | None = optional(gettext_noop("a name"), gettext_noop("Reservation to use"))
    gpu_memory: GpuSizes = key(
        gettext_noop("a list such as a100=80GB, v100=32GB"),
        gettext_noop("Memory of each type of GPU, which Slurm does not know"),
        default=(),
        title="GPU memory",
    )
    most_waiting: Annotated[int, Field(ge=1, le=1000)] = key(
        gettext_noop("a number from 1"),
        gettext_noop("Jobs waiting in a partition, from which it gets no more"),
        default=1,
    )
    login_environment: bool = key(
        gettext_noop("true or false"),
        gettext_noop("Jobs start with the environment of a login, which may take a node seconds"),
        default=False,
    )


class SlurmBackend(ClusterBackend):
    """A partition is a region; what is allocated is just what a node of the run needs."""

    sources = {"partitions": SourceSpec(FRESH_S, dict[str, Partition], ("ssh_host", "partitions"), moves=True)}
    own_user = (
        "jobs would have the server's user, and may reach its secret key: set ssh_host to another user, such as "
        "slurm@localhost, or set DSTACKWEB_SHARED_UID=1 where everyone who may submit runs is trusted"
    )

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        config = backend.config
        self.partitions: Sequence[str] = config["partitions"]
        self.options = [f"--{name}={config[name]}" for name in OPTIONS if config.get(name)]
        self.most_waiting: int = config.get("most_waiting", 1)
        self.logs_in: bool = config.get("login_environment", False)
        self.commands = Commands(config.get("ssh_host") or "", config.get("ssh_key_file") or "")

    @property
    def is_here(self) -> bool:
        return not self.commands.host

    def check(self) -> list[ReportLine]:
        """Ask for the partitions."""
        known = self.commands.run("sinfo", "--noheader", "--format=%R").split()
        return [_partition(name, known) for name in self.partitions]

    def regions(self) -> Sequence[str]:
        return list(self.partitions)

    def fetch(self, key: SourceKey) -> dict[str, Partition]:
        # The queue first: a job that starts meanwhile then counts twice, rather than not at all.
        squeue = self.commands.run("squeue", "--states=PENDING", f"--format={commands.PENDING_FORMAT}")
        queue = commands.listed(squeue, commands.PENDING_HEADER)
        nodes = commands.nodes(self.commands.run("scontrol", "show", "nodes", "--oneliner", "--details"))
        scontrol = self.commands.run("scontrol", "show", "partitions", "--oneliner")
        partitions = commands.partitions(scontrol, nodes, commands.pending(queue))
        return {name: partition for name, partition in partitions.items() if name in self.partitions}

    def take(self, found: dict[str, Partition], order: Allocation) -> dict[str, Partition] | None:
        size = (order.cpus, order.memory_mib, gpu_of(order), order.gpu_count)
        return commands.with_job(found, order.region, *size)

    def found_offers(self, found: dict[str, Partition], needs: Requirements, image: str | None) -> Iterator[Offer]:
        for partition in found.values():
            yield from self._offers(partition, needs, image)

    def _offers(self, partition: Partition, needs: Requirements, image: str | None) -> Iterator[Offer]:
        count, nodes = needs.gpu_count_min, partition.nodes.values()
        for gpu in sorted({gpu for node in nodes for gpu in node.gpus}) if count else [""]:
            size = (needs.cpu_min, needs.memory_min_mib, gpu, count)
            if not any(node.fits(*size, empty=True) for node in nodes):
                continue
            fits = sum(node.fits(*size, whole=partition.exclusive) for node in nodes)
            fits = fits if partition.up and partition.waiting < self.most_waiting else 0
            usable = [node for node in nodes if node.usable]
            total = sum(node.gpus.get(gpu, 0) if count else node.cpus for node in usable)
            used = sum(node.gpus_used.get(gpu, 0) if count else node.cpus_used for node in usable)
            yield self.offer(
                needs,
                image,
                gpu,
                code="" if partition.up else "partition_down",
                fits=fits,
                free=total - used,
                total=total,
                region=partition.name,
                waiting=partition.waiting,
            )

    def submit(self, order: InstanceOrder) -> CloudInstance:
        """Slurm takes any number of jobs of one name, so an order is looked for first, by one caller at a time."""
        with _alone(f"slurm:{order.instance}"):
            return (None if order.is_new else self._find(order)) or self._submit(order)

    def _find(self, order: InstanceOrder) -> CloudInstance | None:
        found = commands.jobs(self._squeue(f"--name={order.instance}"), order.deployment)
        return min(found, key=lambda job: int(commands.number(job.cloud_id).split("_")[0]), default=None)

    def _submit(self, order: InstanceOrder) -> CloudInstance:
        try:
            said = self.commands.run("sbatch", *self._arguments(order), text=self._script(order))
        except EngineRefused as error:
            code = next((code for part, code in REFUSALS if part in error.text), LaunchFailure.REFUSED)
            raise LaunchFailed(code, error.text.removeprefix("sbatch: error: ")) from error
        job = commands.JOB_NUMBER.search(said)
        if job is None:  # it may have one: the order is looked for when it is repeated
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=said.strip())
        cloud_id = commands.cloud_id(job[1], order.instance)
        return CloudInstance(order.instance, cloud_id, order.region, InstanceState.STARTING, launched_at=timezone.now())

    def _script(self, order: InstanceOrder) -> str:
        shell, _, rest = order.user_data.partition("\n")
        return order.user_data if self.logs_in else f"{shell}\n{PATH}\n{rest}"

    def _arguments(self, order: InstanceOrder) -> list[str]:
        """sbatch's. The script is its input, since it has a token that other users must not see.

        With `--export=NONE`, or the names of variables, a node first logs the user in, which may take seconds.
        """
        gpu = gpu_of(order)
        gres = [f"--gres=gpu:{gpu}:{order.gpu_count}" if gpu else f"--gres=gpu:{order.gpu_count}"]
        return [
            "--parsable", "--no-requeue", "--nodes=1", "--ntasks=1", "--output=/dev/null",
            f"--export={'NONE' if self.logs_in else 'ALL'}",
            f"--job-name={order.instance}",
            f"--comment={commands.comment(order.deployment, order.project, order.run)}",
            f"--partition={order.region}",
            f"--cpus-per-task={max(order.cpus, 1)}",
            *([f"--mem={order.memory_mib}M"] if order.memory_mib else []),
            *(gres if order.gpu_count else []),
            *([f"--time={math.ceil(order.duration_s / 60)}"] if order.duration_s is not None else []),
            *self.options,
        ]  # fmt: skip

    def instances(self, region: str, deployment: str) -> list[CloudInstance]:
        found = commands.jobs(self._squeue(f"--partition={region}"), deployment)
        return [job for job in found if job.region == region]

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        """Slurm sends SIGTERM to all processes of a job, and SIGKILL after its `KillWait`."""
        alive = {job.cloud_id for job in commands.jobs(self._squeue(f"--partition={region}")) if not job.why}
        doomed = [commands.number(cloud_id) for cloud_id in cloud_ids if cloud_id in alive]
        if doomed:
            try:
                self.commands.run("scancel", *doomed)
            except EngineRefused as error:
                if "Invalid job id" not in error.text:
                    raise

    def accounting(self, region: str, cloud_ids: Sequence[str]) -> dict[str, InstanceUsage] | None:
        measured = commands.accounting(self.commands.run("scontrol", "show", "config"))
        if measured is None:
            return None
        text = self.commands.run(
            "sacct", "--noheader", "--parsable2", "--noconvert",
            f"--jobs={','.join(map(commands.number, cloud_ids))}", f"--format={commands.USAGE_FORMAT}",
        )  # fmt: skip
        return commands.usage(text, measured=measured)

    def _squeue(self, *which: str) -> str:
        """Jobs in JOB_FORMAT, with those that ended lately (Slurm's `MinJobAge`)."""
        said = self.commands.run("squeue", "--me", "--states=all", f"--format={commands.JOB_FORMAT}", *which)
        return commands.listed(said, commands.JOB_HEADER)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """One caller of all processes at a time. Raises SourceFailed when another one takes too long."""
    holder, until = uuid.uuid4().hex, time.monotonic() + WAIT_S
    while not Lease.take(name, holder, LEASE_S, timezone.now()):
        if time.monotonic() > until:
            raise unreachable("Slurm", "another process is asking")
        time.sleep(AGAIN_S)  # the lease is a row: nothing tells of its end
    try:
        yield
    finally:
        Lease.release(name, holder)


class SlurmKind(ClusterKind):
    name = "slurm"
    label = "Slurm"
    driver_class = SlurmBackend
    schema = SlurmSettings
    part, engine, answers = gettext_lazy("Partitions"), gettext_lazy("Slurm"), gettext_lazy("Slurm answers.")
    setup_hint = gettext_lazy("Runs become batch jobs of a Slurm cluster, submitted when there is room for them.")

    def location(self, config: Mapping[str, Any]) -> str:
        return ", ".join(config["partitions"])

    def cluster(self, config: Mapping[str, Any]) -> str:
        return str(config.get("ssh_host") or "localhost").rpartition("@")[2]

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        if detail.get("code") == "partition_down":
            return _("The partition takes no jobs.")
        text, number = super().offer_detail(detail), detail.get("waiting", 0)
        if detail.get("code") != "cluster_busy" or not number:
            return text
        waiting = ngettext("%(waiting)d job waits in Slurm", "%(waiting)d jobs wait in Slurm", number)
        return f"{text}; {waiting % detail}"

    def wait_reason(self, code: str) -> str:
        why = WAITS.get(code) or next((text for start, text in LIMITS.items() if code.startswith(start)), None)
        if why is None:
            return _("Slurm keeps it waiting: %s") % code
        return _("Slurm keeps it waiting: %(why)s (%(code)s)") % {"why": why, "code": code}


def _partition(name: str, known: Sequence[str]) -> ReportLine:
    if name in known:
        return ReportLine(name, "ok", "✓", _("found"))
    there = ", ".join(sorted(set(known))) or _("none")
    return ReportLine(name, "failed", "✗", _("no such partition"), _("Partitions there: %s.") % there)
