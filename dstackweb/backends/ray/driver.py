"""The driver of a Ray cluster: its free capacity as offers, and jobs of the Jobs API as instances."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from django.utils import timezone

from dstackweb.backends.clusters import FRESH_S, OWN_USER, REGION, ClusterBackend, gpu_memory, shares_servers_user
from dstackweb.backends.contract import (
    CloudInstance,
    InstanceOrder,
    InstanceState,
    LaunchFailed,
    LaunchFailure,
    Offer,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceSpec,
)
from dstackweb.backends.kinds import Kind
from dstackweb.backends.ray import cluster
from dstackweb.backends.ray.cluster import Cluster, Job, Node
from dstackweb.backends.ray.dashboard import Answer, CallFailed, Dashboard
from dstackweb.lib.network import is_local
from dstackweb.spec.effective import Requirements

if TYPE_CHECKING:
    from dstackweb.backends.models import Backend

KEPT_S, DELETED_AT_ONCE = 3600.0, 20
"""Ray keeps ended jobs for ever, and its list takes longer with each: ours are deleted after this."""
INVALID = 400
ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)
"""What reading an answer raises that is not as expected: times that no calendar has are an OSError."""
ENTRYPOINT = (
    'script=$(python3 -c "import json, os; '
    "print(json.loads(os.environ['RAY_JOB_CONFIG_JSON_ENV_VAR'])['metadata']['" + cluster.SCRIPT + "'])\") "
    '&& unset RAY_JOB_CONFIG_JSON_ENV_VAR && eval "$script"'
)
"""A job's command is in process lists and logs, and its `runtime_env` in logs: the script comes in the metadata."""


class RayBackend(ClusterBackend):
    """One cluster, which is one region. What a job takes is just what a node of the run needs."""

    key = SourceKey("nodes", "")
    sources: Mapping[str, SourceSpec] = {"nodes": SourceSpec(FRESH_S, Cluster, ("address", "ca_file"), moves=True)}

    def __init__(self, backend: Backend) -> None:
        config = backend.config
        self.name: str = backend.name
        self.more: Mapping[str, float] = amounts(config.get("resources") or ())
        self.gpu_memory: Mapping[str, int] = gpu_memory(config.get("gpu_memory") or ())
        token = Kind.secrets_of(backend.secret).get("token", "")
        self.dashboard = Dashboard(config["address"].rstrip("/"), token, config.get("ca_file") or "")

    # Offers: `fetch` asks the cluster, in the background; `join` never does.

    def fetch(self, key: SourceKey) -> Cluster:
        nodes, status = self._ask("api/v0/nodes?limit=10000"), self._ask("api/cluster_status")
        listed = self._ask("api/jobs/")
        try:
            return cluster.cluster(nodes.value, status.value, cluster.jobs(listed.value))
        except ODD as error:
            raise _odd(error) from error

    def found_offers(self, found: Cluster, needs: Requirements, image: str | None) -> Iterator[Offer]:
        count = needs.gpu_count_min
        for model in cluster.models(found.nodes.values()) if count else [""]:
            size = cluster.size(needs.cpu_min, needs.memory_min_mib, model, count, self.more)
            nodes = [node for node in found.nodes.values() if not count or node.gpu == model]
            if any(node.fits(size, empty=True) for node in nodes):
                fits = sum(node.fits(size) for node in nodes)
                yield self.offer(
                    needs,
                    image,
                    _detail(nodes, "GPU" if count else "CPU", fits, found.is_counted),
                    region=REGION,
                    instance_type=f"gpu:{model}" if model else "gpu" if count else "cpu",
                    gpu_name=model.upper() if count else "",
                    gpu_memory_mib=self.gpu_memory.get(model.lower(), 0) if count else 0,
                )

    # Instances: each call may be repeated, doubled or lost.

    def launch(self, order: InstanceOrder) -> CloudInstance:
        """Ray takes one job of a name. It would keep what doesn't fit, in a queue that no one sees: that is refused."""
        if shares_servers_user(is_local(self.dashboard.address)):
            raise LaunchFailed(LaunchFailure.NOT_ALLOWED, OWN_USER)
        return self._find(order) or self._submit(order)

    def _find(self, order: InstanceOrder) -> CloudInstance | None:
        answer = self._ask(f"api/jobs/{quote(order.instance, safe='')}")
        try:
            return None if answer.value is None else cluster.instance(cluster.job(answer.value), REGION, answer.at)
        except ODD as error:
            raise _odd(error) from error

    def _submit(self, order: InstanceOrder) -> CloudInstance:
        model = order.instance_type.removeprefix("gpu").removeprefix(":")
        size = cluster.size(order.cpus, order.memory_mib, model, order.gpu_count, self.more)
        if not any(node.fits(size) for node in self.fetch(self.key).nodes.values()):
            raise LaunchFailed(LaunchFailure.NO_CAPACITY, "no node of the cluster has room for it")
        try:
            if self.dashboard.call("POST", "api/jobs/", _request(order, size)).value is None:
                raise SourceFailed(SourceFailure.SERVICE_ERROR, text="no Jobs API")
        except CallFailed as error:
            if found := self._find(order):
                return found  # the same order came twice
            if error.status == INVALID:
                raise LaunchFailed(LaunchFailure.REFUSED, error.text) from error
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=error.text) from error
        name = order.instance
        return CloudInstance(name, name, REGION, InstanceState.STARTING, launched_at=timezone.now())

    def instances(self, region: str, deployment: str) -> list[CloudInstance]:
        answer = self._ask("api/jobs/")
        try:
            ours = [job for job in cluster.jobs(answer.value) if job.deployment == deployment]
            found = [(job, cluster.instance(job, region, answer.at)) for job in ours]
        except ODD as error:
            raise _odd(error) from error
        self._forget(job.name for job in ours if job.is_over and answer.at - (job.ended or answer.at) > KEPT_S)
        return [replace(one, state=InstanceState.ENDING) if self._is_left(job) else one for job, one in found]

    def _is_left(self, job: Job) -> bool:
        """Whether a job is there whose supervisor Ray could not reach, and called failed; it is stopped then."""
        if not (job.is_over and job.error == cluster.LOST):
            return False
        try:
            answer = self.dashboard.call("POST", f"api/jobs/{quote(job.name, safe='')}/stop").value
        except CallFailed:
            return True
        return isinstance(answer, dict) and bool(answer.get("stopped"))

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        """Ray sends SIGTERM to all processes of a job, and SIGKILL after its `RAY_JOB_STOP_WAIT_TIME_S`."""
        failed: CallFailed | None = None
        for cloud_id in cloud_ids:
            try:
                self.dashboard.call("POST", f"api/jobs/{quote(cloud_id, safe='')}/stop")
            except CallFailed as error:
                failed = error
        if failed:
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=failed.text) from failed

    def _forget(self, names: Iterator[str]) -> None:
        """Delete some ended jobs; whatever fails is tried again at the next look."""
        for name, _ in zip(names, range(DELETED_AT_ONCE), strict=False):
            with suppress(CallFailed, SourceFailed):
                self.dashboard.call("DELETE", f"api/jobs/{quote(name, safe='')}")

    def _ask(self, path: str) -> Answer:
        try:
            return self.dashboard.call("GET", path)
        except CallFailed as error:
            raise SourceFailed(SourceFailure.SERVICE_ERROR, text=error.text) from error


