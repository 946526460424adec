"""What the agent finds out about its instance, and powering it off."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from dstackweb.runner import nvml

METADATA = "http://169.254.169.254"
METADATA_TIMEOUT_S = 1.0
METADATA_TOKEN_S = 21600
DRIVER_WAIT_S = 120.0
"""How long the driver may take after boot to show all GPUs on the bus."""
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")


def gpus() -> list[str]:
    """NVML UUIDs of the GPUs, once the driver shows as many as are on the bus, or DRIVER_WAIT_S has passed."""
    until = time.monotonic() + DRIVER_WAIT_S
    while len(found := _shown()) < _on_bus() and time.monotonic() < until:
        time.sleep(2)
    return found


def granted_gpus() -> list[str]:
    """NVML UUIDs of the GPUs in CUDA_VISIBLE_DEVICES, which clusters set for an allocation; without it none."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    shown = _shown() if any(name.isdigit() for name in named) else []
    by_number = dict(enumerate(shown))
    uuids = [by_number.get(int(name), "") if name.isdigit() else name for name in named]
    return [uuid for uuid in uuids if uuid.startswith(("GPU-", "MIG-"))]


def _shown() -> list[str]:
    """By `nvidia-smi`, or by NVML where there is none: containers of clusters may have the driver's library alone."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except FileNotFoundError:
        return [gpu.uuid for gpu in nvml.read().samples if gpu.uuid.startswith("GPU-")]
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip().startswith("GPU-")]


def _on_bus(devices: str = "/sys/bus/pci/devices") -> int:
    return sum(
        _read(f"{devices}/{name}/vendor") == NVIDIA and _read(f"{devices}/{name}/class")[:6] in DISPLAYS
        for name in (os.listdir(devices) if os.path.isdir(devices) else ())
    )


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def address(api: str) -> str:
    """The address from which this instance reaches the API, where its network can reach it."""
    parts = urlsplit(api)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, there = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def metadata_endpoint() -> str:
    """Where this instance's metadata are."""
    return os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or METADATA


class Metadata:
    """EC2's instance metadata, version 2."""

    every_s = 5.0

    def __init__(self, endpoint: str = "") -> None:
        self._base = (endpoint or metadata_endpoint()).rstrip("/")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._token = ""

    def interruption(self) -> str | None:
        """When a spot interruption ends the instance (ISO 8601, UTC); None if there is none, or it can't be read."""
        try:
            if not self._token:
                lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(METADATA_TOKEN_S)}
                self._token = self._ask("PUT", "api/token", lifetime)
            action = json.loads(
                self._ask("GET", "meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})
            )
            at = action["time"]
        except urllib.error.HTTPError as error:
            if error.code == 401:
                self._token = ""
            return None
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return None
        return at if isinstance(at, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", at) else None

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self._base}/latest/{path}", method=method, headers=headers)
        with self._open(request, timeout=METADATA_TIMEOUT_S) as answer:
            return str(answer.read(65536).decode())


def switch_off() -> bool:
    """Power the instance off; False if no command can."""
    for command in (["shutdown", "-h", "now"], ["poweroff"], ["halt", "-p"]):
        try:
            if subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == 0:
                return True
        except (OSError, subprocess.SubprocessError):
            continue
    return False
