"""`manage.py host` as a real process on the test's own database."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from django.db import connection

from dstackweb.backends.models import Gpu, Host
from dstackweb.runner.machine import boot_id, probe
from dstackweb.scheduler.management.commands import host as host_command
from standins.nvml import FakeGpu, Nvml
from tests import factories
from tests.support import REPO, eventually, free_port

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., subprocess.Popen[bytes]]


def same_database() -> str:
    """DATABASE_URL of the database that this test sees."""
    name = connection.settings_dict["NAME"]
    if connection.vendor == "sqlite":
        return f"sqlite:///{name}"
    return f"{os.environ['DATABASE_URL'].rsplit('/', 1)[0]}/{name}"


@pytest.fixture
def start(open_home: Path) -> Iterator[Start]:
    """Starts host processes of a machine called `box`, and ends them."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str, **env: str) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                [sys.executable, str(REPO / "manage.py"), "host", *arguments],
                env={
                    **os.environ,
                    "DJANGO_SETTINGS_MODULE": "dstackweb.settings",
                    "DATABASE_URL": same_database(),
                    "DSTACKWEB_HOME": str(open_home),
                    "DSTACKWEB_HOST_NAME": "box",
                    "DSTACKWEB_PORT": str(free_port()),  # no other server is there
                    **env,
                },
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_machine_registers_sends_heartbeats_and_leaves_cleanly(start: Start, open_home: Path) -> None:
    process = start("--address", "10.1.2.3")
    eventually(lambda: Host.objects.get().heartbeats > 0)
    host = Host.objects.get()
    assert (host.name, host.address, host.cluster) == ("box", "10.1.2.3", "dstackweb-box")
    assert host.cpus > 0
    assert Path(host.runs_dir).is_dir()
    process.terminate()
    assert process.wait(30) == 0


@pytest.mark.slow
def test_gpus_and_strangers_on_them_are_registered(start: Start, tmp_path: Path) -> None:
    nvml = Nvml(tmp_path)
    nvml.show(FakeGpu("GPU-a"), FakeGpu("GPU-b", pids=[os.getpid()]))
    start(LD_LIBRARY_PATH=str(nvml.folder), NVML_STUB=str(nvml.file))
    eventually(lambda: Gpu.objects.count() == 2)
    strangers = dict(Gpu.objects.values_list("uuid", "stranger"))
    assert strangers["GPU-a"] is None
    assert strangers["GPU-b"]["pid"] == os.getpid()


def test_a_removed_host_registers_again_by_itself() -> None:
    presence = host_command.HostPresence("box", "10.1.2.3", "dstackweb")
    seen = probe(lambda _pid: True)
    presence.update(seen)
    Host.objects.all().delete()
    presence.update(seen)
    assert Host.objects.get().name == "box"


def test_everything_is_written_only_when_something_changed() -> None:
    presence = host_command.HostPresence("box", "10.1.2.3", "dstackweb")
    seen = probe(lambda _pid: True)
    presence.update(None)
    assert not Host.objects.exists()
    presence.update(seen)
    Host.objects.update(cpus=1)
    presence.update(seen)
    assert (Host.objects.get().cpus, Host.objects.get().heartbeats) == (1, 1)
    presence.update(replace(seen, cpus=seen.cpus + 1))
    assert Host.objects.get().cpus == seen.cpus + 1


@pytest.mark.parametrize(("heartbeats", "boot", "refused"), [(1, "other", True), (0, "other", False), (1, "", False)])
def test_a_name_is_refused_only_while_another_machine_uses_it(heartbeats: int, boot: str, refused: bool) -> None:
    factories.make_host("box", boot_id=boot or boot_id())

    def wait(_seconds: float) -> None:
        Host.objects.update(heartbeats=heartbeats)

    assert host_command.name_in_use("box", wait) is refused