def _request(order: InstanceOrder, size: Mapping[str, float]) -> dict[str, Any]:
    """Ray's own names: the command's CPUs, GPUs and memory are fields, other resources a mapping."""
    known = ("CPU", "GPU", "memory")
    return {
        "submission_id": order.instance,
        "entrypoint": ENTRYPOINT,
        "entrypoint_num_cpus": size.get("CPU", 0),
        "entrypoint_num_gpus": size.get("GPU", 0),
        "entrypoint_memory": int(size.get("memory", 0)),
        "entrypoint_resources": {name: amount for name, amount in size.items() if name not in known},
        "metadata": {
            cluster.DEPLOYMENT: order.deployment,
            cluster.SIZE: json.dumps(size),
            cluster.SCRIPT: order.user_data,
            "job_name": f"{order.project}/{order.run}",
        },
    }


def _odd(error: Exception) -> SourceFailed:
    return SourceFailed(SourceFailure.SERVICE_ERROR, text=f"an answer of another kind: {type(error).__name__}: {error}")


def _detail(nodes: Sequence[Node], what: str, fits: int, is_counted: bool) -> dict[str, Any]:
    return {
        "code": "cluster_busy" if not fits else "cluster_free" if is_counted else "cluster_uncounted",
        "fits": fits,
        "free": int(sum(node.free.get(what, 0.0) for node in nodes)),
        "total": int(sum(node.total.get(what, 0.0) for node in nodes)),
        "what": what.lower(),
    }


def amounts(lines: Sequence[str]) -> dict[str, float]:
    """Amounts by resource, from lines such as `batch=1`. Raises ValueError."""
    found = {}
    for line in lines:
        name, _, amount = line.partition("=")
        found[name.strip()] = float(amount)
        if not name.strip() or not 0 < found[name.strip()] < 1e6:
            raise ValueError(f"{line[:80]!r} is not a name and an amount")
    return found
