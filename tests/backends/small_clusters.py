"""Clusters in memory that answer as Slurm's commands, Dask's scheduler and Ray's dashboard do, below their drivers.

All have the same nodes: `n1` with 4 CPUs, 4000 MiB and 2 A100s, and `n2` with 4 CPUs and 4000 MiB. Slurm has the
partitions `main` and `short`, which share them. Each starts jobs on the fullest node that has room.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.utils import timezone

from dstackweb.backends.contract import SourceFailed, SourceFailure
from dstackweb.backends.dask.fit import CPU, fits, taken
from dstackweb.backends.dask.scheduler import Scheduler
from dstackweb.backends.ray.dashboard import Answer, Dashboard
from dstackweb.backends.slurm.commands import JOB_HEADER, Commands

MIB = 1 << 20
NODES = {"n1": (4, 4000, 2), "n2": (4, 4000, 0)}
"""CPUs, memory and GPUs."""


@dataclass
class SmallJob:
    """A job of a cluster; without a `node` it waits. A stranger's has no `deployment`."""

    number: int
    name: str
    cpus: int
    memory_mib: int = 0
    gpus: int = 0
    deployment: str = ""
    partition: str = "main"
    node: str = ""
    at: dt.datetime = field(default_factory=timezone.now)
    over: bool = False


class SmallCluster(ABC):
    """`started` has the instances that it ever started, in order; `refused` how many orders it did not take."""

    kind: str
    config: dict[str, Any]

    def __init__(self) -> None:
        self.jobs: list[SmallJob] = []
        self.started: list[str] = []
        self.refused = 0
        self.away = False
        self._numbers = itertools.count(1)

    @abstractmethod
    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the kind's driver reach this cluster."""

    def add(self, job: SmallJob) -> SmallJob:
        self.jobs.append(job)
        self.start_waiting()
        return job

    def take_room(self, cpus: int) -> list[SmallJob]:
        """A stranger's jobs of a CPU."""
        return [self.add(SmallJob(next(self._numbers), "stranger", 1)) for _ in range(cpus)]

    def end(self, *jobs: SmallJob) -> None:
        for job in jobs:
            job.over = True
        self.start_waiting()

    def job(self, instance: str) -> SmallJob:
        return next(job for job in self.jobs if job.name == instance)

    def alive(self) -> list[SmallJob]:
        return [job for job in self.jobs if not job.over]

    def free(self, node: str) -> tuple[int, int, int]:
        """CPUs, memory and GPUs of a node that no job has."""
        cpus, memory, gpus = NODES[node]
        here = [job for job in self.alive() if job.node == node]
        return (
            cpus - sum(job.cpus for job in here),
            memory - sum(job.memory_mib for job in here),
            gpus - sum(job.gpus for job in here),
        )

    def place_for(self, job: SmallJob) -> str:
        """The fullest node with room, one without GPUs for a job that needs none; empty: there is no room."""
        asked = (job.cpus, job.memory_mib, job.gpus)
        able = [node for node in NODES if all(has >= asks for has, asks in zip(self.free(node), asked, strict=True))]
        return min(able, key=lambda node: (not job.gpus and NODES[node][2] > 0, self.free(node)), default="")

    def start_waiting(self) -> None:
        """Start what waits, in order, as long as the first fits."""
        for job in self.alive():
            if job.node:
                continue
            job.node = self.place_for(job)
            if not job.node:
                return
            if job.deployment:
                self.started.append(job.name)

    def _new(self, name: str, **asks: Any) -> SmallJob:
        return SmallJob(next(self._numbers), name, **asks)


