"""What Slurm says of its partitions, nodes and jobs, as plain data. Pure."""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dstackweb.backends.contract import CloudInstance, InstanceEnd, InstanceState

_FIELD = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|$)")
_JOB = re.compile(r"\d{1,12}(_\d{1,12})?", re.ASCII)
_GPU = re.compile(r"gpu:(?:([^:(,]+):)?(\d+)")
_UNUSABLE = {"DOWN", "DRAIN", "FAIL", "MAINT", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "REBOOT", "UNKNOWN",
             "RESERVED", "PLANNED", "FUTURE"}  # fmt: skip
"""States of nodes that take no jobs now; `+` and `*` join and end them."""

JOB_FORMAT = "%i|%j|%T|%P|%V|%S|%N|%r|%k"
"""squeue's: ID, name, state, partition, submitted, started, node, reason, comment."""
MARK = "dstackweb:"


@dataclass(frozen=True)
class Node:
    """A node's resources, and how much of them is allocated. `gpus` and `gpus_used` are counts by type."""

    cpus: int
    cpus_used: int
    memory_mib: int
    memory_used_mib: int
    gpus: dict[str, int] = field(default_factory=dict)
    gpus_used: dict[str, int] = field(default_factory=dict)
    usable: bool = True

    def fits(
        self, cpus: int, memory_mib: int, gpu: str, count: int, *, empty: bool = False, whole: bool = False
    ) -> int:
        """How many allocations of this size fit: now, or when the node is `empty`. `whole`: one at a time."""
        if not empty and (not self.usable or (whole and self.cpus_used)):
            return 0
        free = [(self.cpus - (0 if empty else self.cpus_used)) // max(cpus, 1)]
        if memory_mib:
            free.append((self.memory_mib - (0 if empty else self.memory_used_mib)) // memory_mib)
        if count:
            free.append((self.gpus.get(gpu, 0) - (0 if empty else self.gpus_used.get(gpu, 0))) // count)
        return max(0, min(1, *free) if whole else min(free))


@dataclass(frozen=True)
class Partition:
    """A partition with its nodes. Pending jobs of anybody: `waiting`, and `new` if not judged yet."""

    name: str
    up: bool
    exclusive: bool
    nodes: dict[str, Node]
    waiting: int = 0
    new: int = 0


def nodes(text: str) -> dict[str, tuple[Node, list[str]]]:
    """`scontrol show nodes --oneliner --details`: each node, and its partitions."""
    found = {}
    for shown in _records(text, "NodeName"):
        states = set(re.split(r"[+*~#!%$@^-]+", shown.get("State", "UNKNOWN")))
        node = Node(
            cpus=int(shown.get("CPUTot", 0)),
            cpus_used=int(shown.get("CPUAlloc", 0)),
            memory_mib=int(shown.get("RealMemory", 0)),
            memory_used_mib=int(shown.get("AllocMem", 0)),
            gpus=gpus(shown.get("Gres", "")),
            gpus_used=gpus(shown.get("GresUsed", "")),
            usable=not states & _UNUSABLE and "*" not in shown.get("State", ""),
        )
        found[shown["NodeName"]] = (node, [name for name in shown.get("Partitions", "").split(",") if name])
    return found


def partitions(text: str, there: dict[str, tuple[Node, list[str]]], queue: str) -> dict[str, Partition]:
    """`scontrol show partitions --oneliner` with its nodes, and pending jobs' partitions and reasons (`%P|%r`)."""
    waiting: Counter[str] = Counter()
    new: Counter[str] = Counter()
    for line in queue.splitlines():
        names, _, reason = line.partition("|")
        (new if reason == "None" else waiting).update(names.split(","))
    return {
        shown["PartitionName"]: Partition(
            name=shown["PartitionName"],
            up=shown.get("State") == "UP",
            exclusive=shown.get("OverSubscribe") == "EXCLUSIVE",
            nodes={name: node for name, (node, of) in there.items() if shown["PartitionName"] in of},
            waiting=waiting[shown["PartitionName"]],
            new=new[shown["PartitionName"]],
        )
        for shown in _records(text, "PartitionName")
    }


def gpus(gres: str) -> dict[str, int]:
    """Counts by type of a GRES list such as `gpu:a100:4(S:0-1),gpu:v100:2`; a type of `` has no name."""
    found: dict[str, int] = {}
    for kind, count in _GPU.findall(gres):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def comment(deployment: str, project: str, run: str) -> str:
    """A job's comment: whose it is, and for people what it is for."""
    return f"{MARK}{deployment} {project}/{run}"


def jobs(text: str, deployment: str = "") -> list[CloudInstance]:
    """Lines of JOB_FORMAT as instances, those of a deployment if one is named; others' jobs are left out.

    A job's name may have line breaks, and what follows looks like a line: what has no id, which becomes an argument of
    `scancel`, is left out too.
    """
    found = []
    for line in text.splitlines():
        job, name, state, partition, submitted, started, node, _reason, said = (line.split("|", 8) + [""] * 9)[:9]
        owner = said.removeprefix(MARK).split(" ")[0] if said.startswith(MARK) else ""
        if _JOB.fullmatch(job) and owner and owner == (deployment or owner):
            now, why = _state(state)
            at = _moment(started if now is InstanceState.RUNNING else submitted) or _moment(submitted)
            found.append(CloudInstance(name, job, partition, now, node, "", at, why, f"Slurm: {state}" if why else ""))
    return found


def _state(state: str) -> tuple[InstanceState, str]:
    match state:
        case "PENDING" | "CONFIGURING" | "REQUEUE_HOLD" | "RESV_DEL_HOLD" | "SPECIAL_EXIT":
            return InstanceState.STARTING, ""
        case "RUNNING" | "SUSPENDED" | "STOPPED" | "SIGNALING" | "RESIZING":
            return InstanceState.RUNNING, ""
        case "COMPLETING" | "STAGE_OUT":
            return InstanceState.ENDING, InstanceEnd.CLOUD
        case "PREEMPTED" | "NODE_FAIL" | "REQUEUED" | "REQUEUE_FED" | "REVOKED":
            return InstanceState.GONE, InstanceEnd.INTERRUPTED
    return InstanceState.GONE, InstanceEnd.CLOUD


def _moment(text: str) -> dt.datetime | None:
    """Seconds since 1970, as `Commands` asks for; None for `N/A`."""
    return dt.datetime.fromtimestamp(int(text), dt.UTC) if text.isdecimal() and len(text) < 12 else None


def _records(text: str, first: str) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        found = dict(_FIELD.findall(line))
        if first in found:
            yield found
