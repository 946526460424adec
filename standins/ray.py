"""A Ray cluster of one node on this machine, of the package `ray[default]`. Its GPUs are only counted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

from standins.processes import free_ports, until

RAY = Path(sys.executable).parent / "ray"
CPUS, GPUS, MODEL = 6, 2, "A100"
START_S = 240.0
MARK = "DSTACKWEB_RAY"
"""Every process of the cluster has it in its environment; those of jobs that an agent started do not."""


class Ray:
    """`address` is the dashboard's, the same after each start. `folder` has to have a short path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports(3)
        self.address = f"http://127.0.0.1:{self.ports[0]}"

    @staticmethod
    def missing() -> bool:
        """Whether Ray is not installed beside this Python."""
        return not RAY.exists()

    def start(self) -> Ray:
        """Start it, and wait until it takes jobs."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONDONT"))}
        env |= {
            MARK: str(self.folder),
            "PATH": f"{RAY.parent}:{env.get('PATH', os.defpath)}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_JOB_STOP_WAIT_TIME_S": "1",
        }
        started = subprocess.run(
            [
                RAY, "start", "--head", "--disable-usage-stats", "--include-log-monitor=false",
                f"--port={self.ports[1]}", "--dashboard-host=127.0.0.1", f"--dashboard-port={self.ports[0]}",
                "--dashboard-agent-listen-port=0", f"--ray-client-server-port={self.ports[2]}",
                f"--num-cpus={CPUS}", f"--num-gpus={GPUS}", f'--resources={{"accelerator_type:{MODEL}": 1}}',
                "--memory=8000000000", "--object-store-memory=80000000", f"--temp-dir={self.folder}",
            ],
            env=env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip
        if started.returncode:
            self.stop()
            raise RuntimeError(f"Ray does not start: {started.stdout[-2000:]}{started.stderr[-2000:]}")
        _until(lambda: _answers(f"{self.address}/api/jobs/"))
        return self

    def stop(self) -> None:
        """SIGKILL to all of it, with agents and runners of jobs."""
        _until(lambda: not _killed(self.pids()))

    def crash(self) -> None:
        """SIGKILL to Ray's own processes. Jobs' agents notice."""
        own = (b"/ray/", b"ray::")
        _until(lambda: not _killed(pid for pid, command in self.pids().items() if any(part in command for part in own)))

    def pids(self) -> dict[int, bytes]:
        """All its living processes, with their command lines."""
        mark, found = f"{MARK}={self.folder}".encode(), {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
        return found


def _killed(pids: Iterable[int]) -> list[int]:
    """Those that were still there."""
    found = list(pids)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _until(is_so: Callable[[], bool]) -> None:
    until(is_so, START_S, f"Ray is not there, or not gone, after {START_S:.0f} s")
