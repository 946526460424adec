"""The driver of a Dask cluster: free workers as offers, tasks as instances."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from dstackweb.backends.clusters import FRESH_S, OWN_USER, REGION, ClusterBackend, shares_servers_user
from dstackweb.backends.contract import (
    CloudInstance,
    InstanceOrder,
    InstanceState,
    LaunchFailed,
    LaunchFailure,
    Offer,
    SourceKey,
    SourceSpec,
)
from dstackweb.backends.dask.fit import CPU, fits
from dstackweb.backends.dask.scheduler import Scheduler
from dstackweb.backends.dask.settings import Gpu, gpus, tls
from dstackweb.backends.kinds import Kind
from dstackweb.lib.network import is_local
from dstackweb.spec.effective import Requirements

if TYPE_CHECKING:
    from dstackweb.backends.models import Backend

GRACE_S = 30.0
"""From SIGTERM to SIGKILL, for an instance whose worker is lost or whose task is cancelled (`agent.TERM_NOTICE_S`)."""


Amount = Annotated[float, Field(gt=-1e18, lt=1e18)]
Moment = Annotated[float, Field(ge=0, lt=2**35)]
"""Seconds since 1970. Of neither is NaN or infinite, which msgpack has."""


class Worker(TypedDict):
    """A worker's resources and what is used of them: `cpus_used` by threads, `tasks` is how many threads are taken."""

    name: str
    threads: int
    tasks: int
    cpus_used: int
    memory_mib: int
    memory_used_mib: int
    resources: dict[str, Amount]
    resources_used: dict[str, Amount]
    running: bool


class Row(TypedDict):
    """An instance as the scheduler remembers it."""

    key: str
    instance: str
    host: str
    at: Moment
    why: str
    text: str
    state: InstanceState


class Answer(TypedDict, total=False):
    """What an order gets: a row, or a refusal."""

    refused: str
    key: str
    instance: str
    host: str
    at: Moment
    why: str
    text: str
    state: InstanceState


class DaskBackend(ClusterBackend):
    """One cluster. Each instance is a task that holds a thread and resources of one worker."""

    key = SourceKey("workers", "")
    sources: Mapping[str, SourceSpec] = {"workers": SourceSpec(FRESH_S, list[Worker], ("scheduler",), moves=True)}

    def __init__(self, backend: Backend) -> None:
        config = backend.config
        self.name: str = backend.name
        self.gpus: Sequence[Gpu] = gpus(config.get("gpus", ("GPU",)))
        self.scheduler = Scheduler(config["scheduler"], tls(config, Kind.secrets_of(backend.secret)))

    # Offers: `fetch` asks the cluster, in the background; `join` never does.

    def fetch(self, key: SourceKey) -> list[Worker]:
        return self.scheduler.ask("workers", list[Worker])

    def found_offers(self, found: Sequence[Worker], needs: Requirements, image: str | None) -> Iterator[Offer]:
        count = needs.gpu_count_min
        for gpu in self.gpus if count else [None]:
            size = (needs.cpu_min, needs.memory_min_mib, gpu.resource if gpu else "", count)
            if any(fits(worker, *size, empty=True) for worker in found):
                yield self.offer(
                    needs,
                    image,
                    _detail(found, gpu, sum(fits(worker, *size) for worker in found)),
                    region=REGION,
                    instance_type=f"gpu:{gpu.resource}" if gpu else "cpu",
                    gpu_name=gpu.name if gpu else "",
                    gpu_memory_mib=gpu.memory_mib if gpu else 0,
                )

    # Instances: each call may be repeated, doubled or lost.

    def launch(self, order: InstanceOrder) -> CloudInstance:
        """The scheduler places it and remembers it in one step, so that doubled orders are one task."""
        if shares_servers_user(is_local(self.scheduler.address)):
            raise LaunchFailed(LaunchFailure.NOT_ALLOWED, OWN_USER)
        answer = self.scheduler.ask(
            "launch",
            Answer,
            key=f"dstackweb-{order.instance}",
            instance=order.instance,
            deployment=order.deployment,
            cpus=order.cpus,
            memory_mib=order.memory_mib,
            gpu=order.instance_type.partition(":")[2],
            gpu_count=order.gpu_count,
            script=order.user_data,
            grace_s=GRACE_S,
            limit_s=order.duration_s,
        )
        if "refused" in answer:
            raise LaunchFailed(LaunchFailure.NO_CAPACITY, answer["refused"])
        return _instance(answer)

    def instances(self, region: str, deployment: str) -> list[CloudInstance]:
        return [_instance(row) for row in self.scheduler.ask("instances", list[Row], deployment=deployment)]

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        """Release the tasks: their guards send SIGTERM, and SIGKILL after GRACE_S."""
        if cloud_ids:
            self.scheduler.ask("terminate", type(None), keys=list(cloud_ids))


def _instance(row: Row | Answer) -> CloudInstance:
    at = dt.datetime.fromtimestamp(row["at"], dt.UTC)
    return CloudInstance(
        row["instance"], row["key"], REGION, row["state"], row["host"], "", at, row["why"], row["text"]
    )


def _detail(workers: Sequence[Worker], gpu: Gpu | None, fit: int) -> dict[str, Any]:
    usable = [worker for worker in workers if worker["running"]]
    what = gpu.resource if gpu else CPU
    total = used = 0.0
    for worker in usable:
        counted = gpu is not None or CPU in worker["resources"]
        total += worker["resources"].get(what, 0) if counted else worker["threads"]
        used += worker["resources_used"].get(what, 0) if counted else min(worker["cpus_used"], worker["threads"])
    return {
        "code": "cluster_free" if fit else "cluster_busy",
        "fits": fit,
        "free": int(total - used),
        "total": int(total),
        "what": "gpu" if gpu else "cpu",
        "workers": len(usable),
    }
