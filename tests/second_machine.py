"""Another machine: a network namespace with a link to this one, or, where none can be made, a process beside it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import psutil

from tests.support import REPO, eventually

CLI = [sys.executable, "-c", "from dstackweb.cli.main import app; app()"]


class Network:
    """`with Network() as network:` a link between this machine (`here`) and another, which commands get into by
    `prefix`. Without the right to make one, `there` is this machine itself."""

    def __init__(self) -> None:
        number = os.getpid() % 65536
        self.name = f"dw{number}"
        self.here, self.there = (f"10.213.{number // 256}.{last}" for last in (1, 2))
        self.prefix = ["ip", "netns", "exec", self.name]

    def __enter__(self) -> Network:
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError):
            self._remove()
            self.here = self.there = "127.0.0.1"
            self.prefix = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def is_real(self) -> bool:
        """Whether the other machine has a network of its own."""
        return bool(self.prefix)

    def _make(self) -> None:
        near, far = f"{self.name}a", f"{self.name}b"
        _ip("netns", "add", self.name)
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
        _ip("addr", "add", f"{self.here}/24", "dev", near)
        _ip("link", "set", near, "up")
        for words in (("link", "set", "lo", "up"), ("addr", "add", f"{self.there}/24", "dev", far)):
            _ip("-n", self.name, *words)
        self.up()

    def _remove(self) -> None:
        if shutil.which("ip"):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self.name)  # and with it both ends of the link

    def cut(self) -> None:
        """Nothing goes through any more."""
        _ip("-n", self.name, "link", "set", f"{self.name}b", "down")

    def up(self) -> None:
        """The link is there."""
        _ip("-n", self.name, "link", "set", f"{self.name}b", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Machine:
    """A machine of the team without anything but the program; `env` is what its admin sets there."""

    def __init__(self, home: Path, network: Network | None = None, **env: str) -> None:
        self.home, self.network = home, network
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSTACKWEB_", "PYTEST_"))}
        self.env = {name: value for name, value in kept.items() if name not in ("DATABASE_URL", "REDIS_URL")}
        self.env |= {"DJANGO_SETTINGS_MODULE": "dstackweb.settings", "PYTHONPATH": str(REPO)}
        self.env |= {"DSTACKWEB_SHARED_UID": "1", "DSTACKWEB_JOB_WRITABLE": tempfile.gettempdir(), **env}
        self.process: subprocess.Popen[bytes] | None = None

    def call(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """`dstackweb …` there, until it ends."""
        return subprocess.run(self._inside(CLI, *argv), env=self.env, capture_output=True, text=True, check=False)

    def start(self, *argv: str, program: list[str] = CLI) -> None:
        """A program there that goes on, `dstackweb …` by default; what it says is in `said`."""
        with (self.home / "said").open("ab") as log:
            self.process = subprocess.Popen(self._inside(program, *argv), env=self.env, stdout=log, stderr=log)

    def _inside(self, program: list[str], *argv: str) -> list[str]:
        return [*(self.network.prefix if self.network else []), *program, *argv]

    @property
    def said(self) -> str:
        return (self.home / "said").read_text()

    @property
    def has_ended(self) -> bool:
        """Whether the process that was started last is over."""
        return self.process is not None and self.process.poll() is not None

    def cut(self) -> None:
        """Its network is gone; where it shares this machine's, its processes stand still, which looks the same."""
        if self.network and self.network.is_real:
            self.network.cut()
        else:
            self._signal(signal.SIGSTOP)

    def reconnect(self) -> None:
        if self.network and self.network.is_real:
            self.network.up()
        else:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        host = psutil.Process(self.process.pid)
        for one in (host, *host.children(recursive=True)):
            one.send_signal(number)

    def stop(self) -> None:
        """End the host's process; what it runs lives on."""
        if self.process is not None and self.process.poll() is None:
            self._signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(30)

    def wait(self) -> int:
        """Until its process ends by itself; returns the exit code."""
        assert self.process is not None
        eventually(lambda: self.has_ended, deadline=60)
        return self.process.returncode
