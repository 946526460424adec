"""A real server with its gateway, and people with keys."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from standins.programs import require
from tests.server import Server
from tests.servers import free_port


class Gateway:
    """A server with a gateway, and the key of its admin."""

    def __init__(self, home: Path, keys: Path, **env: str) -> None:
        self.ssh_port, self.http_port, self.keys = free_port(), free_port(), keys
        ports = {"DSTACKWEB_SSH_PORT": str(self.ssh_port), "DSTACKWEB_GATEWAY_PORT": str(self.http_port)}
        self.server = Server(home, **ports, **env)

    def key(self, name: str) -> Path:
        """A new pair of keys; returns the private one's file."""
        path = self.keys / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path, "-C", name], check=True)
        return path

    def add_key(self, path: Path) -> dict[str, Any]:
        """Add the public key to the admin's account."""
        body = {"public_key": path.with_suffix(".pub").read_text()}
        response = self.server.http.post("/user/ssh-keys", json=body)
        assert response.status_code == 201, response.text
        added: dict[str, Any] = response.json()
        return added

    def ssh_command(self, key: Path, run: str, *words: str) -> list[str]:
        require("ssh")
        known = self.keys / "known_hosts"
        options = ["StrictHostKeyChecking=accept-new", f"UserKnownHostsFile={known}", "IdentitiesOnly=yes",
                   "BatchMode=yes", "LogLevel=ERROR"]  # fmt: skip
        return [
            "ssh", "-F", "none", "-i", str(key), "-p", str(self.ssh_port),
            *(word for option in options for word in ("-o", option)), f"{run}@127.0.0.1", *words,
        ]  # fmt: skip

    def ssh(self, key: Path, run: str, *words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """A command over SSH."""
        return subprocess.run(
            self.ssh_command(key, run, *words), input=given, capture_output=True, timeout=60, check=False
        )

    def submit(self, **keys: Any) -> str:
        """A dev environment; returns its name."""
        config = {"type": "dev-environment", "resources": {"cpu": 1}, **keys}
        return str(self.server.api("POST", "runs", json={"config": config}).json()["name"])

    def ready(self, name: str) -> dict[str, Any]:
        """Wait until people can connect to the run."""
        from tests.support import eventually

        def connected() -> dict[str, Any] | None:
            run = self.server.run(name)
            assert run["status"] not in ("failed", "terminated"), (run["status_message"], self.server.log(name))
            return run if run["connect"] and run["connect"]["ready"] else None

        return eventually(connected, deadline=60)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="gateway-", dir=os.environ["DSTACKWEB_TEST_HOME"]) as folder:
        Path(folder).chmod(0o755)
        found = Gateway(Path(folder), tmp_path_factory.mktemp("keys"))
        with found.server:
            yield found


@pytest.fixture(scope="module")
def key(gateway: Gateway) -> Path:
    """The admin's key."""
    found = gateway.key("admin")
    gateway.add_key(found)
    return found
