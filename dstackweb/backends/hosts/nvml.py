"""Reads this machine's GPUs. The one place that uses NVML's Python module.

NVML is opened for each snapshot and closed after it: a driver that is held open cannot be replaced.
"""

from __future__ import annotations

import _ctypes
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pynvml

MIB = 1024 * 1024
GPM_S = 0.25
"""A MIG device's utilization is counted between two moments this far apart; NVML wants at least 0.1 s."""

MOST, MOST_BITS = 2**15 - 1, 2**62
"""Upper bounds of watts and degrees, and of bits: beyond them no GPU is right, and no column large enough."""

ABSENT = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_NoPermission,
    pynvml.NVMLError_NoData,
)
"""Values that a GPU or its driver doesn't report. Not an error."""


@dataclass(frozen=True)
class Sample:
    """One GPU or MIG device. Values it doesn't report are None, never zero.

    A MIG device has its parent's `index`, temperature and throttle reasons, and no power of its own. `utilization` is
    in percent, `throttle` NVML's bits of why clocks are held down, and each process {"pid", "user", "memory_mib"},
    by PID; an unknown user or memory is None.
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


@dataclass(frozen=True)
class Snapshot:
    """All GPUs that answer, in NVML's order. `error` names those that don't, and values that failed.

    `library` is whether NVML is installed; a machine without it has no GPUs, which is not an error.
    """

    samples: tuple[Sample, ...] = ()
    library: bool = True
    error: str = ""
    took_ms: float = 0.0


def read() -> Snapshot:
    """Read all GPUs of this machine; never raises. Takes milliseconds, plus GPM_S where there are MIG devices."""
    began = time.perf_counter()
    samples: tuple[Sample, ...] = ()
    errors: list[str] = []
    library = True
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        library = False
    except pynvml.NVMLError as error:
        errors.append(f"NVML: {error}")
        if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            _unload()
    else:
        try:
            samples = tuple(_read_all(errors))
        except pynvml.NVMLError as error:
            errors.append(f"NVML: {error}")
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    return Snapshot(samples, library, "; ".join(errors), (time.perf_counter() - began) * 1000)


def _unload() -> None:
    """The driver has changed since this process loaded the library: the next snapshot loads the new one."""
    if pynvml.nvmlLib is not None:
        _ctypes.dlclose(pynvml.nvmlLib._handle)
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def _read_all(errors: list[str]) -> Iterator[Sample]:
    gpus = [_Gpu(index, errors) for index in range(pynvml.nvmlDeviceGetCount())]
    with contextlib.ExitStack() as stack:
        meters = [[_Meter(gpu.device, part, stack) for part in gpu.parts] for gpu in gpus]
        if any(meter.works for of_gpu in meters for meter in of_gpu):
            time.sleep(GPM_S)
        busy = [[meter.percent() for meter in of_gpu] for of_gpu in meters]
    for gpu, of_parts in zip(gpus, busy, strict=True):
        yield from gpu.samples(of_parts)


class _Gpu:
    """One GPU of the machine, whole or as its MIG devices (`parts`)."""

    def __init__(self, index: int, errors: list[str]) -> None:
        self.index, self._errors = index, errors
        self.device: Any = None
        self.is_split = False
        self.parts: list[Any] = []
        try:
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            with contextlib.suppress(*ABSENT):
                self.is_split = pynvml.nvmlDeviceGetMigMode(device)[0] == 1
            if self.is_split:
                self.parts = list(_parts_of(device))
            self.device = device
        except pynvml.NVMLError as error:
            self._fails(str(error))

    def samples(self, busy: Sequence[int | None]) -> Iterator[Sample]:
        """Its samples; where it is split, those of its parts, whose utilization is `busy`."""
        if self.device is None:
            return
        try:
            if not self.is_split:
                yield self._read_whole()
            for part, percent in zip(self.parts, busy, strict=True):
                yield self._read_part(part, percent)
        except pynvml.NVMLError as error:
            self._fails(str(error))

    def _read_whole(self) -> Sample:
        device = self.device
        return replace(
            self._read_part(
                device, self._number("utilization", 100, lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
            ),
            power_w=self._number("power", MOST, lambda: round(pynvml.nvmlDeviceGetPowerUsage(device) / 1000)),
            power_limit_w=self._number(
                "power limit", MOST, lambda: round(pynvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000)
            ),
        )

    def _read_part(self, part: Any, busy: int | None) -> Sample:
        """The values that a whole GPU and a MIG device have in common."""
        memory, chip = _memory(part), self.device
        return Sample(
            uuid=pynvml.nvmlDeviceGetUUID(part),
            index=self.index,
            name=pynvml.nvmlDeviceGetName(part),
            memory_mib=memory.total // MIB,
            utilization=busy,
            memory_used_mib=memory.used // MIB,
            temperature_c=self._number(
                "temperature", MOST, lambda: pynvml.nvmlDeviceGetTemperature(chip, pynvml.NVML_TEMPERATURE_GPU)
            ),
            throttle=self._number("clocks", MOST_BITS, lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(chip)),
            processes=self._try("processes", lambda: _processes(part)) or (),
        )

    def _try(self, what: str, ask: Callable[[], Any]) -> Any:
        """The answer; None when the GPU doesn't report it or fails, which is an error but doesn't stop other reads."""
        try:
            return ask()
        except ABSENT:
            return None
        except pynvml.NVMLError as error:
            self._fails(f"{what}: {error}")
            return None

    def _number(self, what: str, most: int, ask: Callable[[], int]) -> int | None:
        """The same for a number, dropping values that no GPU can have: broken ones report such."""
        number: int | None = self._try(what, ask)
        if number is None or 0 <= number <= most:
            return number
        self._fails(f"{what}: value out of range")
        return None

    def _fails(self, how: str) -> None:
        self._errors.append(f"GPU {self.index}: {how}")


class _Meter:
    """The utilization of a MIG device, by NVML's performance counters (GPM) over a moment: the only way."""

    def __init__(self, gpu: Any, part: Any, stack: contextlib.ExitStack) -> None:
        self.works = False
        self._gpu = gpu
        self._samples: list[Any] = []
        try:
            if not pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
                return
            self._instance = pynvml.nvmlDeviceGetGpuInstanceId(part)
            for _ in range(2):
                sample = pynvml.nvmlGpmSampleAlloc()
                stack.callback(pynvml.nvmlGpmSampleFree, sample)
                self._samples.append(sample)
            pynvml.nvmlGpmMigSampleGet(gpu, self._instance, self._samples[0])
            self.works = True
        except pynvml.NVMLError:
            return

    def percent(self) -> int | None:
        """Percent of the time since this was made; None when it cannot be counted."""
        if not self.works:
            return None
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 1
        request.sample1, request.sample2 = self._samples
        request.metrics[0].metricId = pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL
        try:
            pynvml.nvmlGpmMigSampleGet(self._gpu, self._instance, self._samples[1])
            pynvml.nvmlGpmMetricsGet(request)
        except pynvml.NVMLError:
            return None
        metric = request.metrics[0]
        # NaN, which compares to nothing, means it cannot be counted.
        return round(metric.value) if metric.nvmlReturn == 0 and 0 <= metric.value <= 100 else None


def _parts_of(device: Any) -> Iterator[Any]:
    for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, place)


def _memory(device: Any) -> Any:
    """Bytes: `total`, `used`. The newer answer leaves out of `used` what the driver keeps for itself."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError_FunctionNotFound:
        return pynvml.nvmlDeviceGetMemoryInfo(device)


def _processes(device: Any) -> tuple[dict[str, Any], ...]:
    """Compute processes only; a desktop's drawing doesn't count."""
    found = sorted(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(device), key=lambda process: process.pid)
    return tuple({"pid": one.pid, "user": _user_of(one.pid), "memory_mib": _mib(one.usedGpuMemory)} for one in found)


def _mib(size: int | None) -> int | None:
    return None if size is None else size // MIB


def _user_of(pid: int) -> str | None:
    """None for a process that has ended or lives in another container: NVML may see further than this one."""
    try:
        return psutil.Process(pid).username()
    except psutil.Error:
        return None
