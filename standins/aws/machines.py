"""Instances that run their user data as processes, each in a folder and a process tree of its own."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from moto.ec2.models.instances import Instance, InstanceState, StateReason

from standins.aws.catalog import gpu_count
from standins.aws.wire import Response

HERE = Path(__file__).parent
PYTHON = os.path.realpath(sys.executable)
"""The interpreter without the packages of the environment it runs in, as a bare machine has it."""
STATES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
SPOT_TERMINATION = ("Server.SpotInstanceTermination", "Server.SpotInstanceTermination: Spot instance termination")
USER_SHUTDOWN = ("Client.UserInitiatedShutdown", "Client.UserInitiatedShutdown: User initiated shutdown")
OWN_SHUTDOWN = ("Client.InstanceInitiatedShutdown", "Client.InstanceInitiatedShutdown: Instance initiated shutdown")
CONSOLE_BYTES = 65536


class Machine:
    """One instance: moto's record of it, and its processes."""

    def __init__(self, fleet: Fleet, instance: Instance, user_data: bytes) -> None:
        self.fleet, self.instance, self.user_data = fleet, instance, user_data
        self.folder = fleet.home / str(instance.id)
        self.console, self.exit_file = self.folder / "console.log", self.folder / "exit"
        self.process: subprocess.Popen[bytes] | None = None
        self.timers: list[threading.Timer] = []
        self.going_off: threading.Timer | None = None
        self.interruption: float | None = None
        self.tokens: set[str] = set()
        self.set_state("pending")
        self.later(fleet.boot_s, self.boot)

    @property
    def state(self) -> str:
        return str(self.instance.state)

    def set_state(self, name: str, reason: tuple[str, str] | None = None) -> None:
        self.instance._state = InstanceState(name, STATES[name])
        if reason:
            self.instance.state_reason = StateReason(reason[1], reason[0])

    def later(self, after_s: float, what: Any, *args: Any) -> threading.Timer:
        timer = threading.Timer(after_s, self._locked, (what, *args))
        timer.daemon = True
        self.timers.append(timer)
        timer.start()
        return timer

    def _locked(self, what: Any, *args: Any) -> None:
        with self.fleet.lock:
            what(*args)

    def boot(self) -> None:
        if self.state != "pending":
            return
        self.set_state("running")
        for name in ("bin", "root", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        binaries = self.folder / "bin"
        for name in ("python3", "python"):
            (binaries / name).symlink_to(PYTHON)
        for name in ("shutdown", "poweroff", "halt"):
            script = binaries / name
            script.write_text(f"#!{PYTHON} -IS\n{(HERE / 'machine_shutdown.py').read_text()}")
            script.chmod(0o755)
        if gpus := gpu_count(str(self.instance.instance_type)):
            script = binaries / "nvidia-smi"
            script.write_text("#!/bin/sh\n" + "".join(f"echo GPU-{self.instance.id}-{n}\n" for n in range(gpus)))
            script.chmod(0o755)
        data = gzip.decompress(self.user_data) if self.user_data.startswith(b"\x1f\x8b") else self.user_data
        self.console.touch()
        if not data.startswith(b"#!"):
            if data:
                self.console.write_text("user data that does not start with #! is not run\n")
            return
        script = self.folder / "user-data"
        script.write_bytes(data)
        script.chmod(0o755)
        self.process = subprocess.Popen(
            [PYTHON, "-IS", HERE / "machine_init.py", script, self.console, self.exit_file, str(self.fleet.grace_s)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            cwd=self.folder / "root",
            env={
                "HOME": str(self.folder / "root"), "TMPDIR": str(self.folder / "tmp"), "USER": "root",
                "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8",
                "PATH": f"{binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{self.fleet.url}/_instance/{self.instance.id}",
            },
        )  # fmt: skip

    def end(self, towards: str, reason: tuple[str, str]) -> None:
        """Switch it off, towards `stopped` or `terminated`: its processes first, then its state."""
        if self.state == "terminated" or (self.state == "shutting-down" and towards == "terminated"):
            return
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        if towards == "terminated":
            self.instance.terminate()
        elif self.state in {"stopping", "stopped"}:
            return
        self.set_state("shutting-down" if towards == "terminated" else "stopping", reason)
        threading.Thread(
            target=self._ended, args=(towards, time.monotonic() + self.fleet.shutdown_s), daemon=True
        ).start()

    def _ended(self, towards: str, ends: float) -> None:
        self.kill(in_good_order=True)
        time.sleep(max(0, ends - time.monotonic()))
        with self.fleet.lock:
            if self.state == {"terminated": "shutting-down", "stopped": "stopping"}[towards]:
                self.set_state(towards)

    def kill(self, *, in_good_order: bool = False) -> None:
        """End all its processes, also those that left their session; returns when they are gone."""
        process = self.process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError, ValueError):  # another thread may do the same
            if in_good_order and not process.stdin.closed:
                process.stdin.write(b"stop")
                process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()

    def switch_off(self, after_s: float) -> None:
        """`shutdown` on the machine; below 0 cancels it."""
        if self.going_off:
            self.going_off.cancel()
        if after_s >= 0:
            behaviour, spot = self.instance.instance_initiated_shutdown_behavior, self.instance.lifecycle == "spot"
            towards = "terminated" if spot or behaviour == "terminate" else "stopped"
            self.going_off = self.later(after_s, self.end, towards, OWN_SHUTDOWN)

    def interrupt(self, notice_s: float) -> None:
        if self.instance.lifecycle != "spot" or self.state not in {"pending", "running"}:
            raise ValueError("only a running spot instance can be interrupted")
        self.interruption = time.time() + notice_s
        self.later(notice_s, self.end, "terminated", SPOT_TERMINATION)

    def output(self) -> bytes:
        return self.console.read_bytes()[-CONSOLE_BYTES:] if self.console.exists() else b""

    def describe(self) -> dict[str, Any]:
        """Its state for the control API."""
        return {
            "id": self.instance.id,
            "type": self.instance.instance_type,
            "region": self.instance.region_name,
            "zone": self.instance.availability_zone,
            "state": self.state,
            "folder": str(self.folder),
            "exit": int(self.exit_file.read_text()) if self.exit_file.exists() else None,
            "console": self.output().decode(errors="replace"),
            "interruption": self.interruption,
        }

    def metadata(self, method: str, path: str, environ: dict[str, Any]) -> Response:
        """The instance metadata service, both versions."""
        if method == "POST" and path == "shutdown":
            self.switch_off(float(parse_qs(environ.get("QUERY_STRING", ""))["after_s"][0]))
            return _text("")
        if method == "PUT" and path == "latest/api/token":
            self.tokens.add(token := os.urandom(24).hex())
            return _text(token)
        given = environ.get("HTTP_X_AWS_EC2_METADATA_TOKEN")
        required = self.instance.metadata_options.http_tokens == "required"
        if (given or required) and given not in self.tokens:
            return _text("Unauthorized", 401)
        values = self._metadata()
        return _text(values[path]) if path in values else _text("Not Found", 404)

    def _metadata(self) -> dict[str, str]:
        instance, prefix = self.instance, "latest/meta-data"
        values = {
            f"{prefix}/instance-id": str(instance.id),
            f"{prefix}/instance-type": str(instance.instance_type),
            f"{prefix}/placement/availability-zone": str(instance.availability_zone),
        }
        if self.interruption is not None:
            at = datetime.fromtimestamp(self.interruption, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            values[f"{prefix}/spot/instance-action"] = json.dumps({"action": "terminate", "time": at})
        return values


class Fleet:
    """All machines, and how long their starts and ends take."""

    def __init__(self, home: Path, url: str) -> None:
        self.home, self.url = home / "instances", url
        self.lock = threading.RLock()
        self.machines: dict[str, Machine] = {}
        self.usual_times()

    def usual_times(self) -> None:
        self.boot_s, self.shutdown_s, self.grace_s = 0.2, 0.1, 1.0

    def launched(self, instance: Instance, user_data: bytes) -> None:
        self.machines[str(instance.id)] = Machine(self, instance, user_data)

    def clear(self) -> None:
        """Remove all machines at once."""
        machines = list(self.machines.values())
        self.machines.clear()
        for machine in machines:
            for timer in machine.timers:
                timer.cancel()
            machine.set_state("terminated")
            machine.kill()
        shutil.rmtree(self.home, ignore_errors=True)


def _text(text: str, status: int = 200) -> Response:
    return Response(status, text.encode(), "text/plain")
