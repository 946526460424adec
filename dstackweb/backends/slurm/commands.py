"""Slurm's commands, called on this machine or over SSH, and what they print as plain data."""

from __future__ import annotations

import datetime as dt
import math
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dstackweb.backends import api_calls
from dstackweb.backends.api_calls import Api
from dstackweb.backends.clusters import EngineRefused, unreachable
from dstackweb.backends.contract import (
    CloudInstance,
    InstanceEnd,
    InstanceState,
    InstanceUsage,
    NonsenseAnswer,
    nonsense,
)

TIMEOUT_S = 20.0
SSH_FAILED, NOT_FOUND = 255, 127
PASSED = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|TZ|LANG|LC_\w+|LD_LIBRARY_PATH|KRB5CCNAME|(SLURM|SBATCH|MUNGE)_?\w*)$"
)
"""Variables of the server that Slurm's commands get here, and with `sbatch` the jobs: none of its secrets."""
AWAY = re.compile(
    r"unable to contact|connection (refused|failure|timed out)|timed out|zero bytes|not resolve|controller.*(down|not)",
    re.IGNORECASE,
)
"""What Slurm's commands say where nothing was decided."""

_FIELD = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|$)")
_JOB = re.compile(r"\d{1,12}(_\d{1,12})?", re.ASCII)
_GPU = re.compile(r"gpu:(?:([^:(,]+):)?(\d+)")
_CPU_TIME = re.compile(r"(?:(?:(\d{1,6})-)?(\d{1,3}):)?(\d{1,3}):(\d{1,2}(?:\.\d{1,6})?)", re.ASCII)
"""`[[days-]hours:]minutes:seconds`."""
_MEMORY = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)([KMGTP]?)", re.ASCII)
_MIB = {"": 2**-20, "K": 2**-10, "M": 1, "G": 2**10, "T": 2**20, "P": 2**30}
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL",
          "DEADLINE", "REVOKED"}  # fmt: skip
"""States of jobs whose accounts are complete."""
_UNUSABLE = {"DOWN", "DRAIN", "FAIL", "MAINT", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "REBOOT", "UNKNOWN",
             "RESERVED", "PLANNED", "FUTURE"}  # fmt: skip
"""States of nodes that take no jobs now; `+` and `*` join and end them."""

JOB_NUMBER = re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE)
"""In what `sbatch --parsable` prints; a login over SSH may print more."""
JOB_FORMAT = "%i|%j|%T|%P|%V|%S|%N|%r|%k"
"""squeue's: ID, name, state, partition, submitted, started, node, reason, comment."""
JOB_HEADER = "JOBID|NAME|STATE|PARTITION|SUBMIT_TIME|START_TIME|NODELIST|REASON|COMMENT"
PENDING_FORMAT = "%P|%r|%D|%C|%m|%b"
"""squeue's: partitions, reason, nodes, CPUs of all, memory and GRES of each."""
PENDING_HEADER = "PARTITION|REASON|NODES|CPUS|"
"""Beginning of the header for PENDING_FORMAT; the names of the last two columns differ by version."""
NO_NODES = "No nodes in the system"
USAGE_FORMAT = "JobID,State,ElapsedRaw,CPUTimeRAW,TotalCPU,MaxRSS,AllocTRES,ConsumedEnergyRaw,TRESUsageInTot,JobName"
"""sacct's. The name is last: users write it."""
MARK = "dstackweb:"
NO_ROOM = ("Resources", "Priority")
"""Slurm's reasons of jobs that wait for room: that of jobs ahead of them included."""


