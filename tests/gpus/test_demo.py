"""`make demo-gpus`, as somebody who wants to see the pages about GPUs without having one would run it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support import REPO, deployment_env, eventually

pytestmark = pytest.mark.nightly


def test_the_demo_shows_gpus_that_work_for_runs_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    env = deployment_env(
        tmp_path / "home", DSTACKWEB_ADMIN_TOKEN="dw_admin-of-the-demo-1", HOME=str(tmp_path), DSTACKWEB_SHARED_UID="1",
        DSTACKWEB_SAMPLE_EVERY_S="1",
    )  # fmt: skip
    output = tmp_path / "output"
    with output.open("wb") as file:
        demo = subprocess.Popen(
            [sys.executable, "tools/demo_gpus.py"], cwd=REPO, env=env, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        eventually(lambda: "Demo GPUs" in output.read_text(), deadline=90)
        url = f"http://127.0.0.1:{env['DSTACKWEB_PORT']}/api/v1"
        asked = httpx.Client(base_url=url, headers={"Authorization": "Bearer dw_admin-of-the-demo-1"})

        def works() -> bool:
            (host,) = asked.get("/hosts").json()["items"]
            assert len(host["gpus"]) == 8
            return any(
                gpu["run"] == "demo-train" and gpu["sample"] and gpu["sample"]["utilization"] > 60
                for gpu in host["gpus"]
            )

        eventually(works, deadline=60)
    finally:
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0, output.read_text()
    mark = str(tmp_path / "home").encode()
    eventually(lambda: not [pid for pid in _processes() if mark in _command(pid)])


def _processes() -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: str) -> bytes:
    """Its command line and environment."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
