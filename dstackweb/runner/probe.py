"""This machine's usable CPUs and memory, and its GPUs by NVML."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import dstackweb
from dstackweb.runner import nvml

MIB = 1024 * 1024
TRY_S = 20.0
RESERVED_MIB = 512
RESERVED_PART = 0.05
"""Memory reserved for the system and the server: the larger of the two."""


@dataclass(frozen=True)
class GpuProbe:
    """One GPU. `stranger` is {"pid", "user"} of a process on it that belongs to no job; user None when unknown."""

    uuid: str
    index: int
    name: str
    memory_mib: int
    stranger: dict[str, Any] | None = None


@dataclass(frozen=True)
class Probe:
    """A machine's capacity. `error` says what could not be read; a machine without NVML has no GPUs.

    `cgroups` is as `runner.cgroups.support` has it, `engine` as `runner.engine.find`.
    """

    cpus: int
    memory_mib: int
    gpus: tuple[GpuProbe, ...]
    boot_id: str
    error: str = ""
    cgroups: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


def probe(
    is_ours: Callable[[int], bool], snapshot: nvml.Snapshot | None = None, engine: dict[str, Any] | None = None
) -> Probe:
    """Probe this machine; never raises. `is_ours`: whether a PID belongs to a job that runs here.

    `snapshot` is what NVML has just answered, if it has; `engine` what is known of the container engine.
    """
    gpus, error = probe_gpus(is_ours, snapshot)
    return Probe(usable_cpus(), usable_memory_mib(), gpus, boot_id(), error, cgroup_support(), engine or {})


@cache
def cgroup_support() -> dict[str, Any]:
    """Whether jobs' cgroups can be made and limited here, tried once in a process of its own."""
    command = [sys.executable, "-S", "-m", "dstackweb.runner.cgroups"]
    env = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(Path(dstackweb.__file__).parents[1])}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TRY_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"version": "", "memory": False, "cpu": False, "code": "failed", "error": str(error)}
    return found


def boot_id() -> str:
    """The kernel's id of this boot: processes survive only within one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def usable_cpus(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs this process may use, within its cgroups' quota; at least 1."""
    cpus = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(proc, cgroups, "cpu"):
        quota = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdigit():
            cpus = min(cpus, math.floor(int(quota[0]) / int(quota[1])))
    return max(1, cpus)


def usable_memory_mib(
    total: int | None = None, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory for jobs in MiB: the machine's or its cgroups' limit, less the reserve. `total` in bytes."""
    limits = [_memory() if total is None else total]
    for folder in _cgroup_folders(proc, cgroups, "memory"):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        if len(limit) == 1 and limit[0].isdigit():
            limits.append(int(limit[0]))
    mib = min(limits) // MIB
    return max(0, mib - max(RESERVED_MIB, math.ceil(mib * RESERVED_PART)))


def _memory() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_folders(proc: Path, cgroups: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and all above it, for version 2 and for version 1's controller."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        # Inside a container the path may be the outside's, which isn't there; its own limits are at the root.
        folder = root / path.lstrip("/")
        yield root
        while folder != root and root in folder.parents:
            yield folder
            folder = folder.parent


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def probe_gpus(
    is_ours: Callable[[int], bool], snapshot: nvml.Snapshot | None = None
) -> tuple[tuple[GpuProbe, ...], str]:
    """The GPUs that answer, in NVML's order, MIG devices in the place of the GPU they are parts of; and what went wrong
    with the others. No NVML library is no error."""
    snapshot = nvml.read() if snapshot is None else snapshot
    gpus = (
        GpuProbe(one.uuid, one.index, one.name, one.memory_mib, _stranger(one, is_ours)) for one in snapshot.samples
    )
    return tuple(gpus), snapshot.error


def _stranger(gpu: nvml.Sample, is_ours: Callable[[int], bool]) -> dict[str, Any] | None:
    """The first process on a GPU that belongs to no job."""
    found = next((process for process in gpu.processes if not is_ours(process["pid"])), None)
    return found and {"pid": found["pid"], "user": found["user"]}


EVERY_S = 10.0
HUNG_S = 30.0


class BackgroundProbe:
    """Calls `probe` in a thread of its own, every `every_s` seconds; `current` never waits for it."""

    def __init__(self, probe: Callable[[], Probe], *, every_s: float = EVERY_S, hung_s: float = HUNG_S) -> None:
        self._probe, self._hung_s = probe, hung_s
        self.every_s = every_s
        self._latest: Probe | None = None
        self._began = time.monotonic()
        self._busy = True
        # A daemon: a hanging driver must not keep the process from ending.
        threading.Thread(target=self._run, name="probe", daemon=True).start()

    def current(self) -> Probe | None:
        """The last probe; None before the first. A probe that hangs is named in `error`, with the last GPUs known."""
        if not self._busy or time.monotonic() - self._began < self._hung_s:
            return self._latest
        known = self._latest or Probe(usable_cpus(), usable_memory_mib(), (), boot_id())
        return replace(known, error="NVML does not answer: the GPUs are shown as last seen")

    def _run(self) -> None:
        while True:
            self._began, self._busy = time.monotonic(), True
            self._latest = self._probe()
            self._busy = False
            time.sleep(self.every_s)
