"""Shells and ports of jobs that have no sandbox: with a user of their own alone, and in a container."""

from __future__ import annotations

import http.server
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests import containers
from tests.gateway.conftest import Gateway
from tests.servers import free_port
from tests.support import eventually

pytestmark = pytest.mark.nightly


@contextmanager
def server(keys: Path, **env: str) -> Iterator[tuple[Gateway, Path]]:
    with tempfile.TemporaryDirectory(prefix="gateway-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as folder:
        Path(folder).chmod(0o755)
        found = Gateway(Path(folder), keys, **env)
        with found.server:
            key = found.key("admin")
            found.add_key(key)
            yield found, key


@contextmanager
def listener() -> Iterator[int]:
    """What listens on a port of the machine."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found.server_address[1]
        found.shutdown()


def reached(gateway: Gateway, key: Path, name: str) -> int:
    """The status of what listens on a port, through SSH."""
    local = free_port()
    with listener() as port:
        command = gateway.ssh_command(key, name, "-N", "-L", f"{local}:127.0.0.1:{port}")
        with subprocess.Popen(command) as client:
            try:
                return eventually(lambda: answered(local), deadline=30)
            finally:
                client.terminate()


def answered(port: int) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/").status_code
    except httpx.HTTPError:
        return 0


def test_a_job_with_a_user_and_no_sandbox(tmp_path: Path) -> None:
    with server(tmp_path, DSTACKWEB_JOB_USER="nobody", DSTACKWEB_SHARED_UID="0") as (gateway, key):
        name = gateway.submit(env={"GREETING": "hello"})
        gateway.ready(name)
        done = gateway.ssh(key, name, "id -un; echo $GREETING; grep NoNewPrivs /proc/self/status")
        assert done.stdout == b"nobody\nhello\nNoNewPrivs:\t1\n", done
        assert gateway.ssh(key, name, "-tt", "test -t 0 && exit 3").returncode == 3
        assert reached(gateway, key, name) == 501
        gateway.server.api("POST", f"runs/{name}/stop")
        assert gateway.server.wait(name)["status"] == "terminated"


def test_a_container(tmp_path: Path) -> None:
    with containers.docker() as docker:
        env = {"DSTACKWEB_ENGINE": "docker", "DOCKER_HOST": docker.socket}
        with server(tmp_path, **env) as (gateway, key):
            name = gateway.submit(image=containers.IMAGE, pull_policy="never", env={"GREETING": "hello"})
            gateway.ready(name)
            done = gateway.ssh(key, name, "echo $GREETING; test -e /etc/debian_version || echo inside; exit 4")
            assert (done.returncode, done.stdout) == (4, b"hello\ninside\n"), done
            assert gateway.ssh(key, name, "cat", given=b"x" * 500_000).stdout == b"x" * 500_000
            assert gateway.ssh(key, name, "-tt", "test -t 0 && exit 3").returncode == 3
            assert reached(gateway, key, name) == 501
            gateway.server.api("POST", f"runs/{name}/stop")
            assert gateway.server.wait(name)["status"] == "terminated"
