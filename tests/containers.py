"""A Docker daemon, Podman and a registry of the tests' own, and images made of busybox."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dstackweb.runner.engine import Engine
from standins.programs import require
from tests.servers import free_port
from tests.support import eventually

USER, PASSWORD = "ada", "pass-of-the-registry"
HTPASSWD = "ada:$2y$05$abcdefghijklmnopqrstuueakZwMHfS9QuOyg3RI.tRGeAbu9FHSy\n"
IMAGE = "busybox-of-tests:1"
TOOLS = ("sh", "cat", "id", "env", "sleep", "echo", "head", "touch", "ls", "grep", "dd", "mount", "su", "stat", "tail")


class Docker:
    """The daemon, which can be killed and started again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket = f"unix://{home}/s"
        self.engine = Engine("docker", str(shutil.which("docker")), self.socket)
        self.start()
        make_root(home / "root")
        _import(self.engine, home / "root", IMAGE)

    def start(self, *more: str) -> None:
        for stale in ("pid", "exec/containerd/containerd.pid"):  # processes that were killed may still be zombies
            (self.home / stale).unlink(missing_ok=True)
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["dockerd", "--iptables=false", "--bridge=none", "-H", self.socket, "--data-root", self.home / "data",
                 "--exec-root", self.home / "exec", "-p", self.home / "pid", "--shutdown-timeout", "1", *more],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PATH": f"{self._toolkit()}:{os.environ['PATH']}"},
            )  # fmt: skip
        eventually(lambda: self.engine.call("version"), every=0.05)

    def _toolkit(self) -> Path:
        """A stand-in for NVIDIA's container toolkit: Docker calls it for containers with GPUs, and it does nothing."""
        folder = self.home / "toolkit"
        folder.mkdir(exist_ok=True)
        hook = folder / "nvidia-container-runtime-hook"
        hook.write_text("#!/bin/sh\nexec cat > /dev/null\n")
        hook.chmod(0o755)
        return folder

    def ensure(self) -> None:
        """Have it run again after a test that failed while it was away."""
        if self._process.poll() is not None:
            self.start()

    def kill(self) -> None:
        """SIGKILL, as for a crash. What it runs goes on."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self.ensure()
        for found in self.engine.call("ps", "-aq").split():
            self.engine.call("rm", "-f", found)
        self.engine.call("network", "prune", "--force")  # bridges of the machine, which stay after the daemon
        self._process.terminate()
        self._process.wait(30)

    def push(self, image: str) -> None:
        """Put the image into a registry, with the tests' credentials, and forget it here."""
        config = self.home / "push"
        config.mkdir(exist_ok=True)
        registry = image.partition("/")[0]
        auth = {"auths": {registry: {"auth": "YWRhOnBhc3Mtb2YtdGhlLXJlZ2lzdHJ5"}}}
        (config / "config.json").write_text(json.dumps(auth))
        self.engine.call("tag", IMAGE, image)
        env = self.engine.environment(str(config))
        subprocess.run([self.engine.program, "push", image], check=True, env=env, capture_output=True)
        self.engine.call("rmi", image)

    def left(self) -> list[str]:
        """All containers of jobs."""
        return self.engine.call("ps", "-aq", "--filter", "label=dstackweb.job").split()


def make_root(root: Path) -> None:
    """The files of the image: busybox, also as a program that sets its user, and a root without a password."""
    for name in ("bin", "tmp", "etc", "proc", "dev", "sys", "setuid"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy("/bin/busybox", root / "bin")
    for name in TOOLS:
        (root / "bin" / name).symlink_to("busybox")
    shutil.copy("/bin/busybox", root / "setuid")
    (root / "setuid/busybox").chmod(0o4755)
    (root / "etc/passwd").write_text("root::0:0:root:/:/bin/sh\n")


def _import(engine: Engine, root: Path, image: str) -> None:
    changes = """-c 'ENTRYPOINT ["/bin/echo","own program"]' -c 'ENV FROM_IMAGE=yes'"""
    subprocess.run(
        f"tar -C {root} -c . | {engine.program} import {changes} - {image}",
        shell=True, check=True, capture_output=True, env=engine.environment(),
    )  # fmt: skip


@contextmanager
def docker() -> Iterator[Docker]:
    """A daemon in a folder of its own; nothing of it is left. Raises Missing."""
    require("root", "docker")
    home = Path(tempfile.mkdtemp(prefix="dw-docker-", dir="/tmp"))
    home.chmod(0o755)
    made = Docker(home)
    try:
        yield made
    finally:
        made.stop()
        _remove(home)


@contextmanager
def podman() -> Iterator[Engine]:
    """Podman with the image of the tests in a store of its own, and with registries of this machine. Raises Missing."""
    require("podman")
    home = Path(tempfile.mkdtemp(prefix="dw-podman-", dir="/tmp"))
    home.chmod(0o755)
    (home / "registries.conf").write_text('[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n')
    program = home / "podman"
    store = f"--root {home}/store --runroot {home}/run"
    program.write_text(
        f'#!/bin/sh\nCONTAINERS_REGISTRIES_CONF={home}/registries.conf exec {shutil.which("podman")} {store} "$@"\n'
    )
    program.chmod(0o755)
    engine = Engine("podman", str(program))
    make_root(home / "root")
    _import(engine, home / "root", f"localhost/{IMAGE}")
    try:
        yield engine
    finally:
        engine.call("rm", "--all", "--force")
        _remove(home)


def _remove(home: Path) -> None:
    """The engine's files, with what is mounted there."""
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        if (place := line.split()[1]).startswith(f"{home}/"):
            subprocess.run(["umount", "-l", place], check=False)
    shutil.rmtree(home, ignore_errors=True)


@contextmanager
def registry(home: Path) -> Iterator[str]:
    """A registry that wants credentials; its address. Raises Missing."""
    require("registry")
    address = f"127.0.0.1:{free_port()}"
    (home / "htpasswd").write_text(HTPASSWD)
    (home / "registry.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {home}/registry}}}}\n"
        f"http: {{addr: {address}}}\nauth: {{htpasswd: {{realm: tests, path: {home}/htpasswd}}}}\n"
    )
    process = subprocess.Popen(
        ["docker-registry", "serve", home / "registry.yml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield address
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