class SmallSlurm(SmallCluster):
    """It refuses nothing: what does not fit waits."""

    kind = "slurm"
    config = {"partitions": ["main"]}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(_self: Commands, name: str, *arguments: str, text: str = "") -> str:
            if self.away:
                raise SourceFailed(SourceFailure.UNREACHABLE, endpoint="Slurm", text="away")
            answer: str = getattr(self, name)(arguments)
            return answer

        monkeypatch.setattr(Commands, "run", run)

    def scontrol(self, arguments: Sequence[str]) -> str:
        if arguments[1] == "config":
            return "AccountingStorageType = (null)\n"
        if arguments[1] == "partitions":
            return "".join(f"PartitionName={name} State=UP OverSubscribe=NO\n" for name in ("main", "short"))
        return "".join(self._node(node) for node in NODES)

    def _node(self, node: str) -> str:
        (cpus, memory, gpus), free = NODES[node], self.free(node)
        gres = f"Gres=gpu:a100:{gpus} GresUsed=gpu:a100:{gpus - free[2]}" if gpus else "Gres=(null) GresUsed=gpu:0"
        return (
            f"NodeName={node} CPUAlloc={cpus - free[0]} CPUTot={cpus} RealMemory={memory} AllocMem={memory - free[1]} "
            f"{gres} State=MIXED Partitions=main,short\n"
        )

    def squeue(self, arguments: Sequence[str]) -> str:
        wanted = dict(argument.lstrip("-").partition("=")[::2] for argument in arguments)
        if wanted["states"] == "PENDING":
            waiting = [job for job in self.alive() if not job.node]
            return "PARTITION|REASON|NODES|CPUS|MIN_MEMORY|TRES_PER_NODE\n" + "".join(
                f"{job.partition}|Resources|1|{job.cpus}|{job.memory_mib or 1}M|"
                f"{f'gres/gpu:a100:{job.gpus}' if job.gpus else 'N/A'}\n"
                for job in waiting
            )
        shown = [job for job in self.jobs if job.deployment and job.name == wanted.get("name", job.name)]
        return f"{JOB_HEADER}\n" + "".join(map(self._job, shown))

    def _job(self, job: SmallJob) -> str:
        state = "COMPLETED" if job.over else "RUNNING" if job.node else "PENDING"
        at, reason = int(job.at.timestamp()), "None" if job.node else "Resources"
        return (
            f"{job.number}|{job.name}|{state}|{job.partition}|{at}|{at}|{job.node}|{reason}"
            f"|dstackweb:{job.deployment} main/run\n"
        )

    def sbatch(self, arguments: Sequence[str]) -> str:
        asked = dict(argument.lstrip("-").partition("=")[::2] for argument in arguments)
        job = self._new(
            asked["job-name"], cpus=int(asked["cpus-per-task"]), memory_mib=int(asked.get("mem", "0M")[:-1]),
            gpus=int(asked.get("gres", ":0").rpartition(":")[2]), partition=asked["partition"],
            deployment=asked["comment"].partition(":")[2].split()[0],
        )  # fmt: skip
        return f"{self.add(job).number}\n"

    def scancel(self, arguments: Sequence[str]) -> str:
        self.end(*[job for job in self.jobs if str(job.number) in arguments])
        return ""


class SmallDask(SmallCluster):
    """Its scheduler refuses what no worker has room for."""

    kind = "dask"
    config = {"scheduler": "tcp://192.0.2.9:8786", "gpus": ["GPU=A100:80GB"]}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def ask(_self: Scheduler, what: str, into: Any, **data: Any) -> Any:
            if self.away:
                raise SourceFailed(SourceFailure.UNREACHABLE, endpoint="Dask", text="away")
            return getattr(self, what)(**data)

        monkeypatch.setattr(Scheduler, "ask", ask)

    def workers(self, *, empty: bool = False) -> list[dict[str, Any]]:
        found = []
        for node, (cpus, memory, gpus) in NODES.items():
            worker: dict[str, Any] = {
                "name": node, "threads": cpus, "tasks": 0, "cpus_used": 0, "memory_mib": memory, "memory_used_mib": 0,
                "resources": {CPU: float(cpus), **({"GPU": float(gpus)} if gpus else {})}, "resources_used": {},
                "running": True,
            }  # fmt: skip
            for job in () if empty else [job for job in self.alive() if job.node == node]:
                worker = taken(worker, job.cpus, job.memory_mib, "GPU", job.gpus)
            found.append(worker)
        return found

    def launch(self, key: str, cpus: int, memory_mib: int, gpu: str, gpu_count: int, **order: Any) -> dict[str, Any]:
        size, name = (cpus, memory_mib, gpu, gpu_count), order["instance"]
        if not any(job.name == name for job in self.jobs):
            if not any(fits(worker, *size) for worker in self.workers()):
                self.refused += 1
                return {"refused": "no room", "full": any(fits(one, *size) for one in self.workers(empty=True))}
            self.add(
                self._new(
                    name, cpus=max(cpus, 1), memory_mib=memory_mib, gpus=gpu_count, deployment=order["deployment"]
                )
            )
        return self._row(self.job(name))

    def instances(self, deployment: str) -> list[dict[str, Any]]:
        return [self._row(job) for job in self.jobs if job.deployment == deployment]

    def terminate(self, keys: list[str]) -> None:
        self.end(*[job for job in self.jobs if f"dstackweb-{job.name}" in keys])

    def _row(self, job: SmallJob) -> dict[str, Any]:
        state = "gone" if job.over else "running" if job.node else "starting"
        return {"key": f"dstackweb-{job.name}", "instance": job.name, "host": job.node, "at": job.at.timestamp(),
                "why": "cloud" if job.over else "", "text": "", "state": state}  # fmt: skip