@dataclass(frozen=True)
class Commands:
    """Slurm's commands on the PATH of this machine, or of `host` (`user@login.example`).

    SSH asks for no password: the server's user needs a key, or `key_file` is one, and must know the host.
    """

    host: str = ""
    key_file: str = ""

    def run(self, name: str, *arguments: str, text: str = "") -> str:
        """What a command prints; `text` is its input. Raises EngineRefused, or SourceFailed without an answer."""
        with api_calls.request(Api("slurm", name, self.host)):
            return self._run(name, *arguments, text=text)

    def _run(self, name: str, *arguments: str, text: str) -> str:
        argv = ["env", "SLURM_TIME_FORMAT=%s", name, *arguments]
        try:
            done = subprocess.run(
                self._over_ssh(argv), input=text, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
                check=False, env=None if self.host else {k: v for k, v in os.environ.items() if PASSED.match(k)},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise unreachable(self.host or "Slurm", str(error)) from error
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        last = said[-1] if said else f"{name} ended with exit code {done.returncode}"
        if done.returncode == 0:
            return done.stdout
        failed = done.returncode < 0 or done.returncode == NOT_FOUND or (self.host and done.returncode == SSH_FAILED)
        if failed or AWAY.search("\n".join(said)):
            raise unreachable(self.host or "Slurm", last)
        raise EngineRefused(last)

    def _over_ssh(self, argv: Sequence[str]) -> list[str]:
        if not self.host:
            return list(argv)
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *(["-i", self.key_file] if self.key_file else [])]
        return ["ssh", *options, "--", self.host, shlex.join(argv)]


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

    def with_job(self, cpus: int, memory_mib: int, gpu: str, count: int, *, whole: bool = False) -> Node:
        """The node with an allocation of this size, or all of it."""
        if whole:
            return replace(self, cpus_used=self.cpus, memory_used_mib=self.memory_mib, gpus_used=dict(self.gpus))
        return replace(
            self,
            cpus_used=self.cpus_used + max(cpus, 1),
            memory_used_mib=self.memory_used_mib + memory_mib,
            gpus_used={**self.gpus_used, gpu: self.gpus_used.get(gpu, 0) + count} if count else self.gpus_used,
        )


@dataclass(frozen=True)
class Partition:
    """A partition with its nodes, and how many jobs of anyone are `waiting` in it."""

    name: str
    up: bool
    exclusive: bool
    nodes: dict[str, Node]
    waiting: int = 0

    def fullest(self, cpus: int, memory_mib: int, gpu: str, count: int) -> str | None:
        """The name of the fullest node that has room for a job of this size now; None if there is none."""
        size = (cpus, memory_mib, gpu, count)
        room = {name: n for name, node in self.nodes.items() if (n := node.fits(*size, whole=self.exclusive))}
        return min(room, key=room.__getitem__, default=None)


def with_job(
    partitions: Mapping[str, Partition], name: str, cpus: int, memory_mib: int, gpu: str, count: int
) -> dict[str, Partition] | None:
    """The partitions, which share nodes, with a job of this size in one of them; None where it has no room there."""
    partition = partitions.get(name)
    node = partition.fullest(cpus, memory_mib, gpu, count) if partition else None
    if partition is None or node is None:
        return None
    filled = partition.nodes[node].with_job(cpus, memory_mib, gpu, count, whole=partition.exclusive)
    return {
        key: replace(sharing, nodes={**sharing.nodes, node: filled}) if node in sharing.nodes else sharing
        for key, sharing in partitions.items()
    }


@dataclass(frozen=True)
class Pending:
    """A pending job: its partitions and what it asks of each of its nodes. `new`: Slurm has not looked at it yet."""

    partitions: Sequence[str]
    nodes: int
    cpus: int
    memory_mib: int
    gpu: str
    gpus: int
    new: bool


