"""Machines with an agent each, as processes in a folder, and the way from them to the server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from uuid import UUID

from dstackweb.runner import pyz, tree
from tests.support import eventually

NOWHERE = "http://127.0.0.1:9"


SHORTER = {
    b"POLL_S = 0.1\n": b"POLL_S = 0.05\n",
    b"METADATA_EVERY_S = 5.0\n": b"METADATA_EVERY_S = 0.5\n",
    b"AGAIN_CAP_S = 3, 30.0\n": b"AGAIN_CAP_S = 3, 0.3\n",
}
"""Waits of the agent, for tests."""


@contextmanager
def short_waits() -> Iterator[None]:
    """Archives built meanwhile have an agent that waits less between its checks."""
    package = pyz.package

    def faster(name: str) -> dict[str, bytes]:
        contents = package(name)
        for old, new in SHORTER.items():
            assert contents["dstackweb/runner/agent.py"].count(old) == 1
            contents["dstackweb/runner/agent.py"] = contents["dstackweb/runner/agent.py"].replace(old, new)
        return contents

    with mock.patch.object(pyz, "package", faster):
        pyz.pyz.cache_clear()
        yield
    pyz.pyz.cache_clear()


class Gate:
    """A way to a server that can be shut, as a network can be cut: connections end, and new ones are refused."""

    def __init__(self, port: int) -> None:
        self.server = port
        self.port = 0
        self.open()
        self.url = f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._let_in, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        for each in (self._listener, *self._sockets):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            finally:
                each.close()

    def _let_in(self, listener: socket.socket) -> None:
        while True:
            try:
                outside, _ = listener.accept()
            except OSError:
                return
            inside = socket.create_connection(("127.0.0.1", self.server))
            self._sockets += [outside, inside]
            for pair in ((outside, inside), (inside, outside)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


def processes_of(job: UUID) -> set[int]:
    """All that carry a job's marker."""
    return {pid for pid in tree.pids() if tree.job_of(pid) == str(job)}


class Machine:
    """What `shutdown` does here is to write a file."""

    def __init__(self, folder: Path, api: str, instance: UUID, token: str) -> None:
        self.home, self.binaries, self.pyz = folder / "agent", folder / "bin", folder / "runner.pyz"
        for made in (folder, self.home, self.binaries):
            made.mkdir(mode=0o755, exist_ok=True)
        pyz.build_pyz(self.pyz)
        self.tool("shutdown", f'echo "$@" > {folder}/off')
        self._off = folder / "off"
        self.arguments = ["--api", api, "--instance", str(instance), "--home", str(self.home)]
        self.env = {
            "PATH": f"{self.binaries}:/usr/local/bin:/usr/bin:/bin", "DSTACKWEB_JOIN_TOKEN": token,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": NOWHERE,
        }  # fmt: skip
        self.console = folder / "console"
        self.processes: list[subprocess.Popen[bytes]] = []

    def tool(self, name: str, script: str) -> None:
        """A program on the machine's PATH."""
        path = self.binaries / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def start(self) -> Machine:
        with self.console.open("ab") as console:
            process = subprocess.Popen(
                [sys.executable, "-IS", str(self.pyz), "agent", *self.arguments],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=self.env,
            )  # fmt: skip
        self.processes.append(process)
        return self

    def kill(self) -> None:
        self.processes[-1].kill()
        self.processes[-1].wait()

    def end(self) -> int:
        """Wait for the agent to end; its exit status."""
        return self.processes[-1].wait(20)

    @property
    def off(self) -> str | None:
        """The arguments of `shutdown`."""
        return self._off.read_text().strip() if self._off.exists() else None

    def said(self) -> str:
        return self.console.read_text()

    def runner_pid(self, job: UUID) -> int:
        return eventually(lambda: int((self.home / "jobs" / str(job) / "lock").read_text()))

    def clear(self, wanted: Callable[[int], bool]) -> None:
        """Nothing of it goes on."""
        for process in self.processes:
            process.kill()
            process.wait()
        for lock in self.home.glob("jobs/*/lock"):
            pid = int(lock.read_text() or 0)
            if wanted(pid):
                os.kill(pid, signal.SIGKILL)
