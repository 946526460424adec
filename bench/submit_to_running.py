"""How long from submit to `running`, and from a printed line to a reader: a real server, one run after the other.

    python bench/submit_to_running.py [RUNS [slurm|dask]]

The floor is the same shell command started directly, without a scheduler. With `slurm` (as root, with Debian's Slurm)
runs go to a Slurm of two nodes on this machine, and the floor is its own `sbatch`; with `dask` to a Dask cluster of two
workers, and the floor is its own `client.submit`.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dstackweb.devtools.dask import Dask  # noqa: E402
from dstackweb.devtools.slurm import Slurm  # noqa: E402
from tests.server import Server  # noqa: E402
from tests.support import eventually  # noqa: E402


def main(runs: int, engine: str) -> None:
    home = Path(tempfile.mkdtemp(prefix="dw-bench-", dir="/tmp"))
    home.chmod(0o755)
    slurm = Slurm(home / "slurm").start() if engine == "slurm" else None
    dask = Dask(home / "dask").start() if engine == "dask" else None
    try:
        with Server(home, **(slurm.env if slurm else {})) as server:
            where = on_slurm(server) if slurm else on_dask(server, dask) if dask else {}
            one_run(server, "warm-up", where)
            measured = [one_run(server, f"bench-{index}", where) for index in range(runs)]
        direct = [by_sbatch(slurm) if slurm else by_submit(dask) if dask else floor() for _ in range(runs)]
    finally:
        if slurm:
            slurm.stop()
        if dask:
            dask.stop()
    print(
        f"\n{runs} runs, one after the other, idle machine: {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, embedded default (SQLite, ORM broker)\n"
    )
    print(f"{'':34}{'median':>9}{'p90':>9}{'worst':>9}  ms")
    line("submit → running", [m[0] for m in measured])
    line("submit → first log line readable", [m[1] for m in measured])
    line("submit → done", [m[2] for m in measured])
    floors = {"slurm": "floor: sbatch to the first line", "dask": "floor: submit to the first line"}
    line(floors.get(engine, "floor: the command started directly"), direct)


def on_slurm(server: Server) -> dict[str, Any]:
    """Set the cluster up as a backend; the keys of a run there."""
    return on_cluster(server, "slurm", {"partitions": ["main"]})


def on_dask(server: Server, dask: Dask) -> dict[str, Any]:
    """The same for a Dask cluster."""
    return on_cluster(server, "dask", {"scheduler": dask.address})


def on_cluster(server: Server, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a run on a new backend of this kind, once it has offers."""
    answer = server.http.put("/backends/cluster", json={"type": kind, "config": {"projects": ["main"], **config}})
    assert answer.is_success, answer.text
    eventually(lambda: server.api("GET", "offers", params={"backend": "cluster"}).json()["items"])
    return {"backends": ["cluster"], "resources": {"cpu": "1..", "memory": "500MB.."}}


def by_sbatch(slurm: Slurm) -> float:
    """Milliseconds until the command has printed its line, as a batch job."""
    began = time.perf_counter()
    output = slurm.folder / f"bare-{began}"
    slurm.command("sbatch", f"--output={output}", "--wrap", "echo hello; sleep 0.3")
    eventually(lambda: output.exists() and output.read_text(), every=0.01)
    return (time.perf_counter() - began) * 1000


def by_submit(dask: Dask) -> float:
    """Milliseconds until the command has printed its line, as a task of a client that is connected."""
    from distributed import Client

    output = dask.folder / f"bare-{time.perf_counter()}"
    with Client(dask.address, set_as_default=False) as client:
        began = time.perf_counter()
        task = client.submit(subprocess.run, f"echo hello > {output}; sleep 0.3", shell=True, pure=False)
        eventually(lambda: output.exists() and output.read_text(), every=0.01)
        took = (time.perf_counter() - began) * 1000
        task.result()
        return took


def one_run(server: Server, name: str, where: dict[str, Any]) -> tuple[float, float, float]:
    """Milliseconds from the submit request to running (by the server's clock), a readable line, and done."""
    began = time.time()
    server.api(
        "POST", "runs", json={"config": {"type": "task", "name": name, "commands": ["echo hello; sleep 0.3"], **where}}
    )
    line_at = 0.0
    while True:
        if not line_at and server.api("GET", f"runs/{name}/logs").content:
            line_at = time.time()
        run = server.api("GET", f"runs/{name}").json()
        if run["status"] in ("done", "failed", "terminated"):
            break
        time.sleep(0.02)
    assert run["status"] == "done", run
    started = dt.datetime.fromisoformat(run["started_at"]).timestamp()
    ended = dt.datetime.fromisoformat(run["ended_at"]).timestamp()
    return (started - began) * 1000, (line_at - began) * 1000, (ended - began) * 1000


def floor() -> float:
    """Milliseconds until the same command has printed its line, started by hand."""
    began = time.perf_counter()
    with subprocess.Popen(["/bin/sh", "-c", "echo hello; sleep 0.3"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        return (time.perf_counter() - began) * 1000


def line(what: str, values: list[float]) -> None:
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))]
    print(f"{what:34}{statistics.median(values):9.0f}{p90:9.0f}{ordered[-1]:9.0f}")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, "".join(sys.argv[2:3]))
    except httpx.HTTPError as error:
        sys.exit(f"the server did not answer: {error}")
