"""A small AWS on loopback that real boto3 talks to over HTTP: see README.md.

Here: its process, and the control API for tests and demos.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dstackweb.lib.process import die_with_parent

ACCESS_KEY = "TESTCLOUDACCESSKEY00"
SECRET_KEY = "the secret of a cloud on loopback"
REGION = "us-east-1"
REPO = Path(__file__).resolve().parents[2]
ANY = "*"


def env(url: str) -> dict[str, str]:
    """boto3's environment for the cloud at `url`."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Cloud:
    """`Cloud.start()` gives a running one; `stop()` ends it with all its machines."""

    def __init__(self, url: str, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.url, self.home, self.process = url, home, process
        self._clients: dict[tuple[str, str, int], Any] = {}

    @classmethod
    def start(cls, home: Path | None = None) -> Cloud:
        """Returns once it answers. Raises RuntimeError with its log after 60 s."""
        home = home or Path(tempfile.mkdtemp(prefix="cloud-", dir=os.environ.get("DSTACKWEB_TEST_HOME")))
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o711)  # jobs on its machines run as another user
        log, address = home / "cloud.log", home / "address"
        address.unlink(missing_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))}
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "standins.aws", "--home", str(home)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=REPO, env=clean, preexec_fn=die_with_parent,
                start_new_session=True,  # Ctrl-C is for its user, who ends it last
            )  # fmt: skip
        ends = time.monotonic() + 60
        while time.monotonic() < ends and process.poll() is None:
            if address.exists():
                cloud = cls(address.read_text(), home, process)
                atexit.register(cloud.stop)
                return cloud
            time.sleep(0.02)  # its log is its only output, so that its start shows in a file
        process.kill()
        raise RuntimeError(f"the cloud does not start:\n{log.read_text()}")

    def stop(self) -> None:
        """End it and its machines, and delete its folder."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=20)
        shutil.rmtree(self.home, ignore_errors=True)
        atexit.unregister(self.stop)

    @property
    def env(self) -> dict[str, str]:
        return env(self.url)

    def client(self, service: str, region: str = REGION, attempts: int = 1) -> Any:
        """A boto3 client, made once; by default without retries."""
        import boto3
        from botocore.config import Config

        key = (service, region, attempts)
        if key not in self._clients:
            self._clients[key] = boto3.client(
                service, region_name=region, endpoint_url=self.url, aws_access_key_id=ACCESS_KEY,
                aws_secret_access_key=SECRET_KEY, config=Config(retries={"total_max_attempts": attempts}),
            )  # fmt: skip
        return self._clients[key]

    def ask(self, what: str, **more: Any) -> Any:
        """The control API: `POST /_control/WHAT` with JSON."""
        request = urllib.request.Request(f"{self.url}/_control/{what}", json.dumps(more).encode(), method="POST")
        with _open(request) as answer:
            return json.load(answer)["answer"]

    # Rules for calls. `service` is the signing name: ec2, servicequotas, pricing, sts, ssm.

    def throttle(
        self, service: str = ANY, action: str = ANY, region: str = ANY, *, rate: float = 0, burst: float = 0
    ) -> None:
        """Allow `rate` calls a second and `burst` at once for each action and region; throttle the others."""
        self._rule("throttle", service, action, region, rate=rate, burst=burst)

    def unthrottle(self, service: str = ANY, action: str = ANY, region: str = ANY) -> None:
        self._lift("throttle", service, action, region)

    def deny(self, service: str, action: str = ANY, region: str = ANY) -> None:
        self._rule("deny", service, action, region)

    def allow(self, service: str = ANY, action: str = ANY, region: str = ANY) -> None:
        """Remove denials."""
        self._lift("deny", service, action, region)

    def fail(
        self, service: str, action: str = ANY, region: str = ANY, *, code: str = "InternalError",
        message: str = "An internal error has occurred", status: int = 500, times: int | None = None,
    ) -> None:  # fmt: skip
        """Any other error, for the next `times` calls; None: for all."""
        self._rule("fail", service, action, region, code=code, message=message, status=status, times=times)

    def answer(
        self, service: str, action: str = ANY, region: str = ANY, *, bodies: Sequence[str], status: int = 200,
        charset: str = "utf-8", times: int | None = None,
    ) -> None:  # fmt: skip
        """Raw bodies in turn, for the next `times` calls; None: for all. `{n}` in a body is the answer's number."""
        self._rule("answer", service, action, region, bodies=bodies, status=status, charset=charset, times=times)

    def answer_as_usual(self, service: str = ANY, action: str = ANY, region: str = ANY) -> None:
        self._lift("answer", service, action, region)

    def latency(self, seconds: float, service: str = ANY, action: str = ANY, region: str = ANY) -> None:
        self._rule("latency", service, action, region, seconds=seconds)

    def _rule(self, kind: str, service: str, action: str, region: str, **value: Any) -> None:
        self.ask("rule", kind=kind, service=service, action=action, region=region, **value)

    def _lift(self, kind: str, service: str, action: str, region: str) -> None:
        self.ask("lift", kind=kind, service=service, action=action, region=region)

    def credentials(self, keys: dict[str, str]) -> None:
        """Set the valid access keys, with their secrets."""
        self.ask("credentials", keys=keys)

    def region(self, name: str, *, enabled: bool) -> None:
        self.ask("region", name=name, enabled=enabled)

    def quota(self, code: str, value: float, region: str = ANY) -> None:
        self.ask("quota", code=code, value=value, region=region)

    def usage(self, region: str = REGION) -> dict[str, int]:
        """vCPUs in use by quota code."""
        return dict(self.ask("usage", region=region))

    def capacity(self, left: int | None, instance_type: str = ANY, zone: str = ANY, market: str = ANY) -> None:
        """How many more instances start; None: any number. `market` is `spot` or `on-demand`."""
        self.ask("capacity", instance_type=instance_type, zone=zone, market=market, left=left)

    def spot_price(self, instance_type: str, price: float, zone: str = ANY) -> None:
        """The spot price from now on."""
        self.ask("spot_price", instance_type=instance_type, zone=zone, price=price)

    def catalog(self, *, everything: bool) -> int:
        """Offer all of moto's instance types or the usual subset; returns their number."""
        return int(self.ask("catalog", everything=everything))

    def image(self, region: str = REGION) -> str:
        """An image to start instances from."""
        return str(self.ask("image", region=region))

    def times(
        self, *, boot_s: float | None = None, shutdown_s: float | None = None, grace_s: float | None = None
    ) -> None:
        """How long starting and ending take, and how long processes have from SIGTERM to SIGKILL."""
        self.ask("times", boot_s=boot_s, shutdown_s=shutdown_s, grace_s=grace_s)

    def interrupt(self, instance_id: str, notice_s: float = 120) -> None:
        """Interrupt a spot instance `notice_s` after its notice."""
        self.ask("interrupt", instance_id=instance_id, notice_s=notice_s)

    def crash(self, instance_id: str) -> None:
        """Kill all its processes; the instance stays running, and costs."""
        self.ask("crash", instance_id=instance_id)

    def machines(self) -> list[dict[str, Any]]:
        """All instances ever, each with state, folder, console and the exit status of its user data."""
        return list(self.ask("machines"))

    def machine(self, instance_id: str) -> dict[str, Any]:
        return next(machine for machine in self.machines() if machine["id"] == instance_id)

    def calls(self, service: str = ANY, action: str = ANY, region: str = ANY, since: float = 0) -> list[dict[str, Any]]:
        """The calls in order: at, ms, service, action, region, status, code (empty on success)."""
        return list(self.ask("calls", service=service, action=action, region=region, since=since))

    def count(self, service: str = ANY, action: str = ANY, region: str = ANY, since: float = 0) -> int:
        return len(self.calls(service, action, region, since))

    def forget_calls(self) -> None:
        self.ask("forget_calls")

    def reset(self) -> None:
        """Remove machines, rules and counted calls."""
        self.ask("reset")


_open = partial(urllib.request.build_opener(urllib.request.ProxyHandler({})).open, timeout=30)
