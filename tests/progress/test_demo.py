"""`make demo-progress`, as somebody who wants to see bars move without having tasks would run it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import REPO, deployment_env, eventually

pytestmark = pytest.mark.nightly


def test_the_demo_shows_tasks_of_all_kinds_that_move_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    env = deployment_env(
        tmp_path / "home", DSTACKWEB_ADMIN_TOKEN="dw_admin-of-the-demo-1", HOME=str(tmp_path), DSTACKWEB_SHARED_UID="1"
    )
    output = tmp_path / "output"
    with output.open("wb") as file:
        demo = subprocess.Popen(
            [sys.executable, "tools/demo_progress.py"], cwd=REPO, env=env, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        eventually(lambda: "Demo tasks" in output.read_text(), deadline=90)
        asked = httpx.Client(
            base_url=f"http://127.0.0.1:{env['DSTACKWEB_PORT']}/api/v1/projects/main/runs/demo-sweep",
            headers={"Authorization": "Bearer dw_admin-of-the-demo-1"},
            timeout=30,
        )

        def total() -> dict[str, Any]:
            answer = asked.get("/progress")
            found: dict[str, Any] = answer.json()["total"] if answer.status_code == 200 else {"groups": 0}
            return found

        eventually(lambda: total()["groups"] == 48_000, deadline=90)
        before = total()
        eventually(lambda: total()["finished"] > before["finished"] + 500, deadline=60)
        eventually(lambda: total()["states"]["no_worker"] > 0, deadline=60)
        assert total()["total"] == before["total"]
        assert not [line for line in output.read_text().splitlines() if "can't" in line]
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
