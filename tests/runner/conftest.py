"""Real runners, each with an API and a place of its own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runner.api import Api
from tests.support import REPO, eventually


class Job:
    """One job on this machine: its API, its directories, and whoever runs it now."""

    def __init__(self, api: Api, place: Path, orders: dict[str, Any]) -> None:
        self.api, self.place = api, place
        self.state_dir, self.run_dir = place / "jobs" / api.job, place / "runs" / api.run / "node-0"
        self.orders = {
            "api": api.url, "job": api.job, "token": api.token, "state_dir": str(self.state_dir),
            "run_dir": str(self.run_dir), "user": None, "path": os.environ["PATH"],
        } | orders  # fmt: skip

    def launch(self, *program: str) -> dict[str, Any]:
        """Start a runner as a host does; returns its answer."""
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "SERVER_SECRET": "the server's own"}
        argv = [sys.executable, "-S", *(program or ("-m", "dstackweb.runner"))]
        done = subprocess.run(
            argv, input=json.dumps(self.orders), capture_output=True, text=True, env=env, cwd="/", timeout=10
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    @property
    def runner(self) -> int:
        return int((self.state_dir / "lock").read_text())

    def runner_lives(self) -> bool:
        try:
            with (self.state_dir / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def nudge(self) -> None:
        """Have the runner ask now, as a host does when a stop was asked for."""
        os.kill(self.runner, signal.SIGUSR1)

    def kill_runner(self) -> None:
        """SIGKILL, as the kernel does when memory is short."""
        os.kill(self.runner, signal.SIGKILL)
        eventually(lambda: not self.runner_lives())

    def processes(self) -> list[int]:
        """Living processes that carry the job's mark."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            marked = f"DSTACKWEB_JOB={self.api.job}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return marked and lives(pid)
        return False

    def end(self, deadline: float = 5) -> dict[str, Any]:
        """What the runner told of the end, once it has ended itself."""
        eventually(lambda: self.api.exit is not None and not self.runner_lives(), deadline, every=0.01)
        assert self.api.exit is not None
        assert self.processes() == []
        return self.api.exit

    def notes(self) -> str:
        return (self.state_dir / "runner.log").read_text()

    def shut(self) -> None:
        for held in self.api.held.values():
            held.set()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if self.runner_lives():
                os.kill(self.runner, signal.SIGKILL)
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.api.down()


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="dw-runner-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def make_job(place: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job of these commands and spec, not launched yet; nothing of it survives the test."""
    jobs: list[Job] = []

    def make(*commands: str, orders: dict[str, Any] | None = None, **spec: Any) -> Job:
        jobs.append(Job(Api(*commands, **spec), place, orders or {}))
        return jobs[-1]

    yield make
    for job in jobs:
        job.shut()
