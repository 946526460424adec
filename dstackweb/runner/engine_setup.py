"""The container engine of a cloud instance: that of its image, or the distribution's Docker, installed at need.

It is installed for the first job with an image: instances that were started for other jobs can serve it, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any

from dstackweb.runner import engine
from dstackweb.runner.engine import Engine
from dstackweb.runner.state import say

INSTALL_S, START_S = 600.0, 60.0
"""How long the installation may take, and then the daemon to answer."""
LOG = "engine.log"
TEXT = 600
GPU_TOOLS = {"docker": "nvidia-container-runtime-hook", "podman": "nvidia-ctk"}
"""What NVIDIA's container toolkit brings: without it the engine gives containers no GPUs."""
INSTALL = r"""
export DEBIAN_FRONTEND=noninteractive
wait=DPkg::Lock::Timeout=300 # updates at boot hold it
if command -v docker >/dev/null; then
  :
elif command -v apt-get >/dev/null; then
  apt-get -o $wait -q update
  apt-get -o $wait -qy --no-install-recommends install docker.io || exit
elif command -v dnf >/dev/null; then
  dnf -qy install docker || dnf -qy install podman || exit
elif command -v yum >/dev/null; then
  yum -qy install docker || exit
else
  echo 'no apt-get, dnf or yum' >&2
  exit 1
fi
systemctl start docker || service docker start || :
"""


class EngineFault(str, Enum):  # noqa: UP042 - Python 3.9 has no StrEnum
    """Why an instance has no engine for a job."""

    INSTALL_FAILED = "install_failed"
    NOT_ROOT = "not_root"
    NO_GPU_TOOLKIT = "no_gpu_toolkit"


class EngineSetup:
    """Finds the engine, and installs it once. `home` gets the installation's output."""

    def __init__(self, home: str) -> None:
        self._log = os.path.join(home, LOG)
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0
        self._ended = False
        self.report: dict[str, Any] | None = None
        """For the server: the `job` that waits, and the `fault` with the installer's `text` if there is one."""

    def prepare(self, orders: Mapping[str, Any]) -> dict[str, Any] | None:
        """The job's orders with its engine; None while there is none, or if there will be none (`report`)."""
        if not orders.get("image"):
            self.report = None
            return dict(orders)
        found = self._find()
        fault = text = ""
        if isinstance(found, Engine):
            if not orders.get("gpus") or shutil.which(GPU_TOOLS[found.name]):
                self.report = None
                return {**orders, "engine": found.stored()}
            fault = EngineFault.NO_GPU_TOOLKIT.value
        elif found is not None:
            fault, text = found.value, self._output()
        self.report = {"job": orders["job"], "fault": fault, "text": text}
        return None

    def _find(self) -> Engine | EngineFault | None:
        """None while it is being installed, or its daemon starts."""
        if self._process is None or self._has_ended(self._process):
            found, _report = engine.find()
            if found is not None:
                return found
        if self._process is None:
            return self._install()
        if time.monotonic() < self._until and (not self._ended or self._process.returncode == 0):
            return None
        if not self._ended:
            self._process.kill()
        return EngineFault.INSTALL_FAILED

    def _install(self) -> EngineFault | None:
        if os.getuid() != 0:
            return EngineFault.NOT_ROOT
        say("this instance has no container engine that answers; installing and starting one")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", INSTALL], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        self._until = time.monotonic() + INSTALL_S
        return None

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        if not self._ended and process.poll() is not None:
            self._ended, self._until = True, time.monotonic() + START_S
            say(f"the installation of the container engine ended with {process.returncode}")
        return self._ended

    def _output(self) -> str:
        """The last of what the installation wrote."""
        try:
            with open(self._log, encoding="utf-8", errors="replace") as file:
                return file.read().strip()[-TEXT:]
        except OSError:
            return ""
