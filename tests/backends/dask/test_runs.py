"""Runs on a real Dask cluster of two workers, through a real server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Future

from standins.dask import WORKERS, Dask
from tests.backends.dask.relay import Relay
from tests.backends.in_order import start_in_order
from tests.server import Server
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("dask")]

SHORT = {
    "DSTACKWEB_HEARTBEAT_S": "0.5",
    "DSTACKWEB_WATCH_EVERY_S": "0.3",
    "DSTACKWEB_PASS_EVERY_S": "0.5",
    "DSTACKWEB_LOST_AFTER_S": "4",
}
ASKS: dict[str, Any] = {"backends": ["cluster"], "resources": {"cpu": "1..", "memory": "500MB.."}}
RETRIED: dict[str, Any] = {"retry": {"on_events": ["interruption"]}, "stop_duration": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="dask-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        home.chmod(0o755)
        (home / "shared").mkdir()
        (home / "shared").chmod(0o777)
        server = Server(home, **SHORT)
        server.env["DSTACKWEB_PUBLIC_URL"] = server.url
        with server:
            yield server


@pytest.fixture(scope="module")
def site(server: Server, dask: Dask) -> tuple[Server, Dask]:
    """A server whose backend `cluster` is a Dask cluster of its own."""
    add(server, "cluster", {"scheduler": dask.address, "gpus": ["GPU=A100:80GB"]})
    return server, dask


def add(server: Server, name: str, config: dict[str, Any]) -> None:
    answer = server.http.put(f"/backends/{name}", json={"type": "dask", "config": {"projects": ["main"], **config}})
    assert answer.is_success, answer.text
    eventually(lambda: server.api("GET", "offers", params={"backend": name}).json()["items"])


def ours(dask: Dask) -> list[str]:
    """Keys of instances that the scheduler knows as tasks."""
    with Client(dask.address, set_as_default=False) as client:
        keys = client.run_on_scheduler(lambda dask_scheduler: list(map(str, dask_scheduler.tasks)))
        return [key for key in keys if key.startswith("dstackweb-")]


def tasks_begun(dask: Dask) -> int:
    """How many of ours the scheduler has ever given to a worker."""
    with Client(dask.address, set_as_default=False) as client:
        counts = client.run_on_scheduler(
            lambda dask_scheduler: {name: dict(of.state_counts) for name, of in dask_scheduler.task_prefixes.items()}
        )
    return int(counts.get("dstackweb", {}).get("processing", 0))


def begun(server: Server, **keys: Any) -> tuple[str, Path]:
    """A run whose first attempt goes on, and whose second one is done at once; and the file with its attempts."""
    file = server.home / "shared" / f"attempts-{len(list((server.home / 'shared').iterdir()))}"
    name = server.submit(
        f"echo $$ >> {file}",
        f"if [ $(wc -l < {file}) -gt 1 ]; then echo again; exit 0; fi",
        "echo up",
        "while :; do sleep 0.1; done",
        **ASKS | keys,
    )
    eventually(lambda: b"up" in server.log(name, attempt=1))
    return name, file


def is_alive(pid: str) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def test_a_run_is_done_and_leaves_nothing(site: tuple[Server, Dask]) -> None:
    server, dask = site
    name = server.submit("pwd", name="first", **ASKS)
    run = server.wait(name)
    assert (run["status"], run["exit_code"]) == ("done", 0), run
    assert run["jobs"][0]["backend"] == "cluster"
    folder = server.log(name).decode().splitlines()[-1]
    eventually(lambda: ours(dask) == [])
    assert not Path(folder).exists()


def test_a_stopped_run_gets_sigterm_and_its_grace(site: tuple[Server, Dask]) -> None:
    server, dask = site
    name = server.submit("trap 'echo saved; exit 3' TERM", "echo up", "while :; do sleep 0.1 || true; done", **ASKS)
    eventually(lambda: b"up" in server.log(name))
    server.api("POST", f"runs/{name}/stop")
    assert server.wait(name)["status"] == "terminated"
    assert b"saved" in server.log(name)
    eventually(lambda: ours(dask) == [])


def test_gpus_are_resources_of_workers(site: tuple[Server, Dask]) -> None:
    server, _dask = site
    [offer] = server.api("GET", "offers", params={"backend": "cluster", "gpu": "A100:2"}).json()["items"]
    assert (offer["instance_type"], offer["region"], offer["gpu_count"]) == ("gpu:GPU", "cluster", 2)
    assert (offer["availability"], float(offer["price"])) == ("available", 0)
    assert (offer["detail"]["free"], offer["detail"]["fits"]) == (2, 1)
    assert server.api("GET", "offers", params={"backend": "cluster", "gpu": "A100:3"}).json()["items"] == []


def test_24_runs_start_in_the_queues_order(site: tuple[Server, Dask]) -> None:
    server, dask = site
    eventually(lambda: ours(dask) == [])
    before = tasks_begun(dask)
    folder = server.home / "shared" / "in-order"
    folder.mkdir()
    folder.chmod(0o777)
    start_in_order(server, folder, **ASKS | {"resources": {"cpu": "1..", "memory": "100MB.."}})
    assert tasks_begun(dask) - before == 25


def test_a_run_that_a_stranger_cancels_ends_with_its_processes(site: tuple[Server, Dask]) -> None:
    server, dask = site
    name, file = begun(server)
    # Those of runs that have just ended may still be there.
    [key] = eventually(lambda: keys if len(keys := ours(dask)) == 1 else None)
    with Client(dask.address, set_as_default=False) as client:
        Future(key, client).cancel(force=True)
    run = server.wait(name)
    assert (run["status"], run["attempt"]) == ("failed", 1), run
    assert not is_alive(file.read_text().strip())


def test_a_run_whose_worker_is_killed_is_interrupted_and_retried_elsewhere(site: tuple[Server, Dask]) -> None:
    server, dask = site
    name, file = begun(server, **RETRIED)
    [pid] = file.read_text().split()
    worker = next(worker for worker in WORKERS if dask.pids[worker] in parents(int(pid)))
    dask.kill(worker)
    server.hurry_retry(name)
    run = server.wait(name)
    assert (run["status"], run["attempt"]) == ("done", 2), run
    assert server.log(name, attempt=2) == b"again\n"
    assert not is_alive(pid)
    dask.start_worker(worker)
    dask.wait()


def parents(pid: int) -> list[int]:
    """The process, its parent, and so on."""
    found = []
    while pid > 1:
        found.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def test_a_run_whose_scheduler_is_killed_is_retried_when_it_is_back(site: tuple[Server, Dask]) -> None:
    server, dask = site
    name, file = begun(server, **RETRIED)
    dask.kill("scheduler")
    for worker in WORKERS:
        dask.wait_ended(worker)
    dask.start()
    server.hurry_retry(name)
    run = server.wait(name, deadline=90)
    assert (run["status"], run["attempt"]) == ("done", 2), run
    pids = file.read_text().split()
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_workers_killed_between_order_and_note_leave_one_task_per_run(site: tuple[Server, Dask]) -> None:
    server, dask = site
    relay, file = Relay(dask.port), server.home / "shared" / "by-killed-workers"
    add(server, "relayed", {"scheduler": f"tcp://127.0.0.1:{relay.port}"})
    before = tasks_begun(dask)
    with relay.gate.closed() as has_ordered:
        asked = ASKS | {"backends": ["relayed"]}
        names = [server.submit(f"echo $DSTACK_RUN_NAME >> {file}", **asked) for _ in range(3)]
        assert has_ordered.wait(60)
        server.kill_workers()
    server.wait_done_once(names, file)
    assert tasks_begun(dask) - before == 3
    relay.close()


def test_a_cluster_with_tls_needs_its_certificates(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    dask = Dask(tmp_path_factory.mktemp("tls"), tls=True)
    try:
        dask.start()
        texts = {f"tls_{name}": (dask.folder / f"{name}.pem").read_text() for name in ("ca", "cert", "key")}
        config = {"projects": ["main"], "scheduler": dask.address}
        answer = server.http.put("/backends/secure", json={"type": "dask", "config": config})
        assert (answer.status_code, answer.json()["errors"][0]["loc"][-1]) == (422, "tls_ca"), answer.text
        add(server, "secure", {"scheduler": dask.address, **texts})
        assert "PRIVATE KEY" not in server.http.get("/backends/secure").text
        name = server.submit("echo safe", **ASKS | {"backends": ["secure"]})
        assert server.wait(name)["status"] == "done"
    finally:
        dask.stop()
    assert os.listdir(dask.folder)
