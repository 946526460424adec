"""Images on cloud instances: with the Docker of their image, with one that is installed for them, and without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstackweb.runs.models import Job
from dstackweb.wording import statuses
from standins.aws import Cloud
from tests.containers import IMAGE, Docker
from tests.runner.test_agent_on_a_cloud import boot, instance_of, place, server
from tests.standins.fixtures import cloud
from tests.support import eventually

__all__ = ["cloud", "server"]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.django_db(transaction=True),
    pytest.mark.xdist_group("containers"),
    pytest.mark.needs("root", "docker"),
]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The programs of a machine without an engine."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for found in (*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()):
        if found.name not in ("docker", "podman", "apt-get", "systemctl") and not (folder / found.name).exists():
            (folder / found.name).symlink_to(found)
    tool(folder, "systemctl", "exit 0")
    return folder


def tool(folder: Path, name: str, script: str) -> None:
    """A program of the machine."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def ended(job: Job) -> Job:
    eventually(lambda: Job.objects.get(pk=job.pk).status in ("done", "failed"))
    return Job.objects.get(pk=job.pk)


def test_an_instance_installs_docker_for_the_first_image_and_runs_it(
    cloud: Cloud, server: str, docker: Docker, programs: Path
) -> None:
    tool(programs, "docker.package", f'DOCKER_HOST={docker.socket} exec {docker.engine.program} "$@"')
    tool(programs, "apt-get", f'case "$*" in *install*docker.io) mv {programs}/docker.package {programs}/docker;; esac')
    job = place("echo $FROM_IMAGE > here", image=IMAGE)
    cloud_id = boot(cloud, job, server, path=str(programs))
    done = ended(job)
    assert (done.status, done.image_digest[:7]) == ("done", "sha256:"), (done.message, cloud.machine(cloud_id))
    home = Path(cloud.machine(cloud_id)["folder"]) / "root/.dstackweb" / str(instance_of(job).pk)
    assert (home / "runs" / str(job.run.uid) / "node-0/here").read_text() == "yes\n"
    assert docker.left() == []


def test_an_instance_on_which_docker_can_not_be_installed_fails_its_run_with_the_installers_words(
    cloud: Cloud, server: str, programs: Path
) -> None:
    tool(programs, "apt-get", "echo E: no such package; exit 100")
    job = place("true", image=IMAGE)
    boot(cloud, job, server, path=str(programs))
    failed = ended(job)
    assert failed.termination_reason == "creating_container_error"
    assert statuses.message(failed.detail, failed.message).startswith("Docker could not be installed on its instance.")
    assert "E: no such package" in failed.message


def test_an_image_that_needs_gpus_fails_where_the_machine_has_no_toolkit_for_them(
    cloud: Cloud, server: str, programs: Path
) -> None:
    tool(programs, "docker", """echo '{"Server": {"Version": "24.0"}}'""")
    job = place("true", image=IMAGE, gpu_count=1)
    boot(cloud, job, server, path=str(programs), InstanceType="g5.xlarge")
    failed = ended(job)
    assert failed.detail["fault"] == "no_gpu_toolkit"
