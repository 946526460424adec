"""Reads this machine's GPUs by NVML: for the hosts, and for the runner on a cloud instance.

Through ctypes, since the runner has the standard library only (docs/decisions/0011-one-nvml-reader.md). NVML is opened
for each snapshot and closed after it: a driver that is held open cannot be replaced.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import pwd
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from dstackweb.runner.tree import uid_of

MIB = 1024 * 1024
GPM_S = 0.25
"""A MIG device's utilization is counted between two moments this far apart; NVML wants at least 0.1 s."""

LOOK_BACK_S = 10
"""A GPU's utilization is the mean over so long, which is how often a host is read: drivers count it in moments of about
0.2 s, and a single one says 0 or 100 % of a GPU that computes half of the time."""

PROCESSES = 64
"""The most processes per GPU that the API accepts."""

MOST_W, MOST_C, MOST_BITS, MOST_MIB, MOST_PID = 2**15 - 1, 1000, 2**62 - 1, 2**31 - 1, 2**31 - 1
"""Bounds of watts, degrees, throttle reasons, sizes and processes: broken GPUs report more."""

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, TOO_SMALL = 3, 4, 6, 7
FUNCTION_NOT_FOUND, VERSION_MISMATCH, NO_DATA, UNKNOWN = 13, 18, 21, 999
ABSENT = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, NO_DATA}
"""Answers for values that a GPU or its driver doesn't report. Not an error."""


@dataclass(frozen=True)
class Sample:
    """One GPU or MIG device. Values it doesn't report are None, never zero.

    A MIG device has its parent's `index`, temperature and throttle reasons, and no power of its own. `utilization` is
    in percent, of the last LOOK_BACK_S or of the newest moment if the driver keeps no more, `throttle` NVML's bits of
    why clocks are held down, and each process {"pid", "user", "memory_mib"}, by PID; an unknown user or memory is None.
    """

    uuid: str
    index: int
    name: str
    memory_mib: int
    utilization: int | None = None
    memory_used_mib: int | None = None
    power_w: int | None = None
    power_limit_w: int | None = None
    temperature_c: int | None = None
    throttle: int | None = None
    processes: tuple[dict[str, Any], ...] = ()

    def sent(self) -> dict[str, Any]:
        """For the API."""
        return {**asdict(self), "processes": self.processes[:PROCESSES]}


@dataclass(frozen=True)
class Snapshot:
    """All GPUs that answer, in NVML's order. `error` names those that don't, and values that failed.

    `library` is whether NVML is installed; a machine without it has no GPUs, which is not an error.
    """

    samples: tuple[Sample, ...] = ()
    library: bool = True
    error: str = ""
    took_ms: float = 0.0


