"""Two control planes behind a balancer, PostgreSQL, Redis, and three hosts, one of them across a network."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
import psycopg

from tests import servers
from tests.second_machine import Machine, Network
from tests.server import TOKEN, Server
from tests.support import eventually

DISK = "48m"
LOST_AFTER_S = 20.0
SETTINGS = {
    "DSTACKWEB_HEARTBEAT_S": "1",
    "DSTACKWEB_WATCH_EVERY_S": "1",
    "DSTACKWEB_PASS_EVERY_S": "1",
    "DSTACKWEB_HOST_SILENT_S": "5",
    "DSTACKWEB_LOST_AFTER_S": f"{LOST_AFTER_S:.0f}",
    "DSTACKWEB_START_DEADLINE_S": "60",
    "DSTACKWEB_RESERVE_AFTER_S": "20",
    "DSTACKWEB_WEB_WORKERS": "2",
}
RESTART_S = 1.0
"""How long a service manager waits before it starts a program again."""


class Balancer:
    """Passes TCP connections of `address` to the next of some ports that takes them."""

    def __init__(self, address: str, ports: list[int]) -> None:
        self.address, self.ports = address, ports
        self._listener = socket.create_server((address, 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.ports = self.ports[1:] + self.ports[:1]
                threading.Thread(target=self._join, args=(client, list(self.ports)), daemon=True).start()

    def _join(self, client: socket.socket, ports: list[int]) -> None:
        for port in ports:
            try:
                server = socket.create_connection((self.address, port), timeout=5)
            except OSError:
                continue
            server.settimeout(None)
            threading.Thread(target=_copy, args=(server, client), daemon=True).start()
            _copy(client, server)
            return
        client.close()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """All bytes one way; afterwards the other way ends as well."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class Deployment:
    """`with Deployment(folder) as deployment:` everything runs and answers. `folder` is one that other users may enter.

    The hosts are those of the planes, `one` and `two`, and `far`, which has a network and a disk of its own where this
    process may make them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.planes: list[Server] = []
        self.has_disk = False
        self._stack = ExitStack()
        self._down_since: dict[str, float] = {}
        self.keeps_running = True

    def __enter__(self) -> Deployment:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keeps_running = False
        self._stack.close()

    def _start(self) -> None:
        self.network = self._stack.enter_context(Network())
        here = self.network.here
        # What it has confirmed must survive it: durable.
        self.postgres = servers.postgres(self.folder / "postgres", durable=True, address=here)
        self._stack.callback(self.postgres.stop)
        pool = servers.pgbouncer(self.folder / "pgbouncer", self.postgres.url)
        self._stack.callback(pool.stop)
        self.redis = servers.redis(self.folder / "redis", address=here)
        self._stack.callback(self.redis.stop)
        self.balancer = Balancer(here, [])
        self._stack.callback(self.balancer.close)
        self.url = f"http://{here}:{self.balancer.port}"
        self.settings = SETTINGS | {
            "DATABASE_URL": pool.url,
            "DSTACKWEB_STORAGE": "database",
            "REDIS_URL": self.redis.url,
            "DSTACKWEB_PUBLIC_URL": self.url,
            "DSTACKWEB_SECRET_KEY": secrets.token_urlsafe(48),
            "DSTACKWEB_HOST": here,
        }
        for name in ("one", "two"):
            home = self.folder / name
            home.mkdir()
            plane = Server(home, migrated=False, DSTACKWEB_HOST_NAME=name, **self.settings)
            self.planes.append(plane)
            self._stack.callback(plane.http.close)
            self._stack.callback(plane.stop)
        for plane in self.planes:
            plane.launch()
        for plane in self.planes:
            eventually(plane.is_ready, deadline=90)
        self.balancer.ports = [plane.port for plane in self.planes]
        self.http = httpx.Client(
            base_url=f"{self.url}/api/v1", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30
        )
        self._stack.callback(self.http.close)
        self._start_far()

    def _start_far(self) -> None:
        """The joined host, on a small disk of its own."""
        home = self.folder / "far"
        home.mkdir()
        if os.geteuid() == 0 and shutil.which("mount"):
            mounted = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=755", "none", home], capture_output=True, check=False
            )
            self.has_disk = mounted.returncode == 0
        self._stack.callback(self._unmount)
        log = self.folder / "far-said"
        log.mkdir()
        self.far = Machine(log, self.network, **SETTINGS)
        self.far_home = home
        self._stack.callback(self._stop_far)
        token = str(self.planes[0].http.post("/hosts/invites").json()["token"])
        self.far.start(
            "host", "join", self.url, "--token", token, "--home", str(home), "--name", "far", "--insecure"
        )  # fmt: skip
        eventually(lambda: len([host for host in self.hosts() if host["online"]]) == 3, deadline=90)

    def _stop_far(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.far.stop()

    def _unmount(self) -> None:
        if self.has_disk:
            shutil.copytree(self.far_home / "jobs", self.folder / "far-jobs", ignore_dangling_symlinks=True,
                            ignore=shutil.ignore_patterns("heartbeats"))  # fmt: skip
            subprocess.run(["umount", "-l", self.far_home], check=False)

    def hosts(self) -> list[dict[str, Any]]:
        """The hosts as the API shows them."""
        items: list[dict[str, Any]] = self.http.get("/hosts").json()["items"]
        return items

    def keep(self) -> None:
        """What a service manager does: start again what has ended, after a moment."""
        for name, process in self._programs().items():
            if process is None or process.poll() is None:
                self._down_since.pop(name, None)
                continue
            if time.monotonic() - self._down_since.setdefault(name, time.monotonic()) < RESTART_S:
                continue
            del self._down_since[name]
            if name == "far":
                self.far.start("host", "run", "--home", str(self.far_home))
            else:
                next(plane for plane in self.planes if plane.env["DSTACKWEB_HOST_NAME"] == name).launch()

    def _programs(self) -> dict[str, subprocess.Popen[bytes] | None]:
        """What a service manager runs, by its host."""
        planes = {plane.env["DSTACKWEB_HOST_NAME"]: plane.process for plane in self.planes}
        return planes | {"far": self.far.process}

    def processes(self, host: str) -> list[psutil.Process]:
        """All processes below a plane's supervisor, or below the joined host's program, that one included."""
        process = self._programs()[host]
        try:
            root = psutil.Process(process.pid) if process else None
            return [root, *root.children(recursive=True)] if root else []
        except psutil.NoSuchProcess:
            return []

    def role(self, host: str, needle: str) -> list[psutil.Process]:
        """Those of them whose command line has `needle`."""
        found = []
        for process in self.processes(host):
            with contextlib.suppress(psutil.Error):
                if any(word.endswith(needle) for word in process.cmdline()):
                    found.append(process)
        return found

    def home(self, host: str) -> Path:
        return self.folder / host

    @contextlib.contextmanager
    def database(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Raises psycopg.Error while it is down."""
        with psycopg.connect(self.postgres.url, connect_timeout=3, autocommit=True) as connection:
            yield connection
