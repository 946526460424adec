"""A Dask cluster on this machine: a scheduler and workers, each a process. Its GPUs are only counted."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from standins.processes import free_ports, until

START_S = 30.0
WORKERS = ("w1", "w2")
RESOURCES = {"w1": "GPU=2 CPU=4", "w2": "CPU=4"}


class Dask:
    """Two workers of 4 threads, w1 with 2 GPUs. With `tls` all of them speak TLS with certificates in `folder`.

    `env` are further variables of its processes, such as those that lead to the stand-in for NVML.
    """

    def __init__(self, folder: Path, *, tls: bool = False, env: Mapping[str, str] | None = None) -> None:
        self.folder, self.tls, self._env = folder, tls, env or {}
        [self.port] = free_ports(1)
        self.address = f"{'tls' if tls else 'tcp'}://127.0.0.1:{self.port}"
        self.pids: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> Dask:
        """Start it, and wait until both workers are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.tls:
            make_certificates(self.folder)
        self.start_scheduler()
        for name in WORKERS:
            self.start_worker(name)
        self.wait()
        return self

    def start_scheduler(self) -> None:
        """Start it, on the same port each time."""
        self._run("scheduler", "dask_scheduler", "--host", self.address)

    def start_worker(self, name: str) -> None:
        self._run(
            name, "dask_worker", self.address, "--name", name, "--nthreads", "4", "--memory-limit", "4GB", "--no-nanny",
            "--resources", RESOURCES[name], "--local-directory", str(self.folder), "--host", "127.0.0.1",
        )  # fmt: skip

    def wait(self) -> None:
        """Until each process that runs has joined the cluster."""
        for name in self._processes:
            said = "Scheduler at:" if name == "scheduler" else "Starting established connection to"
            until(partial(self._has_said, name, said), START_S, f"Dask's {name} does not start")

    def log(self, name: str) -> str:
        """What a process has printed since its start."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _has_said(self, name: str, text: str) -> bool:
        return text in self.log(name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End `scheduler` or a worker; without a scheduler workers end by themselves."""
        process = self._processes.pop(name)
        process.send_signal(number)
        process.wait(START_S)

    def wait_ended(self, name: str) -> None:
        """Until a worker without a scheduler has ended."""
        self._processes.pop(name).wait(START_S)

    def stop(self) -> None:
        """End all of it. Tasks' guards notice, and end what their scripts have left."""
        for process in reversed(self._processes.values()):
            process.kill()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        self._processes.clear()

    def _run(self, name: str, program: str, *arguments: str) -> None:
        files = [f"--tls-{what}={self.folder / file}" for what, file in FILES.items()] if self.tls else []
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{program}", "--dashboard-address=:0", *arguments, *files],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self._env}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.pids[name] = self._processes[name].pid


FILES = {"ca-file": "ca.pem", "cert": "cert.pem", "key": "key.pem"}


def make_certificates(folder: Path) -> None:
    """A CA and a certificate for all of a cluster, as Dask wants them."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    now = dt.datetime.now(dt.UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def signed(subject: str, public: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.Certificate:
        return (
            x509.CertificateBuilder(named("dask-ca"), named(subject), public, x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(ca_key, hashes.SHA256())
        )

    pem = serialization.Encoding.PEM
    folder.joinpath("ca.pem").write_bytes(signed("dask-ca", ca_key.public_key(), ca=True).public_bytes(pem))
    folder.joinpath("cert.pem").write_bytes(signed("dask", key.public_key(), ca=False).public_bytes(pem))
    folder.joinpath("key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
