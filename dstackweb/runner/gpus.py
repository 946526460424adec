"""Samples a job's GPUs on cloud instances, by NVML or else by `nvidia-smi`.

A separate process reads them, since reading a broken GPU may hang for ever: the runner never waits for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from dstackweb.runner.log import say

MIB = 1024 * 1024
SMI_TIMEOUT_S = 60
FIELDS = "uuid,index,name,memory.total,memory.used,utilization.gpu,power.draw,enforced.power.limit,temperature.gpu"
NAMES = ("memory_mib", "memory_used_mib", "utilization", "power_w", "power_limit_w", "temperature_c")


class NoGpus(Exception):
    """The GPUs can't be read; the message says why."""


def start(uuids: Sequence[str], every_s: float) -> int:
    """Start reading these GPUs every so many seconds; returns the end of a pipe, which never blocks.

    Each line is JSON with `at`, by the machine's monotonic clock, and `gpus` without those that can't be read. The
    process ends when the pipe's reader does. Call this before `tree.adopt_orphans`, so that it doesn't become an orphan
    of the job.
    """
    source, sink = os.pipe()
    if pid := os.fork():
        os.waitpid(pid, 0)
        os.close(sink)
        os.set_blocking(source, False)
        return source
    try:
        os.setsid()
        if os.fork() == 0:
            _keep_watching(sink, uuids, every_s)
    finally:
        os._exit(0)


def _keep_watching(sink: int, uuids: Sequence[str], every_s: float) -> None:
    """Sample them, starting again where that fails: out of memory, or in a library that crashes."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(sink, 1)
    os.closerange(3, 65536)  # among them the runner's lock, which must end with the runner
    logged = False
    while pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            return
        if not logged:
            logged = True
            say(f"the process that samples the GPUs ended with code {code} and is started again")
        time.sleep(every_s)
        # Its last line may be incomplete.
        try:
            _write(b"\n")
        except OSError:
            return
    try:
        _watch(uuids, every_s)
    except Exception as error:
        if not logged:
            say(f"reading the GPUs: {error!r}")
        os._exit(1)


def _watch(uuids: Sequence[str], every_s: float) -> None:
    trouble, due = "", time.monotonic()
    while True:
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + every_s, time.monotonic())
        at = time.monotonic()
        try:
            gpus = read(uuids)
        except NoGpus as error:
            if str(error) != trouble:
                trouble = str(error)
                say(f"the GPUs can't be read: {trouble}")
            gpus = []
        try:
            # Also without any GPU: only writing shows whether the reader still exists.
            _write(json.dumps({"at": at, "gpus": gpus}).encode() + b"\n")
        except OSError:
            return


def _write(line: bytes) -> None:
    while line:
        line = line[os.write(1, line) :]


def read(uuids: Sequence[str]) -> list[dict[str, Any]]:
    """Those of these GPUs that answer, in the API's format; values that one doesn't report are null. Raises NoGpus."""
    try:
        found = _by_nvml(uuids)
    except (OSError, AttributeError, NoGpus) as error:
        found = _by_command(uuids, str(error))
    return [_bounded(gpu) for gpu in found]


def _bounded(gpu: dict[str, Any]) -> dict[str, Any]:
    """Drop impossible values of broken GPUs: the API would refuse the whole sample."""
    odd = {name: None for name, most in MOST.items() if gpu[name] is not None and not 0 <= gpu[name] <= most}
    return {**gpu, **odd, "processes": gpu["processes"][:PROCESSES]}


def _by_nvml(uuids: Sequence[str]) -> list[dict[str, Any]]:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if status := library.nvmlInit_v2():
        raise NoGpus(f"NVML answers {status}")
    try:
        return [gpu for gpu in (_Nvml(library).gpu(uuid) for uuid in uuids) if gpu]
    finally:
        library.nvmlShutdown()


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Memory2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


class _Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]


MOST = {"utilization": 100, "power_w": 2**15 - 1, "power_limit_w": 2**15 - 1, "temperature_c": 1000, "throttle": 2**61}
PROCESSES = 64
"""The most processes per GPU that the API accepts."""

MEMORY_2 = ctypes.sizeof(_Memory2) | 2 << 24
NO_VALUE = 2**64 - 1
TOO_SMALL = 7


class _Nvml:
    """The functions of NVML, where the library has them."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def gpu(self, uuid: str) -> dict[str, Any] | None:
        """One GPU; None when it doesn't answer."""
        device = ctypes.c_void_p()
        if self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
            return None
        name = ctypes.create_string_buffer(96)
        memory = self._memory(device)
        if memory is None or self._library.nvmlDeviceGetName(device, name, 96):
            return None
        return {
            "uuid": uuid,
            "index": self._number("nvmlDeviceGetIndex", device) or 0,
            "name": name.value.decode(errors="replace"),
            "memory_mib": memory.total // MIB,
            "memory_used_mib": memory.used // MIB,
            "utilization": self._of("nvmlDeviceGetUtilizationRates", device, _Rates(), lambda rates: rates.gpu),
            "power_w": _watts(self._number("nvmlDeviceGetPowerUsage", device)),
            "power_limit_w": _watts(self._number("nvmlDeviceGetEnforcedPowerLimit", device)),
            "temperature_c": self._number("nvmlDeviceGetTemperature", device, 0),
            "throttle": self._of(
                "nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.c_ulonglong(), lambda bits: bits.value
            ),
            "processes": self._processes(device),
        }

    def _memory(self, device: Any) -> Any:
        newer = _Memory2(version=MEMORY_2)
        return self._of("nvmlDeviceGetMemoryInfo_v2", device, newer) or self._of(
            "nvmlDeviceGetMemoryInfo", device, _Memory()
        )

    def _number(self, function: str, device: Any, *arguments: int) -> int | None:
        number: int | None = self._of(function, device, ctypes.c_uint(), lambda cell: cell.value, *arguments)
        return number

    def _of(
        self, function: str, device: Any, cell: Any, value: Callable[[Any], Any] = lambda cell: cell, *arguments: int
    ) -> Any:
        """What a function writes into the cell; None if it fails or the library lacks it."""
        call = getattr(self._library, function, None)
        if call is None or call(device, *arguments, ctypes.byref(cell)):
            return None
        return value(cell)

    def _processes(self, device: Any) -> list[dict[str, Any]]:
        call = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        count = ctypes.c_uint(0)
        if call is None or call(device, ctypes.byref(count), None) != TOO_SMALL:
            return []
        room = (_Process * (count.value * 2 + 5))()
        count.value = len(room)
        if call(device, ctypes.byref(count), room):
            return []
        return [
            {
                "pid": one.pid,
                "user": _user_of(one.pid),
                "memory_mib": None if one.used == NO_VALUE else one.used // MIB,
            }
            for one in room[: count.value]
        ]


def _watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)


def _user_of(pid: int) -> str | None:
    try:
        return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return None


def _by_command(uuids: Sequence[str], why_not_nvml: str) -> list[dict[str, Any]]:
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoGpus(f"{why_not_nvml}; {error}") from None
    rows = (line.split(", ") for line in done.stdout.splitlines())
    return [
        {"uuid": row[0], "index": _whole(row[1]) or 0, "name": row[2], "throttle": None, "processes": []}
        | {name: _whole(row[3 + place]) for place, name in enumerate(NAMES)}
        for row in rows
        if row[0] in uuids and len(row) == 3 + len(NAMES) and _whole(row[3]) is not None
    ]


def _whole(text: str) -> int | None:
    """A number, rounded; None for what nvidia-smi says in its place, such as [N/A]."""
    try:
        return round(float(text))
    except (ValueError, OverflowError):
        return None
