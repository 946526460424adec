"""Runs on a real Ray cluster of one node, through a real server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from standins.ray import Ray
from tests.backends.ray.way import Way
from tests.server import Server
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("ray")]

SHORT = {
    "DSTACKWEB_HEARTBEAT_S": "0.5",
    "DSTACKWEB_WATCH_EVERY_S": "0.3",
    "DSTACKWEB_PASS_EVERY_S": "0.5",
    "DSTACKWEB_LOST_AFTER_S": "4",
}
ON_RAY: dict[str, Any] = {"backends": ["cluster"], "resources": {"cpu": "1..", "memory": "500MB.."}}


@pytest.fixture(scope="module")
def server(ray: Ray) -> Iterator[Server]:
    """A server whose backend `cluster` is the Ray cluster."""
    with tempfile.TemporaryDirectory(prefix="dw-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        server = Server(Path(folder), **SHORT)
        server.env["DSTACKWEB_PUBLIC_URL"] = server.url
        with server:
            (server.home / "shared").mkdir()
            (server.home / "shared").chmod(0o777)
            add(server, "cluster", ray.address)
            yield server


def add(server: Server, name: str, address: str) -> None:
    config = {"projects": ["main"], "address": address}
    answer = server.http.put(f"/backends/{name}", json={"type": "ray", "config": config})
    assert answer.is_success, answer.text
    eventually(lambda: server.api("GET", "offers", params={"backend": name}).json()["items"])


def jobs(ray: Ray) -> dict[str, str]:
    """The jobs that have not ended: their statuses by name."""
    found = httpx.get(f"{ray.address}/api/jobs/").json()
    return {job["submission_id"]: job["status"] for job in found if not job["end_time"]}


def test_a_run_is_queued_done_and_leaves_nothing(server: Server, ray: Ray) -> None:
    name = server.submit("pwd; echo gpus=${CUDA_VISIBLE_DEVICES-none}", name="first", **ON_RAY)
    run = server.wait(name)
    assert (run["status"], run["exit_code"]) == ("done", 0), run
    assert run["jobs"][0]["backend"] == "cluster"
    folder, gpus = server.log(name).decode().splitlines()[-2:]
    assert gpus == "gpus="
    eventually(lambda: jobs(ray) == {})
    assert not Path(folder).exists()
    logs = "".join(path.read_text(errors="replace") for path in ray.folder.glob("session_latest/logs/**/*.log"))
    assert "JOIN_TOKEN" not in logs, "other users may read Ray's logs"


def test_a_stopped_run_gets_sigterm_and_its_grace(server: Server, ray: Ray) -> None:
    name = server.submit(
        "trap 'sleep 1; echo saved; exit 3' TERM", "echo up", "while :; do sleep 0.1 || true; done", **ON_RAY
    )
    eventually(lambda: b"up" in server.log(name))
    server.api("POST", f"runs/{name}/stop")
    assert server.wait(name)["status"] == "terminated"
    assert b"saved" in server.log(name)
    eventually(lambda: jobs(ray) == {})


def test_workers_killed_between_submit_and_note_leave_one_job_per_run(server: Server, ray: Ray) -> None:
    way, file = Way(ray.address), server.home / "shared" / "by-killed-workers"
    add(server, "way", way.url)
    before = len(way.jobs())
    with way.gate.closed() as has_submitted:
        asked = ON_RAY | {"backends": ["way"]}
        names = [server.submit(f"echo $DSTACK_RUN_NAME >> {file}", **asked) for _ in range(3)]
        assert has_submitted.wait(60)
        server.kill_workers()
    server.wait_done_once(names, file)
    assert len(way.jobs()) - before == 3
    way.close()


def test_a_run_goes_on_when_its_cluster_dies_and_is_executed_once(server: Server, ray: Ray) -> None:
    file, enough = (server.home / "shared" / name for name in ("attempts", "enough"))
    name = server.submit(
        f"echo $$ >> {file}", "echo up", f"while [ ! -e {enough} ]; do sleep 0.1; done", "echo ended",
        **ON_RAY | {"retry": {"on_events": ["interruption"]}},
    )  # fmt: skip
    eventually(lambda: b"up" in server.log(name))
    ray.crash()
    ray.start()
    enough.touch()
    run = server.wait(name, deadline=120)
    assert (run["status"], run["attempt"]) == ("done", 1), run
    assert server.log(name).endswith(b"up\nended\n")
    [pid] = file.read_text().split()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    eventually(lambda: jobs(ray) == {})
