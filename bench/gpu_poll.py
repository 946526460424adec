"""What one poll of 8 GPUs costs, beside `nvidia-smi` where it is there.

    python -m bench.gpu_poll [POLLS]

On the stand-in for NVML that the tests have, and on this machine's own GPUs if it has any. The stand-in answers at
once, but reads its file at every call, which NVML does not: its share is measured apart, by empty calls.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import sides
from standins import programs

POLLS = 200
GPUS = 8
MEASURED = "BENCH_GPU_POLL"


def measure(polls: int) -> None:
    """Says in JSON what polls of this process's library cost, milliseconds."""
    from dstackweb.runner import nvml

    first = nvml.read()
    uuids = [one.uuid for one in first.samples]
    said = {"gpus": len(uuids), "names": sorted({one.name for one in first.samples}), "first": first.took_ms}
    if uuids:
        said["poll"] = _times(nvml.read, polls)
        count = ctypes.c_uint()
        library = ctypes.CDLL("libnvidia-ml.so.1")
        library.nvmlInit_v2()
        said["empty"] = _times(lambda: library.nvmlDeviceGetCount_v2(ctypes.byref(count)), polls)
    print(json.dumps(said))


def _times(call: Callable[[], object], polls: int) -> dict[str, float]:
    walls = []
    cpu = time.process_time()
    for _ in range(polls):
        began = time.perf_counter()
        call()
        walls.append((time.perf_counter() - began) * 1000)
    return {
        "wall": statistics.median(walls),
        "p95": sorted(walls)[int(polls * 0.95)],
        "cpu": (time.process_time() - cpu) / polls * 1000,
    }


def _in_process(env: dict[str, str], polls: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu_poll", str(polls)]
    done = subprocess.run(command, env=env | {MEASURED: "1"}, check=True, stdout=subprocess.PIPE, text=True)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def _smi() -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(["nvidia-smi", "--query-gpu=uuid,utilization.gpu,memory.used,power.draw,temperature.gpu",
                        "--format=csv"], capture_output=True, check=True)  # fmt: skip
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def _show(title: str, said: dict[str, Any]) -> None:
    print(f"\n{title}: {said['gpus']} GPUs, {', '.join(said['names'])}")
    print(f"  first poll of a process        {said['first']:8.2f} ms")
    for name, what in (("poll", "a poll"), ("empty", "one call of the library")):
        one: dict[str, float] = said[name]
        print(f"  {what:<30} {one['wall']:8.3f} ms, 95 % within {one['p95']:.3f} ms, CPU {one['cpu']:.3f} ms")


def main(polls: int) -> None:
    from standins.nvml import FakeGpu, Nvml

    print(f"{sides.cpu()}, {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f} at the start; {polls} polls")
    with tempfile.TemporaryDirectory(prefix="dw-bench-") as folder:
        stub = Nvml(Path(folder))
        busy = [f"{os.getpid()}:30000"]
        stub.show(*(FakeGpu(f"GPU-{n}", pids=busy, util=90, mem=30000, power=350, limit=400, temp=60, throttle=0)
                    for n in range(GPUS)))  # fmt: skip
        _show("stand-in for NVML", _in_process(stub.env(), polls))
    real = _in_process(dict(os.environ), polls)
    if real["gpus"]:
        _show("this machine", real)
    else:
        print("\nthis machine: no GPU")
    if real["gpus"] and shutil.which("nvidia-smi"):
        print(f"  nvidia-smi for the same        {_smi():8.2f} ms")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else POLLS
    if MEASURED in os.environ:
        measure(count)
    else:
        programs.exit_without("bench.gpu_poll", "gcc")
        main(count)
