"""The job's commands as one shell: its environment, its user, its output into the spool."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from dstackweb.runner.tree import MARKER
from dstackweb.runner.user import acting_as

SCRIPT_ARGUMENT_LIMIT = 96 * 1024
"""The kernel takes arguments of up to 128 KiB; a longer script goes through a file."""
SETUP_S = 120.0


class CannotStart(Exception):
    """The commands can't be started here; the text says why."""


@dataclass(frozen=True)
class Job:
    """The parts of orders and spec that a start needs."""

    spec: dict[str, Any]
    run_dir: str
    user: str | None
    path: str
    api: str

    @property
    def account(self) -> pwd.struct_passwd:
        """The user the commands run as. Raises CannotStart when there is no such user."""
        try:
            return pwd.getpwnam(self.user) if self.user else pwd.getpwuid(os.getuid())
        except KeyError:
            raise CannotStart(f"this host has no user {self.user or os.getuid()!r} to run jobs as") from None

    @property
    def switches_user(self) -> bool:
        """Whether the commands run as somebody else than the runner."""
        return self.account.pw_uid != os.getuid()


def spawn(job: Job, output: int) -> int:
    """Start the commands, writing to the file descriptor `output`; returns the shell's pid. Raises CannotStart."""
    _enter_working_dir(job)
    try:
        env = _base_env(job)
        env |= _after_setup(job, env)
        env |= {**job.spec["env"], **_dstack_env(job), MARKER: job.spec["job"]}
        argv = [job.spec["shell"], *_script_arguments(job, _script(job))]
        child = _popen(job, argv, env, output)
    finally:
        os.chdir("/")
    child.returncode = 0  # it is reaped by the runner's own loop, together with the orphans
    return child.pid


def _popen(job: Job, argv: list[str], env: dict[str, str], output: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, umask=0o022, **_identity(job),
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise CannotStart(f"{argv[0]} can't be started: {error}") from error


def _identity(job: Job) -> dict[str, Any]:
    if not job.switches_user:
        return {}
    account = job.account
    return {
        "user": account.pw_uid,
        "group": account.pw_gid,
        "extra_groups": os.getgrouplist(account.pw_name, account.pw_gid),
    }


def _enter_working_dir(job: Job) -> None:
    """Go there with the job's own rights: with root's, a directory closed to the job would be open from within."""
    wanted = job.spec["working_dir"] or job.run_dir
    try:
        with acting_as(job.account):
            os.chdir(os.path.join(job.run_dir, wanted))
    except FileNotFoundError:
        raise CannotStart(f"working_dir {wanted!r} does not exist on this host") from None
    except (OSError, ValueError) as error:
        raise CannotStart(f"working_dir {wanted!r} can't be entered: {error}") from error


def _script(job: Job) -> str:
    """All commands, up to the first that fails.

    Each is an `eval` of its own, so that `set -e` sees its status as a whole: a bare `a && b` whose `a` fails stops
    nothing.
    """
    return "\n".join(["set -e", *(f"eval {shlex.quote(command)}" for command in job.spec["commands"])]) + "\n"


def _script_arguments(job: Job, script: str) -> list[str]:
    if len(script.encode()) <= SCRIPT_ARGUMENT_LIMIT:
        return ["-c", script]
    path = os.path.join(job.run_dir, ".dstackweb-commands.sh")
    with acting_as(job.account):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        script_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(script_file, "w", encoding="utf-8") as file:
            file.write(script)
    return [path]


def _base_env(job: Job) -> dict[str, str]:
    """What every job gets; nothing else of the server's environment.

    Python would keep what is printed back, as its output is no terminal: people follow it while it is made.
    """
    account = job.account
    home = account.pw_dir
    if not os.path.isdir(home) or (job.switches_user and os.stat(home).st_uid != account.pw_uid):
        home = job.run_dir
    return {
        "HOME": home,
        "USER": account.pw_name,
        "PATH": job.path,
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        MARKER: job.spec["job"],
    }


def _dstack_env(job: Job) -> dict[str, str]:
    """dstack's names for where a job stands among its nodes, and the GPUs that are its own."""
    spec = job.spec
    return _tasks_env(job) | {
        "DSTACK_RUN_NAME": spec["run"],
        "DSTACK_RUN_ID": spec["run_uid"],
        "DSTACK_JOB_ID": spec["job"],
        "DSTACK_RUN_DIR": job.run_dir,
        "DSTACK_NODES_NUM": str(spec["nodes"]),
        "DSTACK_NODE_RANK": str(spec["node"]),
        "DSTACK_MASTER_NODE_IP": spec["master_ip"],
        "DSTACK_HOST_NAME": spec.get("host", ""),
        "DSTACK_HOST_ADDRESS": spec.get("host_address", ""),
        "DSTACK_GPUS_PER_NODE": str(spec["gpus_per_node"]),
        "DSTACK_GPUS_NUM": str(spec["gpus_total"]),
        "CUDA_VISIBLE_DEVICES": ",".join(spec["gpus"]),
    }


def _tasks_env(job: Job) -> dict[str, str]:
    """Where the commands tell of their tasks; nothing where the server takes none."""
    tasks = job.spec.get("tasks")
    if not tasks:
        return {}
    return {"DSTACKWEB_TASKS_URL": job.api.rstrip("/") + tasks["path"], "DSTACKWEB_TASKS_TOKEN": tasks["token"]}


def _after_setup(job: Job, env: dict[str, str]) -> dict[str, str]:
    """The environment as the host's set-up snippet leaves it: run by itself, so that `set -e` doesn't touch it."""
    setup = job.spec.get("setup") or ""
    if not setup.strip():
        return {}
    # Into files, not pipes: what the snippet leaves running in the background may keep these open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as chatter:
        try:
            done = subprocess.run(
                [job.spec["shell"], "-c", f"exec 3>&1 1>&2\n{setup}\nenv -0 >&3"], env=env,
                stdin=subprocess.DEVNULL, stdout=output, stderr=chatter, timeout=SETUP_S, check=False, **_identity(job),
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotStart(f"the host's set-up snippet failed: {error}") from error
        output.seek(0)
        chatter.seek(0)
        if done.returncode:
            told = chatter.read().decode(errors="replace").strip()[-300:]
            raise CannotStart(f"the host's set-up snippet failed with {done.returncode}: {told}")
        lines = output.read().decode(errors="surrogateescape").split("\0")
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name: value for name, _, value in pairs if name not in ("_", "PWD", "SHLVL")}