def pending(queue: str) -> list[Pending]:
    """Parse lines of PENDING_FORMAT; what is no number counts as little."""
    jobs = []
    for line in queue.splitlines():
        names, reason, nodes, cpus, memory, gres = (line.split("|", 5) + [""] * 6)[:6]
        count = max(1, _number(nodes) or 1)
        each_memory = memory.rstrip("cn").removesuffix("B")
        [(gpu, gpus_each), *_rest] = [*gpus(gres).items(), ("", 0)]
        jobs.append(
            Pending(
                partitions=names.split(","),
                nodes=count,
                cpus=max(1, (_number(cpus) or 1) // count),
                memory_mib=_mebibytes(f"{each_memory}" if each_memory[-1:].isalpha() else f"{each_memory}M"),
                gpu=gpu,
                gpus=gpus_each,
                new=reason == "None",
            )
        )
    return jobs


def listed(text: str, header: str) -> str:
    """The lines of `squeue` after its header, or the line that begins so. It is there even if no job is: an answer
    without one is no answer.

    A login over SSH may print lines before it. Raises SourceFailed.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(header)), None)
    if start is None:
        raise nonsense("squeue", NonsenseAnswer.MISSING, key=header)
    return "\n".join(lines[start + 1 :])


def nodes(text: str) -> dict[str, tuple[Node, list[str]]]:
    """`scontrol show nodes --oneliner --details`: each node, and its partitions; those that can't be read are left out.

    Raises SourceFailed if that is all of them.
    """
    found = {}
    for shown in _records(text, "NodeName"):
        states = set(re.split(r"[+*~#!%$@^-]+", shown.get("State", "UNKNOWN")))
        cpus, used, memory, memory_used = (
            _number(shown.get(name, "0")) for name in ("CPUTot", "CPUAlloc", "RealMemory", "AllocMem")
        )
        if cpus is None or used is None or memory is None or memory_used is None:
            continue
        node = Node(
            cpus=cpus,
            cpus_used=used,
            memory_mib=memory,
            memory_used_mib=memory_used,
            gpus=gpus(shown.get("Gres", "")),
            gpus_used=gpus(shown.get("GresUsed", "")),
            usable=not states & _UNUSABLE and "*" not in shown.get("State", ""),
        )
        found[shown["NodeName"]] = (node, [name for name in shown.get("Partitions", "").split(",") if name])
    if not found and NO_NODES not in text:
        raise nonsense("scontrol show nodes", NonsenseAnswer.ITEMS)
    return found


def partitions(text: str, nodes: dict[str, tuple[Node, list[str]]], queue: Sequence[Pending]) -> dict[str, Partition]:
    """Parse `scontrol show partitions --oneliner`, with `nodes` and their partitions.

    Jobs that wait are counted, and those that Slurm has not looked at yet have their room, as if they had started.
    Raises SourceFailed if there is no partition.
    """
    waiting = Counter(name for job in queue if not job.new for name in job.partitions)
    by_name = {
        record["PartitionName"]: Partition(
            name=record["PartitionName"],
            up=record.get("State") == "UP",
            exclusive=record.get("OverSubscribe") == "EXCLUSIVE",
            nodes={name: node for name, (node, of) in nodes.items() if record["PartitionName"] in of},
            waiting=waiting[record["PartitionName"]],
        )
        for record in _records(text, "PartitionName")
    }
    if not by_name:
        raise nonsense("scontrol show partitions", NonsenseAnswer.ITEMS)
    for job in queue:
        for _node in range(job.nodes if job.new else 0):
            tried = (with_job(by_name, name, job.cpus, job.memory_mib, job.gpu, job.gpus) for name in job.partitions)
            by_name = next((after for after in tried if after is not None), by_name)
    return by_name


def gpus(gres: str) -> dict[str, int]:
    """Counts by type of a GRES list such as `gpu:a100:4(S:0-1),gpu:v100:2`; a type of `` has no name."""
    found: dict[str, int] = {}
    for kind, count in _GPU.findall(gres):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def comment(deployment: str, project: str, run: str) -> str:
    """A job's comment: whose it is, and for people what it is for."""
    return f"{MARK}{deployment} {project}/{run}"


def cloud_id(job: str, instance: str) -> str:
    """Slurm's number of a job, and the beginning of its name: a controller that lost its state counts anew."""
    return f"{job}-{instance[:8]}"


def number(cloud_id: str) -> str:
    """Slurm's number in a cloud ID."""
    return cloud_id.partition("-")[0]


def jobs(text: str, deployment: str = "") -> list[CloudInstance]:
    """Lines of JOB_FORMAT as instances, those of a deployment if one is named; others' jobs are left out.

    A job's name may have line breaks, and what follows looks like a line: what has no id, which becomes an argument of
    `scancel`, is left out too.
    """
    found = []
    for line in text.splitlines():
        job, name, state, partition, submitted, started, node, reason, said = (line.split("|", 8) + [""] * 9)[:9]
        owner = said.removeprefix(MARK).split(" ")[0] if said.startswith(MARK) else ""
        if _JOB.fullmatch(job) and owner and owner == (deployment or owner):
            now, why = _state(state)
            at = _moment(started if now is InstanceState.RUNNING else submitted) or _moment(submitted)
            text, waits = f"Slurm: {state}" if why else "", _waits(reason) if state == "PENDING" else ""
            lacks_room = waits in NO_ROOM
            found.append(
                CloudInstance(name, cloud_id(job, name), partition, now, node, "", at, why, text, waits, lacks_room)
            )
    return found


def _waits(reason: str) -> str:
    """The code of a reason such as `ReqNodeNotAvail, UnavailableNodes:n1`; empty before Slurm has looked at the job."""
    code = re.match(r"\w{0,60}", reason.strip("( "), re.ASCII)
    return code[0] if code and code[0] != "None" else ""


def accounting(config: str) -> bool | None:
    """Of `scontrol show config`: whether CPU time and memory of ended jobs are of all processes; None: no accounts.

    Slurm's other plug-ins see those alone that have not left their parents, as the runner of a job has.
    """
    found = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in config.splitlines())}
    if found.get("AccountingStorageType") in ("accounting_storage/none", "(null)"):
        return None
    return found.get("JobAcctGatherType") == "jobacct_gather/cgroup"


