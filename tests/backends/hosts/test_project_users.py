"""On a host that runs as root, each project's jobs have a user of their own: real processes try to reach others."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from django.test import override_settings

from dstackweb.backends.hosts import local
from dstackweb.runner.isolation import PROJECT_UIDS, account_of, find_user
from tests.backends.job_api import JobApi
from tests.support import eventually

FIRST = int(PROJECT_UIDS.partition("-")[0])
Launch = Callable[..., tuple[JobApi, Path]]


@pytest.fixture
def launch(open_home: Path) -> Iterator[Launch]:
    """`launch(project, *commands)`: a job of this project that runs, and its directory."""
    apis: list[JobApi] = []

    def start(project: int, *commands: str) -> tuple[JobApi, Path]:
        api = JobApi(*commands, project=project, env={"SECRET": f"secret-of-{project}"})
        apis.append(api)
        folder = local.run_dir(str(open_home / "runs"), api.run, 0)
        local.ensure_runner(
            {
                "api": api.url,
                "job": str(api.job),
                "token": "token",
                "state_dir": str(local.state_dir(api.job)),
                "run_dir": str(folder),
                "user": PROJECT_UIDS,
                "path": local.job_path(),
            }
        )
        return api, folder

    with override_settings(DSTACKWEB_HOME=open_home, DSTACKWEB_JOB_USER=PROJECT_UIDS):
        yield start
        for api in apis:
            eventually(partial(local.kill_job, api.job))
            api.close()


def output(api: JobApi) -> str:
    eventually(lambda: api.exit)
    return api.log.decode()


def victim(launch: Launch, project: int) -> tuple[int, Path]:
    """A job with a secret and a file; its process and its directory."""
    api, folder = launch(project, "echo results > results.txt", "echo $$", "exec sleep 300")
    eventually(lambda: api.log.endswith(b"\n"))
    return int(api.log), folder


ATTACKS = (
    "cat /proc/{pid}/environ",
    "cat /proc/{pid}/cwd/results.txt",
    "cat {folder}/results.txt",
    "ls {folder}",
    "touch {folder}/mine",
    "echo changed > {folder}/results.txt",
    "kill -9 {pid}",
    "kill -STOP {pid}",
)


def tried(command: str) -> str:
    """Says so if the command works, and nothing else."""
    return f"if ( {command} ) >/dev/null 2>&1; then echo did: {shlex.quote(command)}; fi"


@pytest.mark.skipif(os.getuid() != 0, reason="only root has jobs run as other users")
def test_a_job_cannot_read_change_or_stop_another_projects_job(launch: Launch) -> None:
    pid, folder = victim(launch, 7)
    commands = [attack.format(pid=pid, folder=folder) for attack in ATTACKS]
    api, _folder = launch(
        8, *(f"if {command} 2>/dev/null; then echo DID: {shlex.quote(command)}; fi" for command in commands)
    )
    assert output(api) == ""
    assert psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    assert (folder / "results.txt").read_text() == "results\n"
    assert psutil.Process(pid).uids().real == FIRST + 7


@pytest.mark.skipif(os.getuid() != 0, reason="only root has jobs run as other users")
def test_a_job_of_the_same_project_shares_its_user_and_its_files(launch: Launch) -> None:
    pid, folder = victim(launch, 7)
    others = [attack.format(pid=pid, folder=folder) for attack in ATTACKS]
    api, _folder = launch(7, "id -u", "id -G", *map(tried, others))
    assert output(api).splitlines() == [str(FIRST + 7)] * 2 + [f"did: {attack}" for attack in others]


@pytest.mark.skipif(os.getuid() != 0, reason="only root has jobs run as other users")
def test_a_job_has_its_own_home_and_can_gain_no_rights(launch: Launch) -> None:
    api, folder = launch(7, "echo $HOME $USER; stat -c %a .; grep NoNewPrivs /proc/self/status")
    assert output(api).split() == [str(folder), "project-7", "700", "NoNewPrivs:", "1"]


def test_a_project_beyond_the_range_is_refused_and_no_user_is_ever_a_systems() -> None:
    assert account_of("5000-5009", 9).pw_uid == 5009
    for user, project in (
        ("5000-5009", 10),
        ("5000-5009", -1),
        ("0000-5009", 1),
        ("0999-5009", 0),
        ("5000-99999999999", 1),
    ):
        with pytest.raises(KeyError):
            account_of(user, project)
    assert find_user("5000-4000") is None
    stand_in = find_user(PROJECT_UIDS)
    assert stand_in is not None
    assert stand_in.pw_uid == FIRST


@pytest.mark.skipif(os.getuid() != 0, reason="only root has jobs run as other users")
def test_a_project_without_a_user_is_told_why_its_job_cannot_start(launch: Launch) -> None:
    api, _folder = launch(2_000_000, "true")
    eventually(lambda: api.exit)
    assert api.exit is not None
    assert api.exit["reason"] == "executor_error"
    assert "to run jobs of project 2000000 as" in api.exit["message"]
