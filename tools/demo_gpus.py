"""`make demo-gpus`: the server on a machine that seems to have eight GPUs.

A small library (dstackweb/devtools/nvml/stub.c) stands in for NVIDIA's, and says of eight GPUs what a script has them
do: busy ones, one that idles, one that gets hot, one that somebody else uses, one that falls off the bus for a while.
All else is real: sampling, policies, pages. Runs are submitted that hold some of them and compute nothing. The server's
files lie in `var/demo-gpus`, apart from those of `make run`. It needs gcc.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

from served import ask, relay, told

ROOT = Path(__file__).resolve().parent.parent

NAME, SIZE_MIB, LOOP_S, STOP_S = "Demo GPU (not real)", 40960, 600, 15
RUNS: list[dict[str, Any]] = [
    {"name": "demo-train", "gpu": 4},
    {"name": "demo-notebook", "gpu": 1, "policy": {"min_gpu_utilization": 10, "time_window": "10m"}},
    {"name": "demo-next", "gpu": 1, "policy": {"min_gpu_utilization": 10, "time_window": "10m", "action": "notify"}},
]
"""They get GPUs in this order: the notebook comes to one that idles. With two cores the last waits for its end."""


def waves(least: int, most: int, period_s: int, step_s: int = 30) -> str:
    """Steps that go up and down between two numbers, over the loop."""
    half = period_s / 2
    parts = []
    for second in range(0, LOOP_S, step_s):
        rising = 1 - abs(second % period_s - half) / half
        parts.append(f"{second}:{round(least + (most - least) * rising)}")
    return ",".join(parts)


def gpus(stranger_pid: int) -> list[Any]:
    """What the eight do."""
    from dstackweb.devtools.nvml import FakeGpu

    def gpu(index: int, **does: Any) -> Any:
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
        gpu(7, util=waves(30, 55, 200), mem=12_000, power=180, temp=55, throttle=0, pids=[f"{stranger_pid}:12000"]),
    ]


def main() -> int:
    """Runs until Ctrl-C; returns the server's exit status."""
    if shutil.which("gcc") is None:
        print("make demo-gpus needs gcc, to build the library that stands in for NVIDIA's", file=sys.stderr)
        return 1
    home = Path(os.environ.get("DSTACKWEB_HOME") or ROOT / "var" / "demo-gpus")
    port = os.environ.get("DSTACKWEB_PORT", "8000")
    library = home / "nvml"
    library.mkdir(parents=True, exist_ok=True)

    from dstackweb.devtools.nvml import Nvml

    stranger = subprocess.Popen(["sleep", "infinity"])
    nvml = Nvml(library)
    nvml.show(*gpus(stranger.pid), loop=LOOP_S)
    token = os.environ.get("DSTACKWEB_ADMIN_TOKEN") or secrets.token_urlsafe(24)
    url = f"http://127.0.0.1:{port}"
    own = {"DSTACKWEB_HOME": str(home), "DSTACKWEB_ADMIN_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    # In a session of its own Ctrl-C doesn't reach it: the demo's runs end before it does, since others outlive it.
    server = subprocess.Popen(
        [sys.executable, "manage.py", "up"],
        cwd=ROOT, env=nvml.env(**own), stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip

    def end(signum: int, _frame: object) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, lambda signum, _frame: server.send_signal(signum))
        stop_runs(url, token)
        server.send_signal(signum)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    threading.Thread(target=relay, args=(server, url, token, set_up), daemon=True).start()
    try:
        return server.wait()
    finally:
        stranger.kill()


def set_up(url: str, token: str) -> None:
    """Submit the runs that are not there yet, and say what to look at."""
    for run in RUNS:
        config = {
            "type": "task", "name": run["name"], "commands": ["echo 'a demo: it computes nothing'", "sleep 12h"],
            "resources": {"cpu": 1, "memory": "64MB..", "gpu": run["gpu"]},
        } | ({"utilization_policy": run["policy"]} if "policy" in run else {})  # fmt: skip
        try:
            if not goes_on(url, token, run["name"]):
                ask(url, token, "POST", "/api/v1/projects/main/runs", {"config": config})
        except OSError as error:
            print(f"the demo's run {run['name']} can't be submitted: {told(error)}", file=sys.stderr, flush=True)
            return
    print(
        f"  Demo GPUs  eight, none of them real; what they do repeats every {LOOP_S // 60} minutes\n"
        f"             as a map: {url}/p/main/gpus/\n"
        f"             a run that its policy stops after 10 idle minutes: {url}/p/main/runs/demo-notebook/\n",
        flush=True,
    )


def stop_runs(url: str, token: str) -> None:
    """End the demo's runs, as far as the server can be asked."""
    ends = time.monotonic() + STOP_S
    try:
        for run in RUNS:
            if goes_on(url, token, run["name"]):
                ask(url, token, "POST", f"/api/v1/projects/main/runs/{run['name']}/stop", {"abort": True})
        while time.monotonic() < ends and any(goes_on(url, token, run["name"]) for run in RUNS):
            time.sleep(0.2)
    except OSError as error:
        print(f"the demo's runs can't be stopped: {error}", file=sys.stderr, flush=True)


def goes_on(url: str, token: str, name: str) -> bool:
    """Whether the newest run of this name has not ended."""
    try:
        found = ask(url, token, "GET", f"/api/v1/projects/main/runs/{name}")
        return found["status"] not in ("done", "failed", "terminated")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise


if __name__ == "__main__":
    sys.exit(main())
