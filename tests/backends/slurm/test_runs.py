"""Runs on a real Slurm of two nodes, through a real server."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstackweb.runner import tree
from standins.programs import require
from standins.slurm import Slurm
from tests.backends.in_order import start_in_order
from tests.server import Server, kill
from tests.support import eventually

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("slurm")]

SHORT = {
    "DSTACKWEB_HEARTBEAT_S": "0.5",
    "DSTACKWEB_WATCH_EVERY_S": "0.3",
    "DSTACKWEB_PASS_EVERY_S": "0.5",
    "DSTACKWEB_LOST_AFTER_S": "4",
}
ASKS: dict[str, Any] = {"backends": ["cluster"], "resources": {"cpu": "1..", "memory": "500MB.."}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Slurm]]:
    """A server whose backend `cluster` is a Slurm of its own."""
    require("root", "slurm")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        home = Path(folder, "home")
        home.mkdir(mode=0o755)
        slurm = Slurm(Path(folder, "cluster"))
        make_slow_sbatch(home)
        server = Server(home, **SHORT, **slurm.env, PATH=f"{home / 'bin'}:{os.environ['PATH']}")
        server.env["DSTACKWEB_PUBLIC_URL"] = server.url
        try:
            slurm.start()
            with server:
                config = {"projects": ["main"], "partitions": ["main"]}
                answer = server.http.put("/backends/cluster", json={"type": "slurm", "config": config})
                assert answer.is_success, answer.text
                eventually(lambda: server.api("GET", "offers", params={"backend": "cluster"}).json()["items"])
                yield server, slurm
        finally:
            slurm.stop()


def make_slow_sbatch(home: Path) -> None:
    """An `sbatch` for the server that answers a second later while there is the file `slow`."""
    (home / "bin").mkdir(mode=0o755)
    sbatch = home / "bin/sbatch"
    sbatch.write_text(
        f'#!/bin/sh\n{shutil.which("sbatch")} "$@" || exit\n'
        f"if [ -e {home}/slow ]; then echo >> {home}/submitted; sleep 1; fi\n"
    )
    sbatch.chmod(0o755)


def shared(server: Server) -> Path:
    """A directory in which runs may write."""
    folder = server.home / "shared"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    return folder


def jobs(slurm: Slurm) -> list[str]:
    """States of Slurm's jobs that have not ended."""
    return slurm.command("squeue", "--noheader", "--format=%T").split()


def test_a_run_is_queued_done_and_leaves_nothing(site: tuple[Server, Slurm]) -> None:
    server, slurm = site
    name = server.submit("pwd", name="first", **ASKS)
    run = server.wait(name, deadline=60)
    assert (run["status"], run["exit_code"]) == ("done", 0), run
    assert run["jobs"][0]["backend"] == "cluster"
    folder = server.log(name).decode().splitlines()[-1]
    eventually(lambda: jobs(slurm) == [])
    assert not Path(folder).exists()


def test_a_stopped_run_gets_sigterm_and_its_grace(site: tuple[Server, Slurm]) -> None:
    server, slurm = site
    name = server.submit("trap 'echo saved; exit 3' TERM", "echo up", "while :; do sleep 0.1 || true; done", **ASKS)
    eventually(lambda: b"up" in server.log(name))
    server.api("POST", f"runs/{name}/stop")
    assert server.wait(name)["status"] == "terminated"
    assert b"saved" in server.log(name)
    eventually(lambda: jobs(slurm) == [])


def test_gpus_of_slurm_are_offered_and_free_ones_counted(site: tuple[Server, Slurm]) -> None:
    server, _slurm = site
    [offer] = server.api("GET", "offers", params={"backend": "cluster", "gpu": "A100:2"}).json()["items"]
    assert (offer["instance_type"], offer["region"], offer["gpu_count"]) == ("gpu:a100", "main", 2)
    assert (offer["availability"], float(offer["price"])) == ("available", 0)
    assert (offer["detail"]["free"], offer["detail"]["fits"]) == (2, 1)
    assert server.api("GET", "offers", params={"backend": "cluster", "gpu": "A100:3"}).json()["items"] == []


def test_a_run_that_does_not_fit_now_stays_in_our_queue(site: tuple[Server, Slurm]) -> None:
    server, slurm = site
    slurm.command(
        "sbatch", "--output=/dev/null", "--exclusive", "--nodes=2", "--wrap", "sleep 300", "--job-name=strangers"
    )
    eventually(lambda: jobs(slurm) == ["RUNNING"])
    eventually(lambda: _availability(server) == {"busy"})
    name = server.submit("echo at last", **ASKS)
    eventually(lambda: server.run(name)["reason"] == "waiting_for_capacity")
    assert jobs(slurm) == ["RUNNING"], "nothing waits in a second queue"
    slurm.command("scancel", "--name=strangers")
    assert server.wait(name, deadline=90)["status"] == "done"


