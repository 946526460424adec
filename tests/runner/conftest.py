"""Real runners of one job each, against an API of their own."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstackweb.runner import cgroups, tree
from dstackweb.runner.engine import Engine
from tests import containers
from tests.runner.api import TOKEN, Api
from tests.support import REPO, eventually

OTHER_USER = "nobody" if os.getuid() == 0 else None
"""Started as root, jobs here run as another user, as they do in earnest."""


def runs(pid: int) -> bool:
    """Whether a process is there; a zombie runs nothing."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"


class Box:
    """A job, its API, and its files on this machine."""

    def __init__(self, home: Path, api: Api) -> None:
        self.api = api
        self.state = home / "jobs" / api.job
        self.run_dir: Path = home / "runs" / api.spec["run_uid"] / "node-0"
        self.env: dict[str, str] = {}
        """More of the environment that the runner is started in."""
        self.orders: dict[str, Any] = {
            "api": api.url, "job": api.job, "token": TOKEN, "state_dir": str(self.state), "run_dir": str(self.run_dir),
            "user": OTHER_USER, "path": "/usr/local/bin:/usr/bin:/bin",
        }  # fmt: skip

    def launch(self) -> dict[str, Any]:
        """Start a runner as a host does; what it answered."""
        with self.start() as process:
            answer: dict[str, Any] = json.loads(self.give_orders(process))
        return answer

    def start(self, before: str = "", close_fds: bool = True) -> subprocess.Popen[bytes]:
        """A runner that waits for its orders; `before` is executed first, with `os` and `signal` at hand."""
        begin = ["-m", "dstackweb.runner"]
        if before:
            begin = ["-c", f"import os, signal; {before}; import dstackweb.runner.__main__ as runner; runner.main()"]
        return subprocess.Popen(
            [sys.executable, "-S", *begin],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": str(REPO), "SERVERS_OWN": "secret"} | self.env,
            close_fds=close_fds,
        )

    def give_orders(self, process: subprocess.Popen[bytes]) -> bytes:
        """Give a runner its orders; what it says."""
        return process.communicate(json.dumps(self.orders).encode(), timeout=10)[0]

    @property
    def pid(self) -> int:
        """Of the last runner that took the lock."""
        return int((self.state / "lock").read_text())

    def lives(self) -> bool:
        """Whether a runner holds the lock."""
        try:
            lock = os.open(self.state / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def kill(self) -> None:
        """SIGKILL to the runner; its job's processes stay."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait_until_gone()

    def nudge(self) -> bool:
        """Have the runner look now, and not wait for its next try."""
        if self.lives():
            os.kill(self.pid, signal.SIGUSR1)
        return True

    def wait_until_gone(self) -> None:
        """Until no runner holds the lock."""
        eventually(lambda: not self.lives(), every=0.01)

    def processes(self) -> set[int]:
        """The job's processes that carry its marker."""
        return {pid for pid in tree.pids() if tree.job_of(pid) == self.api.job}

    def end(self, nudged: bool = False) -> dict[str, Any]:
        """Wait for the end: it is reported, and the runner is gone. `nudged` shortens the waits between tries."""
        eventually(lambda: (not nudged or self.nudge()) and self.api.exit and not self.lives(), every=0.02)
        assert self.api.exit is not None
        return self.api.exit

    def lines(self) -> list[str]:
        """The log so far."""
        return self.api.log.decode(errors="replace").splitlines()

    def wait_for(self, line: str) -> None:
        """Until the log has this line."""
        eventually(lambda: line in self.lines(), every=0.02)

    def said(self) -> str:
        """What the runner had to say in its own log."""
        return (self.state / "runner.log").read_text()


@pytest.fixture
def box(open_home: Path) -> Iterator[Callable[..., Box]]:
    """Makes jobs; nothing of them is left behind."""
    boxes: list[Box] = []

    def make(*commands: str, **spec: Any) -> Box:
        boxes.append(Box(open_home, Api(*commands, **spec)))
        return boxes[-1]

    yield make
    for made in boxes:
        made.api.trouble = lambda what: 404  # no longer wanted
        if made.lives():
            made.nudge()
            made.wait_until_gone()
        tree.send(made.processes(), signal.SIGKILL)
        cgroups.read(str(made.state)).remove()
        made.api.go_down()


@pytest.fixture
def small_disk(open_home: Path) -> Iterator[Callable[..., Path]]:
    """Makes a disk with room for so many files, and so many KiB; one at a time."""
    disk = open_home / "small"
    disk.mkdir()

    def make(files: int, kib: int = 8192) -> Path:
        if os.path.ismount(disk):
            subprocess.run(["umount", disk], check=True)
        options = f"size={kib}k,mode=755,nr_inodes={files + 1}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=True)
        return disk

    yield make
    subprocess.run(["umount", "-l", disk], check=False)


@pytest.fixture(scope="session")
def docker() -> Iterator[containers.Docker]:
    """One daemon for all tests of the group `containers`."""
    with containers.docker() as made:
        yield made


@pytest.fixture(scope="session")
def podman() -> Iterator[Engine]:
    """Podman, for all tests of the group `containers`."""
    with containers.podman() as engine:
        yield engine
