"""What fits on a worker. The server's code, and by its text the scheduler's: it imports nothing of dstackweb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CPU, MEMORY = "CPU", "MEMORY"
"""Resources of a worker that count its CPUs and its bytes of memory, where it has them."""


def fits(worker: Mapping[str, Any], cpus: int, memory_mib: int, gpu: str, count: int, *, empty: bool = False) -> int:
    """How many tasks of this size a worker takes: now, or when it is `empty`. Each takes a thread.

    Without a resource CPU a thread counts as a CPU; without MEMORY, what other tasks use is not known.
    """
    if not empty and not worker["running"]:
        return 0
    resources = worker["resources"]
    used = {} if empty else worker["resources_used"]
    free = [worker["threads"] - (0 if empty else worker["tasks"])]
    if CPU in resources:
        free.append((resources[CPU] - used.get(CPU, 0)) // max(cpus, 1))
    else:
        free.append((worker["threads"] - (0 if empty else worker["cpus_used"])) // max(cpus, 1))
    if memory_mib and MEMORY in resources:
        free.append((resources[MEMORY] - used.get(MEMORY, 0)) // (memory_mib * 2**20))
    elif memory_mib and worker["memory_mib"]:
        free.append((worker["memory_mib"] - (0 if empty else worker["memory_used_mib"])) // memory_mib)
    if count:
        free.append((resources.get(gpu, 0) - used.get(gpu, 0)) // count)
    return max(0, int(min(free)))


def taken(worker: Mapping[str, Any], cpus: int, memory_mib: int, gpu: str, count: int) -> dict[str, Any]:
    """The worker with a task of this size on it."""
    used = dict(worker["resources_used"])
    for name, amount in claims(worker, cpus, memory_mib, gpu, count).items():
        used[name] = used.get(name, 0) + amount
    return {
        **worker,
        "tasks": worker["tasks"] + 1,
        "cpus_used": worker["cpus_used"] + max(cpus, 1),
        "memory_used_mib": worker["memory_used_mib"] + memory_mib,
        "resources_used": used,
    }


def claims(worker: Mapping[str, Any], cpus: int, memory_mib: int, gpu: str, count: int) -> dict[str, float]:
    """The resources that a task of this size takes of a worker."""
    asked: dict[str, float] = {CPU: max(cpus, 1), MEMORY: memory_mib * 2**20, gpu: count}
    return {name: amount for name, amount in asked.items() if amount and name in worker["resources"]}
