"""Runners and jobs as real processes on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import psutil
import pytest
from django.test import override_settings

from dstackweb.backends.contract import StartFailed
from dstackweb.backends.hosts import local
from dstackweb.runner import cgroups, jobs
from dstackweb.runner.machine import cgroup_support
from tests.backends.job_api import JobApi
from tests.support import eventually

OTHER_USER = "nobody" if os.getuid() == 0 else None
"""Started as root, jobs here run as another user, as they do in earnest."""

ORPHAN = "sh -c 'echo $$ > daemon; exec sleep 60' &"
DAEMON = f"(setsid {ORPHAN})"
NAMELESS = f"(env -i setsid {ORPHAN})"
DEAF = "trap '' TERM; echo ready; while true; do sleep 1; done"


@pytest.fixture(autouse=True)
def home(open_home: Path) -> Iterator[Path]:
    """A server's home of this test's own, with a place for runs."""
    with override_settings(DSTACKWEB_HOME=open_home):
        yield open_home


@pytest.fixture
def serve() -> Iterator[Callable[..., JobApi]]:
    """Makes jobs with an API of their own, and leaves nothing of them behind."""
    apis: list[JobApi] = []

    def make(*commands: str, **spec: object) -> JobApi:
        apis.append(JobApi(*commands, **spec))
        return apis[-1]

    yield make
    for api in apis:
        eventually(partial(local.kill_job, api.job))
        api.close()


def order(api: JobApi) -> dict[str, object]:
    return {
        "api": api.url,
        "job": str(api.job),
        "token": "token",
        "state_dir": str(local.state_dir(api.job)),
        "run_dir": str(local.run_dir(str(local.state_dir(api.job).parents[1] / "runs"), api.run, 0)),
        "user": OTHER_USER,
        "path": local.job_path(),
    }


def launch(api: JobApi) -> Path:
    """Start the job's runner; returns the job's directory."""
    local.ensure_runner(order(api))
    return Path(str(order(api)["run_dir"]))


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_runner_is_started_does_its_job_and_ends(serve: Callable[..., JobApi]) -> None:
    api = serve("echo hello")
    launch(api)
    eventually(lambda: api.exit)
    assert api.exit is not None
    assert (api.exit["exit_code"], bytes(api.log)) == (0, b"hello\n")
    eventually(lambda: local.tree_gone(api.job))


def test_a_job_runs_as_the_hosts_job_user_who_cannot_read_the_runners_files(serve: Callable[..., JobApi]) -> None:
    api = serve('id -un; pwd; ls "$STATE"')
    api.spec["env"] = {"STATE": str(local.state_dir(api.job))}
    folder = launch(api)
    eventually(lambda: api.exit)
    user = OTHER_USER or pwd.getpwuid(os.getuid()).pw_name
    assert api.log.decode().splitlines()[:2] == [user, str(folder)]
    assert (b"Permission denied" in api.log) == (OTHER_USER is not None)


def test_a_second_start_changes_nothing_while_a_runner_lives(serve: Callable[..., JobApi]) -> None:
    api = serve("echo once; sleep 60")
    launch(api)
    eventually(lambda: b"once" in api.log)
    before = (local.state_dir(api.job) / "lock").read_text()
    launch(api)
    assert (local.state_dir(api.job) / "lock").read_text() == before
    assert len(set(api.claims)) == 1
    assert api.log.count(b"once") == 1


def test_all_starts_share_one_child(serve: Callable[..., JobApi]) -> None:
    first, second = serve("sleep 60"), serve("sleep 60")
    launch(first)
    children = psutil.Process().children()
    launch(second)
    assert psutil.Process().children() == children
    assert local.runner_alive(first.job)
    assert local.runner_alive(second.job)
    assert len(launchers()) == 1
    assert not {_runner_pid(first.job), _runner_pid(second.job)} & {p.pid for p in psutil.Process().children(True)}


@pytest.mark.slow
def test_a_launcher_that_is_killed_or_hangs_harms_no_job_and_the_next_start_makes_another(
    serve: Callable[..., JobApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstackweb.runner.jobs.ANSWER_S", 5.0)
    first, second, third = serve("echo begun; sleep 0.5; echo over"), serve("echo second"), serve("echo third")
    launch(first)
    eventually(lambda: b"begun" in first.log)
    [launcher] = launchers()
    launcher.kill()
    launch(second)
    [launcher] = launchers()
    launcher.suspend()
    launch(third)
    eventually(lambda: first.exit and second.exit and third.exit)
    assert [bytes(api.log) for api in (first, second, third)] == [b"begun\nover\n", b"second\n", b"third\n"]
    assert [len(set(api.claims)) for api in (first, second, third)] == [1, 1, 1]


def launchers() -> list[psutil.Process]:
    """This process's launchers of runners."""
    mine = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in mine if "dstackweb.runner" in child.cmdline()]