def usage(text: str, *, measured: bool) -> dict[str, InstanceUsage]:
    """Lines of USAGE_FORMAT as what ended jobs used, by cloud ID: a line for each job, and for each of its steps.

    What is missing, or zero where a job can't have used nothing, is unknown, and so are CPU time and memory unless all
    its processes were `measured`.
    """
    peaks: dict[str, int] = {}
    cpu_s: dict[str, float] = {}
    ended = {}
    for line in text.splitlines():
        fields = line.split("|", USAGE_FORMAT.count(","))
        if len(fields) != USAGE_FORMAT.count(",") + 1:
            continue
        job, _, step = fields[0].partition(".")
        if measured:
            peaks[job] = max(peaks.get(job, 0), _mebibytes(fields[5]))
            cpu_s[job] = cpu_s.get(job, 0) + _step_seconds(fields[4] if step else "", fields[8])
        if not step and _JOB.fullmatch(job) and fields[1].split(" ")[0] in _ENDED:
            ended[job] = fields
    return {cloud_id(job, fields[-1]): _usage(fields, cpu_s.get(job), peaks.get(job)) for job, fields in ended.items()}


def _step_seconds(total: str, measured: str) -> float:
    """CPU time of a step. `total` lacks processes that no one waited for; the sum of samples is in whole seconds."""
    sampled = re.search(r"(?:^|,)cpu=([\d:.-]+)(?:,|$)", measured, re.ASCII)
    return max(_seconds(total), _seconds(sampled[1]) if sampled else 0)


def _usage(fields: Sequence[str], used_s: float | None, peak_mib: int | None) -> InstanceUsage:
    _job, _state, elapsed, reserved, _used, _peak, allocated, energy, _measured, _name = fields
    elapsed_s, units = _number(elapsed), re.search(r"(?:^|,)billing=(\d{1,15})(?:,|$)", allocated, re.ASCII)
    return InstanceUsage(
        elapsed_s=elapsed_s,
        cpu_reserved_s=_number(reserved),
        cpu_used_s=round(used_s, 3) if used_s else None,
        memory_peak_mib=peak_mib or None,
        billed_h=round(int(units[1]) * elapsed_s / 3600, 3) if units and elapsed_s is not None else None,
        energy_j=_number(energy) or None,
    )


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,15}", text, re.ASCII) else None


def _seconds(text: str) -> float:
    """0 for what is no CPU time."""
    if (found := _CPU_TIME.fullmatch(text)) is None:
        return 0
    days, hours, minutes, seconds = found.groups(default="0")
    return ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + float(seconds)


def _mebibytes(text: str) -> int:
    """Rounded up; 0 for what is no size."""
    found = _MEMORY.fullmatch(text)
    return math.ceil(float(found[1]) * _MIB[found[2]]) if found else 0


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
