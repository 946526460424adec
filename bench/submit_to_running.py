"""How long from submit to `running`, beside the engine itself: a real server, one run after the other.

    python -m bench.submit_to_running [RUNS [ENGINE …]]

Engines: `hosts` (the default), `docker`, `slurm` and `dask`; `all` is each of them. The last three need root, Debian's
docker.io or Slurm, and start an engine of their own. What a run takes stands beside the same shell command given to the
engine itself: started directly, by `docker run`, `sbatch` or `client.submit`.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx

from standins import programs
from standins.dask import Dask
from standins.slurm import Slurm
from tests import containers
from tests.server import Server
from tests.support import eventually

Cluster = TypeVar("Cluster", Slurm, Dask)
COMMAND = "echo hello; sleep 0.3"


class Engine(NamedTuple):
    """`env` is the server's, `run` the keys of a run there; `bare` gives the command to the engine itself."""

    env: dict[str, str]
    set_up: Callable[[Server], None]
    run: dict[str, Any]
    bare: Callable[[], float]


def main(runs: int, engines: list[str]) -> None:
    print(
        f"{runs} runs, one after the other: {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, embedded default (SQLite, ORM broker)\n"
    )
    heads = ("submit → running", "→ first log line", "→ done", "the engine alone")
    print(f"{'ms, median (worst)':20}" + "".join(f"{head:>20}" for head in heads))
    for name in engines:
        with tempfile.TemporaryDirectory(prefix="dw-bench-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            home = Path(folder)
            home.chmod(0o755)
            with ENGINES[name](home) as engine:
                measured, bare = measure(home, engine, runs)
        columns = [*map(list, zip(*measured, strict=True)), bare]
        print(f"{name:20}" + "".join(f"{middle_and_worst(values):>20}" for values in columns), flush=True)


def measure(home: Path, engine: Engine, runs: int) -> tuple[list[tuple[float, float, float]], list[float]]:
    """The times of runs through a server, and those of the engine alone."""
    (home / "server").mkdir(mode=0o755)
    with Server(home / "server", **engine.env) as server:
        engine.set_up(server)
        one_run(server, "warm-up", engine.run)
        measured = [one_run(server, f"bench-{index}", engine.run) for index in range(runs)]
    engine.bare()
    return measured, [engine.bare() for _ in range(runs)]


@contextmanager
def on_hosts(home: Path) -> Iterator[Engine]:
    yield Engine({}, lambda server: None, {}, lambda: first_line("/bin/sh", "-c", COMMAND))


@contextmanager
def on_docker(home: Path) -> Iterator[Engine]:
    with containers.docker() as docker:
        program, image = docker.engine.program, containers.IMAGE
        words = ("-H", docker.socket, "run", "--rm", "--network=host", "--entrypoint=/bin/sh", image, "-c", COMMAND)
        env = {"DSTACKWEB_ENGINE": "docker", "DOCKER_HOST": docker.socket}
        yield Engine(env, lambda server: None, {"image": image}, lambda: first_line(program, *words))


@contextmanager
def on_slurm(home: Path) -> Iterator[Engine]:
    with started(Slurm(home / "slurm")) as slurm:
        config = {"partitions": ["main"]}
        yield Engine(slurm.env, lambda server: add(server, "slurm", config), CLUSTER, lambda: by_sbatch(slurm))


@contextmanager
def on_dask(home: Path) -> Iterator[Engine]:
    from distributed import Client

    with started(Dask(home / "dask")) as dask, Client(dask.address, set_as_default=False) as client:
        config = {"scheduler": dask.address}
        yield Engine({}, lambda server: add(server, "dask", config), CLUSTER, lambda: by_submit(dask, client))


@contextmanager
def started(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster that is stopped in the end, also if it did not start as a whole."""
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


CLUSTER = {"backends": ["cluster"], "resources": {"cpu": "1..", "memory": "500MB.."}}
ENGINES = {"hosts": on_hosts, "docker": on_docker, "slurm": on_slurm, "dask": on_dask}


def add(server: Server, kind: str, config: dict[str, Any]) -> None:
    """Set the cluster up as a backend, and wait for its offers."""
    answer = server.http.put("/backends/cluster", json={"type": kind, "config": {"projects": ["main"], **config}})
    assert answer.is_success, answer.text
    eventually(lambda: server.api("GET", "offers", params={"backend": "cluster"}).json()["items"])


def by_sbatch(slurm: Slurm) -> float:
    """Milliseconds until the command has printed its line, as a batch job."""
    began = time.perf_counter()
    output = slurm.folder / f"bare-{began}"
    slurm.command("sbatch", f"--output={output}", "--wrap", COMMAND)
    eventually(lambda: output.exists() and output.read_text(), every=0.01)
    return (time.perf_counter() - began) * 1000


def by_submit(dask: Dask, client: Any) -> float:
    """Milliseconds until the command has printed its line, as a task of a client that is connected."""
    output = dask.folder / f"bare-{time.perf_counter()}"
    began = time.perf_counter()
    task = client.submit(subprocess.run, f"({COMMAND}) > {output}", shell=True, pure=False)
    eventually(lambda: output.exists() and output.read_text(), every=0.01)
    took = (time.perf_counter() - began) * 1000
    task.result()
    return took


def one_run(server: Server, name: str, where: dict[str, Any]) -> tuple[float, float, float]:
    """Milliseconds from the submit request to running (by the server's clock), a readable line, and done."""
    began = time.time()
    server.api("POST", "runs", json={"config": {"type": "task", "name": name, "commands": [COMMAND], **where}})
    line_at = 0.0
    while True:
        if not line_at and b"hello" in server.api("GET", f"runs/{name}/logs").content:
            line_at = time.time()
        run = server.api("GET", f"runs/{name}").json()
        if run["status"] in ("done", "failed", "terminated"):
            break
        time.sleep(0.02)
    assert run["status"] == "done", run
    line_at = line_at or time.time()
    started = dt.datetime.fromisoformat(run["started_at"]).timestamp()
    ended = dt.datetime.fromisoformat(run["ended_at"]).timestamp()
    return (started - began) * 1000, (line_at - began) * 1000, (ended - began) * 1000


def first_line(*argv: str) -> float:
    """Milliseconds until a command has printed its first line."""
    began = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        return (time.perf_counter() - began) * 1000


def middle_and_worst(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({max(values):.0f})"


if __name__ == "__main__":
    names = sys.argv[2:] or ["hosts"]
    names = list(ENGINES) if names == ["all"] else names
    engines = [name for name in names if name in programs.NEEDS]
    programs.exit_without("bench.submit_to_running", *engines, *(["root"] if engines else []))
    try:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, names)
    except httpx.HTTPError as error:
        sys.exit(f"the server did not answer: {error}")
