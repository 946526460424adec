"""`make demo-cloud`, as somebody who wants to see the pages about clouds would run it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support import REPO, deployment_env, eventually

pytestmark = pytest.mark.nightly


def test_the_demo_has_offers_of_its_cloud_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    env = deployment_env(tmp_path / "home", DSTACKWEB_ADMIN_TOKEN="dw_admin-of-the-demo-1", HOME=str(tmp_path))
    output = tmp_path / "output"
    with output.open("wb") as file:
        demo = subprocess.Popen(
            [sys.executable, "tools/demo_cloud.py"], cwd=REPO, env=env, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        eventually(lambda: "Demo cloud" in output.read_text(), deadline=90)
        url = f"http://127.0.0.1:{env['DSTACKWEB_PORT']}/api/v1/projects/main/offers"

        def availabilities() -> set[str]:
            params = {"gpu": "1..", "backend": "aws", "limit": 500}
            answer = httpx.get(url, params=params, headers={"Authorization": "Bearer dw_admin-of-the-demo-1"})
            return {offer["availability"] for offer in answer.json()["items"]}

        eventually(lambda: {"available", "no_quota"} <= availabilities(), deadline=60)
    finally:
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0, output.read_text()
    mark = f"DSTACKWEB_HOME={tmp_path}/home".encode()
    eventually(lambda: not [pid for pid in _processes() if mark in _environ(pid)])


def _processes() -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environ(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
