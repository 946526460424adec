"""Real jobs on a host that runs as root try to reach others: as users of projects, and in sandboxes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from django.test import override_settings

from dstackweb.backends.hosts import local
from dstackweb.runner import child, sandbox
from dstackweb.runner.engine import Engine
from dstackweb.runner.isolation import PROJECT_UIDS, account_of, arrange, find_user, isolates, of_job, prepare
from standins import programs
from tests.backends.job_api import JobApi
from tests.support import eventually

FIRST = int(PROJECT_UIDS.partition("-")[0])
NO_SANDBOX, SANDBOX = None, list[str]()
WITH_HOME = [tempfile.gettempdir()]
"""A sandbox with the machine's own /tmp, and in it the homes of these tests, as they are there elsewhere."""
Launch = Callable[..., tuple[JobApi, Path]]

as_root = pytest.mark.needs("root")
each_level = pytest.mark.parametrize("writable", [NO_SANDBOX, SANDBOX], ids=["users", "sandbox"])


@pytest.fixture
def launch(open_home: Path) -> Iterator[Launch]:
    """`launch(project, *commands, writable=…)`: a job of this project that runs, and its directory."""
    apis: list[JobApi] = []

    def start(
        project: int, *commands: str, writable: list[str] | None, engine: Engine | None = None, **spec: object
    ) -> tuple[JobApi, Path]:
        if writable is not NO_SANDBOX:
            programs.require("bubblewrap")
        api = JobApi(*commands, **{"project": project, "env": {"SECRET": f"secret-of-{project}"}, **spec})
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
                "writable": writable,
                "path": local.job_path(),
                "engine": engine and engine.stored(),
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


def victim(launch: Launch, project: int, writable: list[str] | None) -> tuple[int, Path]:
    """A job with a secret and a file; its process and its directory."""
    api, folder = launch(project, "echo results > results.txt", "exec sleep 300", writable=writable)

    def asleep() -> int | None:
        commands = {process.pid: process.info["cmdline"] for process in psutil.process_iter(["cmdline"])}
        found = local.here().processes(str(api.job), None)
        return next((one for one in found if commands.get(one) == ["sleep", "300"]), None)

    pid = eventually(asleep)
    return pid, folder


READS = ("cat {folder}/results.txt", "ls {folder}")
ATTACKS = (
    "cat /proc/{pid}/environ",
    "cat /proc/{pid}/cwd/results.txt",
    "touch {folder}/mine",
    "echo changed > {folder}/results.txt",
    "kill -STOP {pid}",
    "kill -9 {pid}",
)


def tried(command: str) -> str:
    """Says so if the command works, and nothing else."""
    return f"if ( {command} ) >/dev/null 2>&1; then echo did: {shlex.quote(command)}; fi"


@as_root
@pytest.mark.parametrize("writable", [NO_SANDBOX, WITH_HOME], ids=["users", "sandbox"])
def test_a_job_cannot_read_change_or_stop_another_projects_job(launch: Launch, writable: list[str] | None) -> None:
    pid, folder = victim(launch, 7, writable)
    attacks = [attack.format(pid=pid, folder=folder) for attack in READS + ATTACKS]
    api, _folder = launch(8, *map(tried, attacks), "echo tried all", writable=writable)
    assert output(api) == "tried all\n"
    assert psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    assert (folder / "results.txt").read_text() == "results\n"
    assert psutil.Process(pid).uids().real == FIRST + 7


@as_root
def test_without_a_sandbox_a_job_of_the_same_project_can(launch: Launch) -> None:
    pid, folder = victim(launch, 7, NO_SANDBOX)
    others = [attack.format(pid=pid, folder=folder) for attack in READS + ATTACKS]
    api, _folder = launch(7, "id -u", "id -G", *map(tried, others), writable=NO_SANDBOX)
    assert output(api).splitlines() == [str(FIRST + 7)] * 2 + [f"did: {attack}" for attack in others]


@as_root
def test_in_a_sandbox_a_job_of_the_same_project_cannot_read_change_or_stop_it(launch: Launch) -> None:
    pid, folder = victim(launch, 7, WITH_HOME)
    attacks = [attack.format(pid=pid, folder=folder) for attack in READS + ATTACKS]
    api, _folder = launch(7, "id -u", "id -G", *map(tried, attacks), writable=WITH_HOME)
    assert output(api).splitlines() == [str(FIRST + 7)] * 2
    assert psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    assert (folder / "results.txt").read_text() == "results\n"