def test_nothing_of_the_servers_environment_reaches_a_runner_or_its_job(
    serve: Callable[..., JobApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTACKWEB_SECRET_KEY", "the key")
    api = serve("env; sleep 60")
    launch(api)
    eventually(lambda: b"PATH=" in api.log)
    pid = int((local.state_dir(api.job) / "lock").read_text())
    with contextlib.suppress(PermissionError):  # the runner of a server that is not root lets no one read it
        assert b"the key" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert b"the key" not in api.log


def test_the_state_of_a_runner_is_unreadable_to_other_users(serve: Callable[..., JobApi]) -> None:
    api = serve("true")
    launch(api)
    assert local.state_dir(api.job).stat().st_mode & 0o777 == 0o700
    assert local.state_dir(api.job).parent.stat().st_mode & 0o777 == 0o700


def test_a_runner_that_cannot_start_reports_why(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., JobApi]) -> None:
    api = serve("true")
    monkeypatch.setattr(jobs, "PROGRAM", "/nowhere")
    monkeypatch.setattr(jobs, "_launcher", jobs.Launcher())
    with pytest.raises(StartFailed, match="No module named"):
        launch(api)


def test_a_shared_lock_is_not_taken_for_a_living_runner() -> None:
    job = uuid4()
    local.state_dir(job).mkdir(parents=True)
    assert not local.runner_alive(job)
    with (local.state_dir(job) / "lock").open("w") as file:
        assert not local.runner_alive(job)
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not local.runner_alive(job)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert local.runner_alive(job)
    assert not local.runner_alive(job)


def test_a_nudged_runner_polls_at_once_and_obeys_a_stop(serve: Callable[..., JobApi]) -> None:
    api = serve("echo up; sleep 60")
    launch(api)
    eventually(lambda: b"up" in api.log)
    api.stop = {"action": "stop", "grace_s": 1, "reason": "terminated_by_user"}
    assert local.here().nudge(str(api.job))
    eventually(lambda: api.exit)
    assert api.exit is not None
    assert api.exit["reason"] == "terminated_by_user"


def test_a_pid_on_disk_is_not_signalled_once_its_lock_is_free() -> None:
    job = uuid4()
    local.state_dir(job).mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as bystander:
        (local.state_dir(job) / "lock").write_text(f"{bystander.pid}\n")
        assert not local.here().nudge(str(job))
        assert local.kill_job(job)
        assert bystander.poll() is None
        bystander.kill()


@pytest.mark.parametrize("daemon", [DAEMON, NAMELESS], ids=["marked", "with a cleaned environment"])
def test_a_kill_takes_children_that_ignore_term_or_became_daemons(serve: Callable[..., JobApi], daemon: str) -> None:
    api = serve(f"{daemon}; {DEAF}")
    folder = launch(api)
    eventually(lambda: b"ready" in api.log and (folder / "daemon").read_text())
    everything = local.here().processes(str(api.job), _runner_pid(api.job))
    assert int((folder / "daemon").read_text()) in everything
    assert len(everything) >= 3
    assert not local.tree_gone(api.job)
    assert local.kill_job(api.job)
    assert not any(map(lives, everything))
    assert local.tree_gone(api.job)
    assert api.exit is None


def test_processes_left_by_a_killed_runner_are_found_and_killed(serve: Callable[..., JobApi]) -> None:
    api = serve(f"{DAEMON}; echo ready; sleep 60")
    folder = launch(api)
    eventually(lambda: b"ready" in api.log and (folder / "daemon").read_text())
    os.kill(_runner_pid(api.job), signal.SIGKILL)
    eventually(lambda: not local.runner_alive(api.job))
    daemon = int((folder / "daemon").read_text())
    assert not local.tree_gone(api.job)
    assert local.kill_job(api.job)
    assert not lives(daemon)


def test_the_cgroup_finds_processes_of_a_killed_runner_that_lack_its_marker(serve: Callable[..., JobApi]) -> None:
    api = serve(f"{NAMELESS}; echo ready; sleep 60")
    folder = launch(api)
    eventually(lambda: b"ready" in api.log and (folder / "daemon").read_text())
    daemon, shell = int((folder / "daemon").read_text()), psutil.Process(_runner_pid(api.job)).children()
    os.kill(_runner_pid(api.job), signal.SIGKILL)
    eventually(lambda: not local.runner_alive(api.job))
    for process in shell:
        process.kill()
    eventually(lambda: not any(map(lives, (process.pid for process in shell))))
    group = cgroups.read(str(local.state_dir(api.job)))
    if cgroup_support()["version"]:
        assert not local.tree_gone(api.job)
        assert local.kill_job(api.job)
        assert not lives(daemon)
        assert local.forget_all([api.job], ends=math.inf) == 1
        assert not any(map(os.path.exists, group.folders))
    else:
        assert group.folders == ()
        eventually(lambda: local.tree_gone(api.job))
        os.kill(daemon, signal.SIGKILL)


def test_a_new_runner_reports_the_end_of_a_killed_job(serve: Callable[..., JobApi]) -> None:
    api = serve("echo before; sleep 60")
    launch(api)
    eventually(lambda: b"before" in api.log)
    assert local.kill_job(api.job)
    launch(api)
    eventually(lambda: api.exit)
    assert api.log.count(b"before") == 1


def test_a_jobs_processes_are_ours_while_its_runner_lives_and_strangers_after(serve: Callable[..., JobApi]) -> None:
    api = serve(f"{NAMELESS}; echo $$ > shell; echo ready; sleep 60")
    folder = launch(api)
    eventually(lambda: b"ready" in api.log and (folder / "daemon").read_text())
    shell, nameless = (int((folder / name).read_text()) for name in ("shell", "daemon"))
    is_ours = local.here().is_ours
    assert is_ours(shell)
    assert is_ours(nameless)
    assert not is_ours(os.getpid())
    os.kill(_runner_pid(api.job), signal.SIGKILL)
    eventually(lambda: not local.runner_alive(api.job))
    assert not is_ours(shell)
    os.kill(nameless, signal.SIGKILL)


def age(folder: Path, seconds: float) -> None:
    os.utime(folder, (time.time() - seconds,) * 2)


def test_old_files_of_ended_jobs_are_deleted_after_a_time(home: Path) -> None:
    jobs = [uuid4() for _ in range(5)]
    for job in jobs:
        local.state_dir(job).mkdir(parents=True)
        age(local.state_dir(job), 7200)
    other = local.state_dir(jobs[0]).parent / "not-a-job"
    other.mkdir()
    age(other, 7200)
    young, active = jobs[:2]
    age(local.state_dir(young), 60)
    old = local.old_job_files({str(active)}, 3600)
    assert set(old) == set(jobs[2:])
    assert local.forget_all(old, ends=time.monotonic()) == 0
    assert local.forget_all(old, ends=math.inf) == 3
    assert local.old_job_files({str(active)}, 3600) == []
    assert {folder.name for folder in other.parent.iterdir()} == {str(young), str(active), "not-a-job"}


def test_files_of_a_job_with_living_processes_stay(serve: Callable[..., JobApi]) -> None:
    api = serve("echo up; sleep 60")
    launch(api)
    eventually(lambda: b"up" in api.log)
    assert local.forget_all([api.job], ends=math.inf) == 0
    assert local.state_dir(api.job).exists()
    local.kill_job(api.job)
    assert local.forget_all([api.job], ends=math.inf) == 1
    assert not local.state_dir(api.job).exists()


def test_old_directories_of_runs_are_deleted_once_unused(home: Path) -> None:
    runs = home / "runs"
    uids = sorted(str(uuid4()) for _ in range(4))
    for uid in uids:
        (runs / uid / "node-0").mkdir(parents=True)
        age(runs / uid, 100)
    (runs / uids[0]).touch()
    asked: list[str] = []

    def may_go(some: Sequence[str]) -> set[str]:
        asked.extend(some)
        return set(uids[2:])

    old = local.old_run_dirs(str(runs), may_go, 50)
    assert sorted(asked) == uids[1:]
    assert sorted(old) == uids[2:]
    assert local.remove_run_dirs(str(runs), old, ends=time.monotonic()) == 0
    assert local.remove_run_dirs(str(runs), old, ends=math.inf) == 2
    assert sorted(folder.name for folder in runs.iterdir()) == uids[:2]
    assert local.old_run_dirs(str(home / "none"), may_go, 0) == []


def test_a_link_in_place_of_a_directory_is_never_followed(home: Path) -> None:
    precious = home / "precious"
    precious.mkdir()
    runs, uid = home / "runs", str(uuid4())
    runs.mkdir()
    (runs / uid).symlink_to(precious)
    assert local.old_run_dirs(str(runs), set, -1) == []
    assert local.remove_run_dirs(str(runs), [uid], ends=math.inf) == 0
    assert precious.exists()


def test_the_path_of_jobs_leaves_out_the_servers_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:/usr/bin:relative:/nowhere:/bin")
    assert local.job_path() == "/usr/bin:/bin"


def test_the_path_of_jobs_omits_directories_that_their_user_may_not_enter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin")
    assert local.job_path() == "/usr/bin"


def test_an_unreadable_directory_in_the_path_does_not_block_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After `su` a server may still have the PATH of somebody else."""
    closed = tmp_path / "closed"
    (closed / "bin").mkdir(parents=True)
    closed.chmod(0)
    monkeypatch.setenv("PATH", f"{closed}/bin:/usr/bin")
    if os.getuid() == 0:
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        assert local.job_path() == "/usr/bin"
    finally:
        os.seteuid(os.getuid())
        closed.chmod(0o700)


def _runner_pid(job: UUID) -> int:
    return int((local.state_dir(job) / "lock").read_text())
