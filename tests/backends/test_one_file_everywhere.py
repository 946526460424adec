"""One run file, unchanged, on own hosts, in a container, on Slurm and on Dask: its profile alone says where."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from standins.dask import Dask
from standins.nvml import FakeGpu, Nvml
from standins.slurm import Slurm
from tests import containers
from tests.server import Server
from tests.support import eventually

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.needs("root", "docker", "slurm"),
]

FILE = """
type: task
commands:
  - trap 'echo saved; exit 3' TERM
  - echo "in $(pwd) on $CUDA_VISIBLE_DEVICES"
  - echo "::task key=load-1 state=done"
  - echo up
  - while [ ! -e enough ]; do sleep 0.1 || true; done
  - echo ended
resources: {cpu: 1.., memory: 200MB.., gpu: A100:1}
"""
PROFILES: dict[str, dict[str, Any]] = {
    "own": {"backends": ["hosts"]},
    "contained": {"backends": ["hosts"], "image": containers.IMAGE, "pull_policy": "never"},
    "on-slurm": {"backends": ["batch"]},
    "on-dask": {"backends": ["workers"]},
}
BACKENDS = {"own": "hosts", "contained": "hosts", "on-slurm": "batch", "on-dask": "workers"}
GPUS = [FakeGpu(f"GPU-{number}", util=80, mem=1000) for number in range(2)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with two stand-in GPUs, Docker, and a cluster of Slurm and of Dask that see the same GPUs."""
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="dw-all-", dir="/tmp", ignore_cleanup_errors=True)
        )
        home = Path(folder)
        home.chmod(0o755)
        for name in ("nvml", "home"):
            (home / name).mkdir(mode=0o755)
        nvml = Nvml(home / "nvml")
        nvml.show(*GPUS)
        found = {"LD_LIBRARY_PATH": str(nvml.folder), "NVML_STUB": str(nvml.file)}
        docker = stack.enter_context(containers.docker())
        slurm = Slurm(home / "slurm", job_env=found)
        stack.callback(slurm.stop)
        slurm.start()
        dask = Dask(home / "dask", env=found)
        stack.callback(dask.stop)
        dask.start()
        server = Server(
            home / "home", DSTACKWEB_ENGINE="docker", DOCKER_HOST=docker.socket, DSTACKWEB_SAMPLE_EVERY_S="0.5",
            DSTACKWEB_PASS_EVERY_S="0.5", **slurm.env, **found,
        )  # fmt: skip
        server.env["DSTACKWEB_PUBLIC_URL"] = server.url
        stack.enter_context(server)
        add(server, "batch", "slurm", {"partitions": ["main"]})
        add(server, "workers", "dask", {"scheduler": dask.address, "gpus": ["GPU=A100:80GB"]})
        made = server.manage(
            "shell", "-c",
            "from dstackweb.profiles.models import Profile\n"
            f"for name, keys in {PROFILES!r}.items():\n"
            "    Profile.objects.create(name=name, settings=keys)\n",
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        yield server


def add(server: Server, name: str, kind: str, config: dict[str, Any]) -> None:
    answer = server.http.put(f"/backends/{name}", json={"type": kind, "config": {"projects": ["main"], **config}})
    assert answer.is_success, answer.text
    eventually(lambda: server.api("GET", "offers", params={"backend": name}).json()["items"])


def apply(server: Server, profile: str) -> str:
    """As `dstackweb apply -f FILE --profile PROFILE`."""
    body = {"config": FILE, "overrides": {"profile": profile}}
    return str(server.api("POST", "runs", json=body).json()["name"])


def each(runs: dict[str, str], check: Callable[[str, str], Any]) -> dict[str, Any]:
    """What `check` of a profile and its run returns, for each of them."""
    return {profile: check(profile, name) for profile, name in runs.items()}


def up_in(server: Server, name: str) -> tuple[Path, str]:
    """The directory and the GPU that a run says it has, once its commands are up."""
    eventually(lambda: b"up\n" in server.log(name))
    said = re.search(rb"^in (/\S+) on (GPU-\d)$", server.log(name), re.MULTILINE)
    assert said is not None, server.log(name)
    return Path(said[1].decode()), said[2].decode()


def test_one_file_runs_is_watched_and_stops_everywhere_by_its_profile_alone(server: Server) -> None:
    runs = {profile: apply(server, profile) for profile in PROFILES}
    said = each(runs, lambda _, name: up_in(server, name))

    def used(_: str, name: str) -> tuple[str, int | None, int]:
        """The GPU of the run, its utilization, and the tasks that are done."""
        [job] = server.api("GET", f"runs/{name}/metrics").json()["jobs"]
        [gpu] = job["gpus"]
        [prefix] = server.api("GET", f"runs/{name}/progress").json()["prefixes"]
        return gpu["uuid"], gpu["last"]["utilization"], prefix["states"]["memory"]

    seen = each(runs, lambda profile, name: eventually(lambda: used(profile, name)))
    assert seen == {profile: (gpu, 80, 1) for profile, (_, gpu) in said.items()}
    for folder, _ in said.values():
        (folder / "enough").touch()
    for profile, name in runs.items():
        run = server.wait(name)
        assert (run["status"], run["exit_code"]) == ("done", 0), run
        assert run["jobs"][0]["backend"] == BACKENDS[profile]
        assert server.log(name).endswith(b"up\nended\n")
        assert bool(run["jobs"][0].get("image_digest")) == (profile == "contained")

    stopped = {profile: apply(server, profile) for profile in PROFILES}
    each(stopped, lambda _, name: up_in(server, name))
    for name in stopped.values():
        server.api("POST", f"runs/{name}/stop")
    for name in stopped.values():
        run = server.wait(name)
        assert (run["status"], run["termination_reason"]) == ("terminated", "stopped_by_user"), run
        assert server.log(name).endswith(b"saved\n")


def test_a_killed_runner_ends_its_job_once_everywhere(server: Server) -> None:
    runs = {profile: apply(server, profile) for profile in PROFILES}
    for name in runs.values():
        folder, _ = up_in(server, name)
        [job] = server.run(name)["jobs"]
        os.kill(int((folder.parents[2] / "jobs" / job["id"] / "lock").read_text()), signal.SIGKILL)
    for name in runs.values():
        run = server.wait(name, deadline=90)
        assert (run["status"], run["jobs"][0]["termination_reason"]) == ("failed", "instance_unreachable"), run
        assert server.log(name).count(b"up\n") == 1
        assert server.processes_of(run) == []