@as_root
def test_in_a_sandbox_a_job_sees_no_run_but_its_own(launch: Launch) -> None:
    """None that has ended either, whatever it ran in, and though its user may read it."""
    ended, folder = launch(7, "echo results > results.txt", writable=NO_SANDBOX)
    output(ended)
    attacks = [attack.format(folder=folder) for attack in READS]
    runs = folder.parents[1]
    look = [tried(f"touch {runs}/mine"), "echo 0 > node", f"ls {runs}", f"ls {runs}/*", f"cat {runs}/*/*/node"]
    api, own = launch(7, *map(tried, attacks), *look, writable=WITH_HOME)
    assert output(api).splitlines() == [own.parent.name, own.name, "0"]


@as_root
@each_level
def test_a_job_has_its_own_home_and_can_gain_no_rights(launch: Launch, writable: list[str] | None) -> None:
    see = "echo $HOME $USER; stat -c %a .; pwd; grep -h NoNewPrivs /proc/self/status"
    api, folder = launch(7, see, writable=writable)
    assert output(api).split() == [str(folder), "project-7", "700", str(folder), "NoNewPrivs:", "1"]


@as_root
def test_in_a_sandbox_a_job_has_no_capability_no_disk_and_its_own_processes(launch: Launch) -> None:
    see = ["grep -hE 'Cap(Eff|Prm|Amb)' /proc/self/status", "ls -d /proc/[0-9]* | wc -l"]
    api, _folder = launch(7, *see, "ls /dev/disk /dev/vda /dev/sda 2>/dev/null | wc -l", writable=SANDBOX)
    words = output(api).split()
    assert {int(mask, 16) for mask in words[1:6:2]} == {0}
    assert int(words[6]) < 8
    assert words[7] == "0"


DRIVER_SAYS = "Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\nDevice Minor: \t {minor}\n"


