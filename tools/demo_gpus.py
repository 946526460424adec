"""`make demo-gpus`: the server on a machine with eight simulated GPUs.

A small library (standins/nvml/stub.c) replaces NVIDIA's and reports scripted loads of eight GPUs: busy ones,
an idle one, one that gets hot, one that another program uses, one that is lost for a while. Sampling, policies and
pages are real. Runs that compute nothing hold some of them. The server's files are in `var/demo-gpus`, apart from
those of `make run`. It needs gcc.
"""

from __future__ import annotations

import subprocess
from typing import Any

from dstackweb.lib.process import die_with_parent
from standins.nvml import FakeGpu, Nvml
from tools.served import Demo, complain, run_demo

NAME, SIZE_MIB, LOOP_S = "Demo GPU (not real)", 40960, 600
RUNS: dict[str, dict[str, Any]] = {
    "demo-train": {"gpu": 4},
    "demo-notebook": {"gpu": 1, "policy": {"min_gpu_utilization": 10, "time_window": "10m"}},
    "demo-next": {"gpu": 1, "policy": {"min_gpu_utilization": 10, "time_window": "10m", "action": "notify"}},
}
"""They get GPUs in this order: the notebook gets an idle one. On two cores the last run waits for its end."""


def waves(least: int, most: int, period_s: int, step_s: int = 30) -> str:
    """Steps that go up and down between two numbers, over the loop."""
    half = period_s / 2
    parts = []
    for second in range(0, LOOP_S, step_s):
        rising = 1 - abs(second % period_s - half) / half
        parts.append(f"{second}:{round(least + (most - least) * rising)}")
    return ",".join(parts)


def gpus(other_pid: int) -> list[FakeGpu]:
    """The eight GPUs with their loads."""

    def gpu(index: int, **does: Any) -> FakeGpu:
        return FakeGpu(f"GPU-demo-{index}", NAME, SIZE_MIB, limit=400, **does)

    busy = {"mem": 33_000, "power": waves(310, 392, 120), "temp": waves(66, 74, 120), "throttle": 0}
    return [
        gpu(0, util=waves(86, 99, 150), **busy),
        gpu(1, util=waves(84, 98, 120), **busy),
        gpu(2, util=waves(70, 97, 150), **{**busy, "temp": "0:72,240:88,360:76", "throttle": "0:0,240:64,360:0"}),
        gpu(3, util=waves(20, 75, 300), mem=18_000, power=waves(140, 290, 300), temp=waves(48, 63, 300), throttle=0),
        gpu(4, util="0:2", mem=9_000, power=74, temp=38, throttle=1),
        gpu(5, util=0, mem=4, power=58, temp=33, throttle=1),
        gpu(6, util=0, mem=4, power=57, temp=32, throttle=1, status="0:0,420:15,480:0"),
        gpu(7, util=waves(30, 55, 200), mem=12_000, power=180, temp=55, throttle=0, pids=[f"{other_pid}:12000"]),
    ]


def main(demo: Demo) -> int:
    """Run until Ctrl-C; returns the server's exit status."""
    library = demo.home / "nvml"
    library.mkdir(exist_ok=True)
    nvml = Nvml(library)
    other = subprocess.Popen(["sleep", "infinity"], preexec_fn=die_with_parent)
    nvml.show(*gpus(other.pid), loop=LOOP_S)
    try:
        return demo.serve(lambda: set_up(demo), env=nvml.env(), stop=lambda: demo.stop_runs(RUNS))
    finally:
        other.kill()


def set_up(demo: Demo) -> None:
    """Submit the runs that are missing, and print what to look at."""
    for name, run in RUNS.items():
        policy = {"utilization_policy": run["policy"]} if "policy" in run else {}
        try:
            demo.submit(name, resources={"cpu": 1, "memory": "64MB..", "gpu": run["gpu"]}, **policy)
        except OSError as error:
            complain(f"the demo's run {name} can't be submitted", error)
            return
    print(
        f"  Demo GPUs  eight simulated ones; their loads repeat every {LOOP_S // 60} minutes\n"
        f"             as a map: {demo.url}/p/main/gpus/\n"
        f"             a run that its policy stops after 10 idle minutes: {demo.url}/p/main/runs/demo-notebook/\n",
        flush=True,
    )


if __name__ == "__main__":
    run_demo("gpus", main)