class NvmlError(Exception):
    """An answer of NVML other than success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _structure(**fields: Any) -> Any:
    """A structure of the library, with these fields in their order."""
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


_INT, _LONG, _POINTER = ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_void_p
_Memory = _structure(total=_LONG, free=_LONG, used=_LONG)
_Memory2 = _structure(version=_INT, total=_LONG, reserved=_LONG, free=_LONG, used=_LONG)
_Rates = _structure(gpu=_INT, memory=_INT)
_Moment = _structure(at_us=_LONG, percent=_INT, _unused=_INT)
_Process = _structure(pid=_INT, used=_LONG, gi=_INT, ci=_INT)
_GpmSupport = _structure(version=_INT, supported=_INT)
_GpmMetric = _structure(id=_INT, status=_INT, value=ctypes.c_double, info=ctypes.c_char_p * 3)
# How many metrics a driver knows depends on its version; only the first `count` are read and written.
_GpmMetrics = _structure(version=_INT, count=_INT, first=_POINTER, second=_POINTER, metrics=_GpmMetric * 512)

GPU_UTILIZATION_SAMPLES = 1
MEMORY_2 = ctypes.sizeof(_Memory2) | 2 << 24
GPM_GRAPHICS_UTILIZATION = 1
_library: ctypes.CDLL | None = None


def read() -> Snapshot:
    """Read all GPUs of this machine; never raises. Takes milliseconds, plus GPM_S where there are MIG devices."""
    began = time.perf_counter()
    samples: tuple[Sample, ...] = ()
    errors: list[str] = []
    global _library
    try:
        _library = _library or ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Snapshot(library=False)
    try:
        samples = tuple(_read_all(_Nvml(_library), errors))
    except NvmlError as error:
        errors.append(f"NVML: {error}")
        if error.status == VERSION_MISMATCH:
            # The driver has changed since the library was loaded: the next snapshot loads the new one.
            _ctypes.dlclose(_library._handle)
            _library = None
    return Snapshot(samples, True, "; ".join(errors), (time.perf_counter() - began) * 1000)


class _Nvml:
    """Calls of the library. They raise NvmlError, with FUNCTION_NOT_FOUND where the library is too old."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, function: str, *arguments: Any) -> None:
        try:
            pointer = getattr(self._library, function)
        except AttributeError:
            raise NvmlError(FUNCTION_NOT_FOUND, f"{function} is missing") from None
        if status := pointer(*arguments):
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            raise NvmlError(status, self._library.nvmlErrorString(status).decode(errors="replace"))

    def shut_down(self) -> None:
        with contextlib.suppress(NvmlError):
            self.call("nvmlShutdown")

    def fill(self, function: str, cell: Any, *arguments: Any) -> Any:
        self.call(function, *arguments, ctypes.byref(cell))
        return cell

    def number(self, function: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int:
        return int(self.fill(function, kind(), *arguments).value)

    def text(self, function: str, device: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self.call(function, device, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def is_split(self, device: Any) -> bool:
        """Whether a GPU is in MIG mode."""
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self.call("nvmlDeviceGetMigMode", device, ctypes.byref(current), ctypes.byref(pending))
        except NvmlError as error:
            if error.status not in ABSENT:
                raise
        return current.value == 1

    def parts(self, device: Any) -> Iterator[Any]:
        """The MIG devices of a GPU."""
        for place in range(self.number("nvmlDeviceGetMaxMigDeviceCount", device)):
            try:
                yield self.fill("nvmlDeviceGetMigDeviceHandleByIndex", ctypes.c_void_p(), device, place)
            except NvmlError as error:
                if error.status != NOT_FOUND:
                    raise

    def memory(self, device: Any) -> Any:
        """Bytes: `total`, `used`. The newer answer leaves out of `used` what the driver keeps for itself."""
        try:
            return self.fill("nvmlDeviceGetMemoryInfo_v2", _Memory2(version=MEMORY_2), device)
        except NvmlError as error:
            if error.status != FUNCTION_NOT_FOUND:
                raise
            return self.fill("nvmlDeviceGetMemoryInfo", _Memory(), device)

    def busy(self, device: Any) -> int:
        """Percent of the time in which a kernel ran."""
        try:
            moments = self._moments(device)
        except NvmlError:  # if it is more than a missing buffer, the older function says so too
            moments = []
        if not moments:
            return int(self.fill("nvmlDeviceGetUtilizationRates", _Rates(), device).gpu)
        begin_us = max(one.at_us for one in moments) - LOOK_BACK_S * 1_000_000
        recent: list[int] = [one.percent for one in moments if one.at_us > begin_us]
        return round(sum(recent) / len(recent))

    def _moments(self, device: Any) -> list[Any]:
        """What the driver has kept of the GPU's utilization: for 14 s on an H200, also while no one has NVML open."""
        function, kind, count = "nvmlDeviceGetSamples", ctypes.c_int(), ctypes.c_uint(0)
        request = device, GPU_UTILIZATION_SAMPLES, ctypes.c_ulonglong(0), ctypes.byref(kind), ctypes.byref(count)
        self.call(function, *request, None)
        moments = (_Moment * count.value)()
        self.call(function, *request, moments)
        return list(moments[: count.value])

    def processes(self, device: Any) -> tuple[dict[str, Any], ...]:
        """Compute processes only; a desktop's drawing doesn't count."""
        function, count = "nvmlDeviceGetComputeRunningProcesses_v3", ctypes.c_uint(0)
        try:
            self.call(function, device, ctypes.byref(count), None)
        except NvmlError as error:
            if error.status != TOO_SMALL:
                raise
        room = (_Process * (count.value * 2 + 5))()  # more may have come since
        count.value = len(room)
        self.call(function, device, ctypes.byref(count), room)
        return tuple(
            {
                "pid": one.pid,
                "user": _user_of(one.pid),
                "memory_mib": one.used // MIB if one.used // MIB <= MOST_MIB else None,
            }
            for one in sorted(room[: count.value], key=lambda process: process.pid)
            if one.pid <= MOST_PID
        )


def _read_all(nvml: _Nvml, errors: list[str]) -> Iterator[Sample]:
    nvml.call("nvmlInit_v2")
    with contextlib.ExitStack() as stack:
        stack.callback(nvml.shut_down)
        gpus = [_Gpu(nvml, index, errors, stack) for index in range(nvml.number("nvmlDeviceGetCount_v2"))]
        if any(meter.works for gpu in gpus for meter in gpu.parts):
            time.sleep(GPM_S)
        for gpu in gpus:
            yield from gpu.samples()


class _Gpu:
    """One GPU of the machine, whole or as its MIG devices, each with its meter (`parts`)."""

    def __init__(self, nvml: _Nvml, index: int, errors: list[str], stack: contextlib.ExitStack) -> None:
        self.nvml, self.index, self._errors = nvml, index, errors
        self.device: Any = None
        self.parts: list[_Meter] = []
        try:
            device = nvml.fill("nvmlDeviceGetHandleByIndex_v2", ctypes.c_void_p(), index)
            self.is_split = nvml.is_split(device)
            if self.is_split:
                self.parts = [_Meter(nvml, device, part, stack) for part in nvml.parts(device)]
            self.device = device
        except NvmlError as error:
            self._fails(str(error))

    def samples(self) -> Iterator[Sample]:
        """Its samples; where it is split, those of its parts."""
        if self.device is None:
            return
        try:
            if not self.is_split:
                yield self._read_whole()
            for meter in self.parts:
                yield self._read_part(meter.part, meter.percent())
        except NvmlError as error:
            self._fails(str(error))

    def _read_whole(self) -> Sample:
        nvml, device = self.nvml, self.device
        return replace(
            self._read_part(device, self._number("utilization", 100, lambda: nvml.busy(device))),
            power_w=self._number("power", MOST_W, lambda: round(nvml.number("nvmlDeviceGetPowerUsage", device) / 1000)),
            power_limit_w=self._number(
                "power limit", MOST_W, lambda: round(nvml.number("nvmlDeviceGetEnforcedPowerLimit", device) / 1000)
            ),
        )

    def _read_part(self, part: Any, busy: int | None) -> Sample:
        """The values that a whole GPU and a MIG device have in common."""
        nvml, chip = self.nvml, self.device
        memory, clocks = nvml.memory(part), "nvmlDeviceGetCurrentClocksThrottleReasons"
        memory_mib = memory.total // MIB
        if memory_mib > MOST_MIB:
            raise NvmlError(UNKNOWN, "memory: value out of range")
        return Sample(
            uuid=nvml.text("nvmlDeviceGetUUID", part),
            index=self.index,
            name=nvml.text("nvmlDeviceGetName", part),
            memory_mib=memory_mib,
            utilization=busy,
            memory_used_mib=self._number("memory", memory_mib, lambda: memory.used // MIB),
            temperature_c=self._number("temperature", MOST_C, lambda: nvml.number("nvmlDeviceGetTemperature", chip, 0)),
            throttle=self._number("clocks", MOST_BITS, lambda: nvml.number(clocks, chip, kind=ctypes.c_ulonglong)),
            processes=self._try("processes", lambda: nvml.processes(part)) or (),
        )

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        """The answer; None when the GPU doesn't report it or fails, which is an error but doesn't stop other reads."""
        try:
            return call()
        except NvmlError as error:
            if error.status not in ABSENT:
                self._fails(f"{what}: {error}")
            return None

    def _number(self, what: str, most: int, call: Callable[[], int]) -> int | None:
        """The same for a number, dropping values that no GPU can have: broken ones report such."""
        number: int | None = self._try(what, call)
        if number is None or 0 <= number <= most:
            return number
        self._fails(f"{what}: value out of range")
        return None

    def _fails(self, how: str) -> None:
        self._errors.append(f"GPU {self.index}: {how}")


class _Meter:
    """The utilization of a MIG device, by NVML's performance counters (GPM) over a moment: the only way."""

    def __init__(self, nvml: _Nvml, gpu: Any, part: Any, stack: contextlib.ExitStack) -> None:
        self.works = False
        self._nvml, self._gpu, self.part = nvml, gpu, part
        self._samples: list[Any] = []
        try:
            if not nvml.fill("nvmlGpmQueryDeviceSupport", _GpmSupport(version=1), gpu).supported:
                return
            self._instance = nvml.number("nvmlDeviceGetGpuInstanceId", part)
            for _ in range(2):
                sample = nvml.fill("nvmlGpmSampleAlloc", ctypes.c_void_p())
                stack.callback(nvml.call, "nvmlGpmSampleFree", sample)
                self._samples.append(sample)
            nvml.call("nvmlGpmMigSampleGet", gpu, self._instance, self._samples[0])
            self.works = True
        except NvmlError:
            return

    def percent(self) -> int | None:
        """Percent of the time since this was made; None when it cannot be counted."""
        if not self.works:
            return None
        first, second = self._samples
        request = _GpmMetrics(version=1, count=1, first=first, second=second)
        metric = request.metrics[0]
        metric.id = GPM_GRAPHICS_UTILIZATION
        try:
            self._nvml.call("nvmlGpmMigSampleGet", self._gpu, self._instance, second)
            self._nvml.call("nvmlGpmMetricsGet", ctypes.byref(request))
        except NvmlError:
            return None
        # NaN, which compares to nothing, means it cannot be counted.
        return round(metric.value) if metric.status == 0 and 0 <= metric.value <= 100 else None


def _user_of(pid: int) -> str | None:
    """None for a process that has ended or lives in another container: NVML may see further than this one."""
    if (uid := uid_of(pid)) is None:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
