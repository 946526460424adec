"""The driver of a Slurm cluster: its free capacity as offers, and batch jobs as instances."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.utils import timezone

from dstackweb.backends.clusters import FRESH_S, ClusterBackend, EngineRefused, gpu_memory, shares_servers_user
from dstackweb.backends.contract import (
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
from dstackweb.backends.slurm import cluster
from dstackweb.backends.slurm.cluster import Partition
from dstackweb.backends.slurm.commands import Commands
from dstackweb.lib.models import Lease
from dstackweb.spec.effective import Requirements

if TYPE_CHECKING:
    from dstackweb.backends.models import Backend

OPTIONS = ("account", "qos", "constraint", "reservation")
"""Settings that sbatch gets as they are."""
LEASE_S, WAIT_S = 60.0, 30.0
OWN_USER = (
    "jobs would have the server's user, and may reach its secret key: set ssh_host to another user, such as "
    "slurm@localhost, or set DSTACKWEB_SHARED_UID=1 where everyone who may submit runs is trusted"
)
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


class SlurmBackend(ClusterBackend):
    """One cluster. A partition is a region; what is allocated is just what a node of the run needs."""

    key = SourceKey("partitions", "")
    sources: Mapping[str, SourceSpec] = {
        "partitions": SourceSpec(FRESH_S, dict[str, Partition], ("ssh_host", "partitions"), moves=True)
    }

    def __init__(self, backend: Backend) -> None:
        config = backend.config
        self.name: str = backend.name
        self.partitions: Sequence[str] = config["partitions"]
        self.options = [f"--{name}={config[name]}" for name in OPTIONS if config.get(name)]
        self.gpu_memory: Mapping[str, int] = gpu_memory(config.get("gpu_memory") or ())
        self.most_waiting: int = config.get("most_waiting", 1)
        self.logs_in: bool = config.get("login_environment", False)
        self.commands = Commands(config.get("ssh_host", ""), config.get("ssh_key_file", ""))

    def regions(self) -> Sequence[str]:
        return list(self.partitions)

    # Offers: `fetch` asks the cluster, in the background; `join` never does.

    def fetch(self, key: SourceKey) -> dict[str, Partition]:
        # The queue first: a job that starts meanwhile then counts twice, rather than not at all.
        queue = self._ask("squeue", "--noheader", "--states=PENDING", "--format=%P|%r")
        nodes = cluster.nodes(self._ask("scontrol", "show", "nodes", "--oneliner", "--details"))
        found = cluster.partitions(self._ask("scontrol", "show", "partitions", "--oneliner"), nodes, queue)
        return {name: partition for name, partition in found.items() if name in self.partitions}

    def found_offers(self, found: dict[str, Partition], needs: Requirements, image: str | None) -> Iterator[Offer]:
        for partition in found.values():
            yield from self._offers(partition, needs, image)

    def _offers(self, partition: Partition, needs: Requirements, image: str | None) -> Iterator[Offer]:
        count = needs.gpu_count_min
        kinds = sorted({kind for node in partition.nodes.values() for kind in node.gpus}) if count else [""]
        for kind in kinds:
            size = (needs.cpu_min, needs.memory_min_mib, kind, count)
            if not any(node.fits(*size, empty=True) for node in partition.nodes.values()):
                continue
            fits = sum(node.fits(*size, whole=partition.exclusive) for node in partition.nodes.values())
            fits = max(0, fits - partition.new) if partition.up and partition.waiting < self.most_waiting else 0
            yield self.offer(
                needs,
                image,
                _detail(partition, kind if count else None, fits),
                region=partition.name,
                instance_type=f"gpu:{kind}" if kind else "gpu" if count else "cpu",
                gpu_name=kind.upper() if count else "",
                gpu_memory_mib=self.gpu_memory.get(kind.lower(), 0) if count else 0,
            )

    # Instances: each call may be repeated, doubled or lost.

    def launch(self, order: InstanceOrder) -> CloudInstance:
        """Slurm takes any number of jobs of one name, so an order is looked for first, by one caller at a time."""
        if shares_servers_user(not self.commands.host):
            raise LaunchFailed(LaunchFailure.NOT_ALLOWED, OWN_USER)
        with _alone(f"slurm:{order.instance}"):
            return (None if order.is_new else self._find(order)) or self._submit(order)

    def _find(self, order: InstanceOrder) -> CloudInstance | None:
        found = cluster.jobs(self._squeue(f"--name={order.instance}"), order.deployment)
        return min(found, key=lambda job: int(cluster.number(job.cloud_id).split("_")[0]), default=None)

    def _submit(self, order: InstanceOrder) -> CloudInstance:
        try:
            job = self.commands.run("sbatch", *self._arguments(order), text=self._script(order)).split(";")[0].strip()
        except EngineRefused as error:
            code = next((code for part, code in REFUSALS if part in error.text), LaunchFailure.REFUSED)
            raise LaunchFailed(code, error.text.removeprefix("sbatch: error: ")) from error
        cloud_id = cluster.cloud_id(job, order.instance)
        return CloudInstance(order.instance, cloud_id, order.region, InstanceState.STARTING, launched_at=timezone.now())

    def _script(self, order: InstanceOrder) -> str:
        shell, _, rest = order.user_data.partition("\n")
        return order.user_data if self.logs_in else f"{shell}\n{PATH}\n{rest}"

    def _arguments(self, order: InstanceOrder) -> list[str]:
        """sbatch's. The script is its input, since it has a token that other users must not see.

        With `--export=NONE`, or the names of variables, a node first logs the user in, which may take seconds.
        """
        kind = order.instance_type.removeprefix("gpu").removeprefix(":")
        gres = [f"--gres=gpu:{kind}:{order.gpu_count}" if kind else f"--gres=gpu:{order.gpu_count}"]
        return [
            "--parsable", "--no-requeue", "--nodes=1", "--ntasks=1", "--output=/dev/null",
            f"--export={'NONE' if self.logs_in else 'ALL'}",
            f"--job-name={order.instance}",
            f"--comment={cluster.comment(order.deployment, order.project, order.run)}",
            f"--partition={order.region}",
            f"--cpus-per-task={max(order.cpus, 1)}",
            *([f"--mem={order.memory_mib}M"] if order.memory_mib else []),
            *(gres if order.gpu_count else []),
            *([f"--time={math.ceil(order.duration_s / 60)}"] if order.duration_s is not None else []),
            *self.options,
        ]  # fmt: skip

    def instances(self, region: str, deployment: str) -> list[CloudInstance]:
        found = cluster.jobs(self._squeue(f"--partition={region}"), deployment)
        return [job for job in found if job.region == region]

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        """Slurm sends SIGTERM to all processes of a job, and SIGKILL after its `KillWait`."""
        alive = {job.cloud_id for job in cluster.jobs(self._squeue(f"--partition={region}")) if not job.why}
        doomed = [cluster.number(cloud_id) for cloud_id in cloud_ids if cloud_id in alive]
        if doomed:
            try:
                self.commands.run("scancel", *doomed)
            except EngineRefused as error:
                if "Invalid job id" not in error.text:
                    raise SourceFailed(SourceFailure.SERVICE_ERROR, text=error.text) from error

    def accounting(self, region: str, cloud_ids: Sequence[str]) -> dict[str, InstanceUsage] | None:
        books = cluster.accounting(self._ask("scontrol", "show", "config"))
        if not books.kept:
            return None
        text = self._ask(
            "sacct", "--noheader", "--parsable2", "--noconvert",
            f"--jobs={','.join(map(cluster.number, cloud_ids))}", f"--format={cluster.USAGE_FORMAT}",
        )  # fmt: skip
        return cluster.usage(text, measured=books.measured)

    def _squeue(self, *which: str) -> str:
        """Jobs in JOB_FORMAT, with those that ended lately (Slurm's `MinJobAge`)."""
        return self._ask("squeue", "--noheader", "--me", "--states=all", f"--format={cluster.JOB_FORMAT}", *which)

    def _ask(self, *command: str) -> str:
        """What a command that changes nothing prints: it has no answer if it is refused."""
        try:
            return self.commands.run(*command)
        except EngineRefused as error:
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=error.text) from error


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """One caller of all processes at a time. Raises SourceFailed when another one takes too long."""
    holder, until = uuid.uuid4().hex, time.monotonic() + WAIT_S
    while not Lease.take(name, holder, LEASE_S, timezone.now()):
        if time.monotonic() > until:
            raise SourceFailed(SourceFailure.UNREACHABLE, endpoint="Slurm", text="another process is asking")
        time.sleep(0.05)
    try:
        yield
    finally:
        Lease.release(name, holder)


def _detail(partition: Partition, kind: str | None, fits: int) -> dict[str, Any]:
    nodes = [node for node in partition.nodes.values() if node.usable]
    total = sum(node.cpus if kind is None else node.gpus.get(kind, 0) for node in nodes)
    used = sum(node.cpus_used if kind is None else node.gpus_used.get(kind, 0) for node in nodes)
    code = "cluster_free" if fits else "partition_down" if not partition.up else "cluster_busy"
    what = "cpu" if kind is None else "gpu"
    return {
        "code": code,
        "fits": fits,
        "free": total - used,
        "total": total,
        "what": what,
        "waiting": partition.waiting,
    }