class SmallRay(SmallCluster):
    """It would keep waiting what does not fit; the driver looks first."""

    kind = "ray"
    config = {"address": "http://192.0.2.9:8265", "insecure": True, "gpu_memory": ["A100=80GB"]}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(_self: Dashboard, method: str, path: str, body: Any = None) -> Answer:
            if self.away:
                raise SourceFailed(SourceFailure.UNREACHABLE, endpoint="Ray", text="away")
            return Answer(self._answer(method, path.partition("?")[0], body), timezone.now().timestamp())

        monkeypatch.setattr(Dashboard, "call", call)

    def _answer(self, method: str, path: str, body: Any) -> Any:
        match method, path.strip("/").split("/"):
            case "GET", ["api", "v0", "nodes"]:
                return {"data": {"result": {"result": [self._node(node) for node in NODES]}}}
            case "GET", ["api", "cluster_status"]:
                at = timezone.now().timestamp() + 60  # all jobs are in it
                used = {node: dict(self._used(node)) for node in NODES}
                return {"data": {"clusterStatus": {"time": at, "loadMetricsReport": {"usageByNode": used}}}}
            case "POST", ["api", "jobs"]:
                size = json.loads(body["metadata"]["dstackweb_size"])
                job = self._new(
                    body["submission_id"], cpus=int(size["CPU"]), memory_mib=int(size.get("memory", 0)) // MIB,
                    gpus=int(size.get("GPU", 0)), deployment=body["metadata"]["dstackweb"],
                )  # fmt: skip
                self.add(job)
                return {"submission_id": job.name}
            case "GET", ["api", "jobs"]:
                return [self._job(job) for job in self.jobs if job.deployment]
            case "GET", ["api", "jobs", name]:
                return next((self._job(job) for job in self.jobs if job.name == name), None)
            case "POST", ["api", "jobs", name, "stop"]:
                self.end(self.job(name))
                return {"stopped": True}
        return None

    def _node(self, node: str) -> dict[str, Any]:
        cpus, memory, gpus = NODES[node]
        total = {"CPU": float(cpus), "memory": float(memory * MIB)}
        total |= {"GPU": float(gpus), "accelerator_type:A100": 1.0} if gpus else {}
        return {"node_id": node, "state": "ALIVE", "resources_total": total}

    def _used(self, node: str) -> Iterator[tuple[str, list[float]]]:
        (cpus, memory, gpus), free = NODES[node], self.free(node)
        yield "CPU", [float(cpus - free[0]), float(cpus)]
        yield "memory", [float((memory - free[1]) * MIB), float(memory * MIB)]
        if gpus:
            yield "GPU", [float(gpus - free[2]), float(gpus)]

    def _job(self, job: SmallJob) -> dict[str, Any]:
        ms = int(job.at.timestamp() * 1000)
        size = {"CPU": float(job.cpus), "memory": float(job.memory_mib * MIB), "GPU": float(job.gpus)}
        return {
            "submission_id": job.name, "status": "STOPPED" if job.over else "RUNNING" if job.node else "PENDING",
            "start_time": ms, "end_time": ms if job.over else None, "driver_node_id": job.node, "message": "",
            "metadata": {"dstackweb": job.deployment, "dstackweb_size": json.dumps(size)},
        }  # fmt: skip


CLUSTERS = (SmallSlurm, SmallDask, SmallRay)
