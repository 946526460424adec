"""What a machine finds out about itself: its CPUs, memory, GPUs and address; and of a cloud instance, its end."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dstackweb.runner import cgroups, nvml
from dstackweb.runner.state import PROGRAM

METADATA = "http://169.254.169.254"
METADATA_TIMEOUT_S = 1.0
METADATA_TOKEN_S = 21600
DRIVER_WAIT_S = 120.0
"""How long the driver may take after boot to show all GPUs on the bus."""
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")
TRY_S = 20.0
RESERVED_MIB, RESERVED_PART = 512, 0.05
"""Memory reserved for the system and the server: the larger of the two."""
EVERY_S, HUNG_S = 10.0, 30.0
MIB = 1024 * 1024


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
    env = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": PROGRAM}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TRY_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"version": "", "memory": False, "cpu": False, "code": "failed", "error": str(error)}
    return found


def boot_id() -> str:
    """The kernel's id of this boot: processes survive only within one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def usable_cpus(proc: str = "/proc") -> int:
    """CPUs this process may use, within its cgroups' quota; at least 1."""
    cpus = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(proc, "cpu"):
        older = (cgroups.text_of(folder, f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        quota = (cgroups.text_of(folder, "cpu.max") or " ".join(older)).split()
        if len(quota) == 2 and quota[0].isdigit():
            cpus = min(cpus, int(quota[0]) // int(quota[1]))
    return max(1, cpus)


def usable_memory_mib(total: int | None = None, proc: str = "/proc") -> int:
    """Memory for jobs in MiB: the machine's or its cgroups' limit, less the reserve. `total` in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if total is None else total]
    for folder in _cgroup_folders(proc, "memory"):
        limit = (cgroups.text_of(folder, "memory.max") or cgroups.text_of(folder, "memory.limit_in_bytes")).strip()
        if limit.isdigit():
            limits.append(int(limit))
    mib = min(limits) // MIB
    return max(0, mib - max(RESERVED_MIB, math.ceil(mib * RESERVED_PART)))


def _cgroup_folders(proc: str, controller: str) -> Iterator[str]:
    """The folders of this process's cgroup and all above it, in the hierarchies that may have this controller."""
    for one in cgroups.hierarchies(proc):
        if one.version == 2 or controller in one.controllers:
            yield from cgroups.upwards(one.own, one.top)


def probe_gpus(
    is_ours: Callable[[int], bool], snapshot: nvml.Snapshot | None = None
) -> tuple[tuple[GpuProbe, ...], str]:
    """The GPUs that answer, in NVML's order, MIG devices in the place of the GPU they are parts of; and what went wrong
    with the others. No NVML library is no error."""
    snapshot = nvml.read() if snapshot is None else snapshot
    found = snapshot.samples
    gpus = tuple(GpuProbe(one.uuid, one.index, one.name, one.memory_mib, _stranger(one, is_ours)) for one in found)
    return gpus, snapshot.error


def _stranger(gpu: nvml.Sample, is_ours: Callable[[int], bool]) -> dict[str, Any] | None:
    found = next((process for process in gpu.processes if not is_ours(process["pid"])), None)
    return found and {"pid": found["pid"], "user": found["user"]}


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
            time.sleep(self.every_s)  # between two looks, in a thread that does nothing else


def gpus() -> list[str]:
    """NVML UUIDs of the GPUs, once the driver shows as many as are on the bus, or DRIVER_WAIT_S has passed."""
    until = time.monotonic() + DRIVER_WAIT_S
    while len(found := _shown()) < _on_bus() and time.monotonic() < until:
        time.sleep(2)
    return found


def granted_gpus() -> list[str]:
    """NVML UUIDs of the GPUs in CUDA_VISIBLE_DEVICES, which clusters set for an allocation; without it none."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    shown = _shown() if any(name.isdigit() for name in named) else []
    by_number = dict(enumerate(shown))
    uuids = [by_number.get(int(name), "") if name.isdigit() else name for name in named]
    return [uuid for uuid in uuids if uuid.startswith(("GPU-", "MIG-"))]


def _shown() -> list[str]:
    """By `nvidia-smi`, or by NVML where there is none: containers of clusters may have the driver's library alone."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except FileNotFoundError:
        return [gpu.uuid for gpu in nvml.read().samples if gpu.uuid.startswith("GPU-")]
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip().startswith("GPU-")]


def _on_bus(devices: str = "/sys/bus/pci/devices") -> int:
    return sum(
        cgroups.text_of(f"{devices}/{name}", "vendor").strip() == NVIDIA
        and cgroups.text_of(f"{devices}/{name}", "class")[:6] in DISPLAYS
        for name in (os.listdir(devices) if os.path.isdir(devices) else ())
    )


def address(api: str) -> str:
    """The address from which this instance reaches the API, where its network can reach it."""
    parts = urlsplit(api)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, there = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def metadata_endpoint() -> str:
    return os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or METADATA


class Metadata:
    """EC2's instance metadata, version 2."""

    every_s = 5.0

    def __init__(self, endpoint: str = "") -> None:
        self._base = (endpoint or metadata_endpoint()).rstrip("/")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._token = ""

    def interruption(self) -> str | None:
        """When a spot interruption ends the instance (ISO 8601, UTC); None if there is none, or it can't be read."""
        try:
            if not self._token:
                lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(METADATA_TOKEN_S)}
                self._token = self._ask("PUT", "api/token", lifetime)
            action = json.loads(
                self._ask("GET", "meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})
            )
            at = action["time"]
        except urllib.error.HTTPError as error:
            if error.code == 401:
                self._token = ""
            return None
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return None
        return at if isinstance(at, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", at) else None

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self._base}/latest/{path}", method=method, headers=headers)
        with self._open(request, timeout=METADATA_TIMEOUT_S) as answer:
            return str(answer.read(65536).decode())


def switch_off() -> bool:
    """Power the instance off; False if no command can."""
    for command in (["shutdown", "-h", "now"], ["poweroff"], ["halt", "-p"]):
        try:
            if subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == 0:
                return True
        except (OSError, subprocess.SubprocessError):
            continue
    return False