@pytest.mark.needs("root", "bubblewrap")
def test_in_a_sandbox_a_job_has_no_gpus_but_its_own(open_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it sets CUDA_VISIBLE_DEVICES to."""
    for minor, uuid in enumerate(("GPU-a", "GPU-b", "GPU-c")):
        (open_home / uuid).mkdir()
        (open_home / uuid / "information").write_text(DRIVER_SAYS.format(uuid=uuid, minor=minor))
        (open_home / f"nvidia{minor}").touch()
    (open_home / "nvidiactl").touch()
    monkeypatch.setattr(sandbox, "DEVICES", (f"{open_home}/nvidia*",))
    monkeypatch.setattr(sandbox, "GPU", re.compile(rf"{open_home}/nvidia(\d+)"))
    monkeypatch.setattr(sandbox, "DRIVER", f"{open_home}/*/information")

    def devices(*gpus: str) -> list[str]:
        argv = sandbox.wrapped(3, run_dir=str(open_home), gpus=gpus)
        return sorted(os.path.basename(argv[at + 1]) for at, word in enumerate(argv) if word == "--dev-bind-try")

    every = ["nvidia0", "nvidia1", "nvidia2", "nvidiactl"]
    assert devices("GPU-b") == ["nvidia1", "nvidiactl"]
    assert devices("GPU-c", "GPU-a") == ["nvidia0", "nvidia2", "nvidiactl"]
    assert devices() == ["nvidiactl"]
    assert devices("MIG-x") == every, "it is a part of one of them"
    for unknown in ("", DRIVER_SAYS.format(uuid="GPU-????????", minor=1), "GPU UUID: GPU-b\nDevice Minor: none\n"):
        (open_home / "GPU-b" / "information").write_text(unknown)
        assert devices("GPU-b") == ["nvidia1", "nvidiactl"]
        assert devices("GPU-a") == ["nvidia0", "nvidia1", "nvidiactl"], "nobody uses it"
        assert devices() == ["nvidiactl"]


@as_root
def test_in_a_sandbox_a_job_can_change_its_own_folders_only(launch: Launch, open_home: Path) -> None:
    shared = open_home / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    places = ["/tmp", "/var/tmp", "/dev/shm", ".", str(shared), "/etc", "/usr"]
    commands = [tried(f"touch {place}/file") for place in places]
    api, folder = launch(7, *commands, writable=SANDBOX)
    assert output(api).splitlines() == [f"did: touch {place}/file" for place in places[:4]]
    assert list(shared.iterdir()) == []
    assert (folder / "file").exists()
    assert not Path("/tmp/file").exists()
    api, _folder = launch(7, *commands, writable=[str(shared), "/no/such/folder"])
    assert output(api).splitlines() == [f"did: touch {place}/file" for place in places[:5]]


@as_root
def test_a_folder_that_jobs_can_put_a_link_in_the_place_of_is_not_mounted(launch: Launch, open_home: Path) -> None:
    """Root would follow it, past folders that are closed to the job. In a folder that it gets it does no harm."""
    shared, closed = open_home / "shared", open_home / "closed"
    (closed / "open").mkdir(parents=True)
    (closed / "open/secret").write_text("secret\n")
    closed.chmod(0o700)
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "link").symlink_to(closed / "open")
    attacks = [tried(f"cat {shared}/link/secret"), tried(f"touch {shared}/file")]
    api, _folder = launch(7, *attacks, writable=[f"{shared}/link"])
    assert output(api) == ""
    api, _folder = launch(7, *attacks, writable=[str(shared), f"{shared}/link"])
    assert output(api) == f"did: touch {shared}/file\n"


@as_root
def test_links_of_the_machines_own_are_followed_and_its_sticky_folders_kept(tmp_path: Path) -> None:
    (tmp_path / "real/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").chmod(0o1777)
    places = [f"{tmp_path}/link/below", f"{tmp_path}/none/at/all"]
    assert sandbox.settled(places, {FIRST}) == [f"{tmp_path}/real/below"]
    os.chown(tmp_path / "real/below", FIRST, FIRST)
    assert sandbox.settled(places, {FIRST}) == []


@as_root
def test_what_a_job_leaves_in_its_tmp_ends_with_it(launch: Launch) -> None:
    api, folder = launch(7, "mkdir -p /tmp/a/b; chmod 0 /tmp/a; echo kept > kept", writable=SANDBOX)
    output(api)
    eventually(lambda: not local.runner_alive(api.job))
    assert [entry.name for entry in folder.parent.iterdir()] == ["node-0"]
    assert (folder / "kept").read_text() == "kept\n"


@as_root
@each_level
@pytest.mark.parametrize(("command", "code"), [("exit 42", 42), ("kill -9 $$", 137), ("true", 0)])
def test_the_commands_exit_code_is_the_jobs(
    launch: Launch, writable: list[str] | None, command: str, code: int
) -> None:
    api, _folder = launch(7, command, writable=writable)
    output(api)
    assert api.exit is not None
    assert api.exit["exit_code"] == code


@as_root
@each_level
def test_commands_get_the_stop_signal_and_end_as_they_like(launch: Launch, writable: list[str] | None) -> None:
    api, _folder = launch(
        7,
        "trap 'echo saved; exit 3' TERM; echo ready; while true; do sleep 0.05 || true; done",
        writable=writable,
        stop_duration_s=60,
    )
    eventually(lambda: b"ready" in api.log)
    api.stop = {"action": "stop", "reason": "stopped_by_user", "grace_s": 60}
    local.here().nudge(str(api.job))
    said = output(api).replace("Terminated\n", "")  # of its `sleep`
    assert api.exit is not None
    assert (said, api.exit["exit_code"], api.exit["reason"]) == ("ready\nsaved\n", 3, "stopped_by_user")


@as_root
@each_level
def test_no_daemon_outlives_its_job(launch: Launch, writable: list[str] | None) -> None:
    long = f"301.{os.getpid()}"  # not what the same test at another level runs beside this one
    api, _folder = launch(7, f"env -i setsid sleep {long} & echo started", writable=writable)
    assert output(api) == "started\n"
    eventually(lambda: not local.runner_alive(api.job))
    assert not any(process.info["cmdline"] == ["sleep", long] for process in psutil.process_iter(["cmdline"]))


@as_root
@each_level
def test_another_job_cannot_keep_a_jobs_end_from_being_confirmed(launch: Launch, writable: list[str] | None) -> None:
    api, _folder = launch(7, "true", writable=writable)
    output(api)
    eventually(lambda: not local.runner_alive(api.job))
    other, _folder = launch(7, f"export DSTACKWEB_JOB={api.job}; sleep 600 & echo started; wait", writable=writable)
    eventually(lambda: b"started" in other.log)
    assert local.tree_gone(api.job)
    assert len(local.here().processes(str(other.job), None)) >= 2


@as_root
@each_level
def test_a_projects_user_has_a_limit_of_processes(launch: Launch, writable: list[str] | None) -> None:
    see = "grep 'Max processes' /proc/self/limits"
    api, _folder = launch(7, see, writable=writable, process_limit=1000)
    assert output(api).split()[2:4] == ["8000", "8000"]


@as_root
def test_a_killed_runner_leaves_nothing_of_a_sandbox(launch: Launch) -> None:
    pid, _folder = victim(launch, 7, SANDBOX)
    [job] = local.jobs_here()
    os.kill(int((local.state_dir(job) / "lock").read_text()), signal.SIGKILL)
    eventually(lambda: not local.runner_alive(job))
    eventually(partial(local.kill_job, job))
    assert not psutil.pid_exists(pid)


@as_root
def test_nothing_of_a_jobs_environment_reaches_what_still_runs_as_root(launch: Launch, open_home: Path) -> None:
    (open_home / "bwrap").write_text(f"#!/bin/sh\ntouch {open_home}/hijacked\n")
    (open_home / "bwrap").chmod(0o755)
    env = {"LD_DEBUG": "files", "PYTHONVERBOSE": "1", "PYTHONPATH": str(open_home), "KEPT": "yes"}
    path = f"{open_home}:/usr/bin:/bin"
    api, _folder = launch(7, "echo kept $KEPT", env=env | {"PATH": path}, writable=SANDBOX)
    log = output(api)
    assert "kept yes" in log
    assert "calling init" in log, "the loader's messages are of the job's programs"
    assert "bwrap" not in log
    assert "python" not in log.replace(str(open_home), "")
    assert not (open_home / "hijacked").exists()


@as_root
def test_a_shell_that_is_not_there_is_named(launch: Launch) -> None:
    api, _folder = launch(7, "true", shell="/no/such/shell", writable=SANDBOX)
    assert output(api) == "/no/such/shell can't be started: [Errno 2] No such file or directory: '/no/such/shell'\n"
    assert api.exit is not None
    assert api.exit["exit_code"] == 127


@as_root
def test_the_set_up_snippet_runs_in_the_sandbox_too(launch: Launch) -> None:
    snippet = "export SEEN=$(ls -d /proc/[0-9]* | wc -l)\ntouch /etc/changed 2>/dev/null && export CHANGED=yes || true"
    api, _folder = launch(7, "echo $SEEN $CHANGED", setup=snippet, writable=SANDBOX)
    assert int(output(api)) < 8


@as_root
def test_a_job_whose_project_requires_a_sandbox_does_not_start_without(launch: Launch) -> None:
    api, folder = launch(7, "touch here", least_isolation="sandbox", writable=NO_SANDBOX)
    output(api)
    assert api.exit is not None
    assert api.exit["reason"] == "not_claimed"
    assert api.exit["message"] == "the project requires the isolation 'sandbox', and this host has 'project' now"
    assert not (folder / "here").exists()


@pytest.mark.needs("root", "bubblewrap")
def test_a_host_has_sandboxes_where_bubblewrap_works(open_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = arrange(open_home, uid=0, job_user=PROJECT_UIDS, shared_uid=False)
    assert prepare(made).isolation == "sandbox"
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "install bubblewrap" in sandbox.obstacle(account_of(PROJECT_UIDS, 0))


def test_a_broken_bubblewrap_is_noticed(open_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (open_home / "bwrap").write_text("#!/bin/sh\necho cannot make a namespace >&2\nexit 1\n")
    (open_home / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(open_home), prepend=os.pathsep)
    monkeypatch.setattr(os, "chown", lambda *_, **__: None)
    assert sandbox.obstacle(account_of(PROJECT_UIDS, 0)) == "cannot make a namespace"


def test_the_device_that_jobs_may_not_make_is_made_for_them(open_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, cuda = open_home / "nvidiactl", open_home / "nvidia-uvm"
    (open_home / "nvidia-modprobe").write_text(f'#!/bin/sh\necho "$@" >> {cuda}\n')
    (open_home / "nvidia-modprobe").chmod(0o755)
    monkeypatch.setenv("PATH", str(open_home), prepend=os.pathsep)
    monkeypatch.setattr(child, "CONTROL_DEVICE", str(control))
    monkeypatch.setattr(child, "CUDA_DEVICE", str(cuda))
    child.make_gpu_devices()
    assert not cuda.exists(), "a machine without the driver"
    control.touch()
    child.make_gpu_devices()
    child.make_gpu_devices()
    assert cuda.read_text() == "-u -c=0\n"


def test_a_stronger_isolation_meets_what_a_weaker_one_is_required_for() -> None:
    assert of_job(PROJECT_UIDS, []) == "sandbox"
    assert of_job(PROJECT_UIDS, None) == "project"
    assert of_job("nobody", None) == "user"
    assert of_job(None, None) == "shared"
    assert isolates("sandbox", "project")
    assert isolates("none", "")
    assert not isolates("user", "project")


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
    first = find_user(PROJECT_UIDS)
    assert first is not None
    assert first.pw_uid == FIRST


@as_root
def test_a_job_of_a_project_without_a_user_says_why_it_cannot_start(launch: Launch) -> None:
    api, _folder = launch(2_000_000, "true", writable=NO_SANDBOX)
    output(api)
    assert api.exit is not None
    assert api.exit["reason"] == "executor_error"
    assert "to run jobs of project 2000000 as" in api.exit["message"]