def test_24_runs_start_in_the_queues_order_and_none_waits_in_slurm(site: tuple[Server, Slurm]) -> None:
    server, slurm = site
    eventually(lambda: jobs(slurm) == [])
    folder = shared(server) / "in-order"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    names = start_in_order(server, folder, **ASKS | {"resources": {"cpu": "1..", "memory": "100MB.."}})
    listed = slurm.command("squeue", "--noheader", "--states=all", "--format=%V %S %k").splitlines()
    waited = {
        line.rpartition("/")[2]: (
            dt.datetime.fromisoformat(began) - dt.datetime.fromisoformat(submitted)
        ).total_seconds()
        for line in listed
        for submitted, began, _comment in [line.split(" ", 2)]
        if line.rpartition("/")[2] in names
    }
    assert len(waited) == 25
    assert max(waited.values()) <= 2, "each was submitted when it could start"


def _availability(server: Server) -> set[str]:
    server.api("POST", "offers/refresh")
    items = server.api("GET", "offers", params={"backend": "cluster"}).json()["items"]
    return {item["availability"] for item in items}


RETRIED = {"retry": {"on_events": ["interruption"]}}


def begun(server: Server, **keys: Any) -> str:
    """A run whose first attempt goes on, and whose second one is done at once."""
    mark = shared(server) / f"begun-{len(list(shared(server).iterdir()))}"
    name = server.submit(
        f"if ! mkdir {mark} 2>/dev/null; then echo again; exit 0; fi",
        "echo up",
        "while :; do sleep 0.1; done",
        **ASKS | keys,
    )
    eventually(lambda: b"up" in server.log(name, attempt=1))
    return name


def test_a_preempted_job_is_an_interruption_and_its_run_is_retried(site: tuple[Server, Slurm]) -> None:
    server, slurm = site
    name = begun(server, **RETRIED)
    slurm.command("sbatch", "--output=/dev/null", "--partition=urgent", "--exclusive", "--nodes=2", "--wrap", "sleep 2")
    server.hurry_retry(name)
    run = server.wait(name, deadline=90)
    assert (run["status"], run["attempt"]) == ("done", 2), run
    assert server.log(name, attempt=2) == b"again\n"


def test_a_controller_that_forgets_a_start_executes_nothing_twice(site: tuple[Server, Slurm]) -> None:
    """Killed before it has saved its state, Slurm's controller starts a job once more."""
    server, slurm = site
    file = shared(server) / "executed"
    name = server.submit(f"echo once >> {file}", "echo up", "sleep 12", **ASKS)
    eventually(lambda: server.run(name)["status"] == "provisioning" and jobs(slurm) == ["RUNNING"])
    slurm.kill("slurmctld")
    slurm.start_controller()
    assert server.wait(name, deadline=90)["status"] in ("done", "failed")
    assert file.read_text() == "once\n"
    eventually(lambda: jobs(slurm) == [], deadline=180)  # Slurm asks a node again whether a job has ended


def test_workers_killed_between_submit_and_note_leave_one_job_per_run(site: tuple[Server, Slurm]) -> None:
    server, slurm = site
    eventually(lambda: jobs(slurm) == [])
    submitted, file = server.home / "submitted", shared(server) / "by-killed-workers"
    (server.home / "slow").touch()
    names = [server.submit(f"echo $DSTACK_RUN_NAME >> {file}; sleep 1", **ASKS) for _ in range(3)]
    for _ in range(2):
        before = submitted.read_bytes() if submitted.exists() else b""
        eventually(lambda before=before: submitted.exists() and submitted.read_bytes() > before)
        server.kill_workers()
    (server.home / "slow").unlink()
    server.wait_done_once(names, file)
    found = slurm.command("squeue", "--noheader", "--states=all", "--format=%k").splitlines()
    assert {name: sum(line.endswith(f"/{name}") for line in found) for name in names} == dict.fromkeys(names, 1)


def test_a_run_whose_node_fails_is_interrupted_and_retried_on_another(site: tuple[Server, Slurm]) -> None:
    server, slurm = site
    eventually(lambda: jobs(slurm) == [])
    name = begun(server, **RETRIED)
    job, node = slurm.command("squeue", "--noheader", "--states=RUNNING", "--format=%i %N").split()
    running = psutil.process_iter(["cmdline"])
    [step] = [one.pid for one in running if f"[{job}.batch]" in "".join(one.info["cmdline"] or ())]
    slurm.kill(node)
    kill(step, *tree.below({step}))

    def ended() -> bool:
        """Slurm may give the next attempt to the dead node too, before it knows."""
        server.hurry(name)
        return bool(server.run(name)["status"] in ("done", "failed", "terminated"))

    eventually(ended, deadline=180)
    run = server.run(name)
    assert (run["status"], run["attempt"] > 1) == ("done", True), run
    assert server.log(name, attempt=run["attempt"]) == b"again\n"
    slurm.start_node(node)
    eventually(lambda: set(slurm.command("sinfo", "-N", "-h", "-o", "%T").split()) == {"idle"})
