"""Starting the job's commands: one shell with their environment, user and output."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import resource
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import IO, Any

from dstackweb.runner import enter, sandbox, tree
from dstackweb.runner.cgroups import NO_GROUP
from dstackweb.runner.engine import Engine
from dstackweb.runner.isolation import account_of, uids_of
from dstackweb.runner.output import Sinks
from dstackweb.runner.tree import MARKER

SCRIPT_ARGUMENT_LIMIT = 96 * 1024
"""The kernel allows arguments of up to 128 KiB; a longer script is passed as a file."""
USER_FACTOR = 8
"""A user may have as many processes as so many jobs: all jobs of a project share one."""
SETUP_S = 120.0
SETUP_OUTPUT, SETUP_WRITTEN = 1 << 20, 16 << 20
"""What a set-up snippet may leave as the environment, and what it may write in all, in bytes."""
SETUP_LOOK_S = 0.05
ARTIFACTS = ".dstackweb-artifacts"
"""The folder in the run's directory with the artifacts of its attempts."""
CONTROL_DEVICE, CUDA_DEVICE = "/dev/nvidiactl", "/dev/nvidia-uvm"
HOST_ERRORS = frozenset(
    {errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ENOTCONN}
)
"""Errors that the names and rights of a job's own files never cause."""


@contextlib.contextmanager
def acting_as(account: pwd.struct_passwd) -> Iterator[None]:
    """Access files with another user's rights, so that no link or race in their folders can abuse the runner's own.

    Raises PermissionError unless root.
    """
    if account.pw_uid == os.geteuid():
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(os.getgrouplist(account.pw_name, account.pw_gid))
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(os.getuid())
        os.setegid(gid)
        os.setgroups(groups)


class CannotStart(Exception):
    """The commands can't be started here or elsewhere, because of what the run is; the message says why."""


class HostFault(Exception):
    """This host can't start any commands; the message says why."""


@contextlib.contextmanager
def among_files_of(account: pwd.struct_passwd) -> Iterator[None]:
    """Act as the job's user where earlier attempts may have left anything.

    Raises CannotStart for what such files can cause, OSError for faults of the host.
    """
    try:
        with acting_as(account):
            yield
    except OSError as error:
        if error.errno in HOST_ERRORS:
            raise
        raise CannotStart(str(error)) from error


class Job:
    """What a start needs of orders and spec, and the group that the job's processes enter.

    `writable` is None without a sandbox; else the folders that jobs may change in it, beside their own.
    `engine` makes the container of a job with an image.
    """

    def __init__(self, spec: dict[str, Any], orders: dict[str, Any]) -> None:
        self.spec = spec
        self.run_dir: str = orders["run_dir"]
        self.user: str | None = orders.get("user")
        self.path: str = orders["path"]
        self.api: str = orders["api"]
        self.writable: list[str] | None = orders.get("writable")
        self.engine = Engine.of(orders["engine"]) if orders.get("engine") else None
        self.group = NO_GROUP
        self.env: dict[str, str] = {}
        self.folder = "/"
        """The environment and the directory that the commands were started with."""

    @property
    def account(self) -> pwd.struct_passwd:
        """The user the commands run as. Raises HostFault when there is no such user, CannotStart if for one project."""
        project = int(self.spec.get("project", 0))
        try:
            return account_of(self.user, project) if self.user else pwd.getpwuid(os.getuid())
        except KeyError:
            missing = f"this host has no user {self.user or os.getuid()!r} to run jobs"
            if uids_of(self.user or ""):
                raise CannotStart(f"{missing} of project {project} as") from None
            raise HostFault(f"{missing} as") from None

    @property
    def ids_of_jobs(self) -> Collection[int]:
        """The uids and gids that jobs have on this host. Raises CannotStart."""
        if uids := uids_of(self.user or ""):
            return range(uids[0], uids[1] + 1)
        account = self.account
        return {account.pw_uid, *os.getgrouplist(account.pw_name, account.pw_gid)}

    @property
    def uid(self) -> int | None:
        """That of the user the commands run as, if it is another than the runner's."""
        uid = self.account.pw_uid
        return uid if uid != os.getuid() else None

    @property
    def switches_user(self) -> bool:
        return self.uid is not None


class Processes:
    """A job's commands as processes of this machine: descendants of the runner, or in the job's group."""

    def __init__(self, job: Job, pid: int) -> None:
        self._id, self._group, self._uid, self._pid = job.spec["job"], job.group, job.uid, pid
        self._spared = {pid} if job.writable is not None else set()
        self.memory_mib = job.group.memory_mib
        """Their limit."""

    def status(self, ended: dict[int, int]) -> int | None:
        """Their wait status; None while they run, or nothing is known. `ended`: children that have ended just now."""
        return ended.get(self._pid)

    def processes(self) -> set[int]:
        return self._group.processes() if tree.is_childless() else tree.processes(self._id, self._group, uid=self._uid)

    def spared(self) -> set[int]:
        """Those of them that get no SIGTERM: they end with the others."""
        return self._spared

    def kill(self) -> None:
        tree.kill(self.processes(), self._group)

    def ran_out_of_memory(self) -> str:
        """As `Group.ran_out_of_memory`."""
        return self._group.ran_out_of_memory()

    def own_end(self) -> tuple[str, str] | None:
        """Reason and message of an end that is not the commands' own."""
        return None

    def first(self) -> int:
        """The process that was started first; 0 if it is not known."""
        return self._pid

    def folders(self) -> Sequence[str]:
        """Folders that their files are in, beside the job's own."""
        return ()


def spawn(job: Job, output: Sinks) -> Processes:
    """Start the commands, writing to `output`. Raises CannotStart, HostFault, OSError."""
    if job.switches_user and job.spec["gpus"]:
        make_gpu_devices()
    _enter_working_dir(job)
    try:
        env = _base_env(job)
        env |= _after_setup(job, env)
        env |= {**job.spec["env"], **dstack_env(job), MARKER: job.spec["job"]}
        argv = [job.spec["shell"], *_script_arguments(job, script(job))]
        job.env, job.folder = env, os.getcwd()
        child = _popen(job, argv, env, output)
    finally:
        os.chdir("/")
    child.returncode = 0  # the runner's loop reaps it, together with orphans
    score = oom_score(job.spec)
    if score is not None and os.getuid() != 0:
        # Not before it is another program: a copy of the runner, whose memory is protected, has root's files in /proc.
        with contextlib.suppress(OSError):
            set_oom_score(child.pid, score)
    return Processes(job, child.pid)


def make_gpu_devices() -> None:
    """Have the driver make the device that CUDA needs. CUDA would with a setuid program, which jobs can't run."""
    if os.path.exists(CONTROL_DEVICE) and not os.path.exists(CUDA_DEVICE):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["nvidia-modprobe", "-u", "-c=0"], stdin=subprocess.DEVNULL, timeout=SETUP_S, check=False)


def _popen(job: Job, argv: list[str], env: dict[str, str], output: Sinks) -> subprocess.Popen[bytes]:
    try:
        with _fenced(job, argv, env) as start:
            return subprocess.Popen(
                **start, stdin=subprocess.DEVNULL, stdout=output.out, stderr=output.err,
                start_new_session=True, umask=0o022,
            )  # fmt: skip
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        if getattr(error, "errno", None) in HOST_ERRORS:
            raise
        raise CannotStart(f"{argv[0]} can't be started: {error}") from error


@contextlib.contextmanager
def _fenced(job: Job, argv: list[str], env: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What to start for a command of the job: the command, or its sandbox."""
    if job.writable is None:
        yield {"args": argv, "env": env, "preexec_fn": becoming(job, by_enter=False)}
        return
    account, here = job.account, os.getcwd()
    asked = {"uid": account.pw_uid, "gid": account.pw_gid, "working_dir": here, "env": env, "argv": argv}
    numbers = [enter.stored(asked)]
    try:
        users = None
        if job.spec.get("gateway"):
            users = sandbox.users_with(account, env["HOME"])
            numbers.append(users)
        args = sandbox.wrapped(
            numbers[0], run_dir=job.run_dir, writable=sandbox.settled(job.writable, job.ids_of_jobs),
            gpus=job.spec["gpus"], users=users,
        )  # fmt: skip
        own = {**sandbox.ENV, MARKER: job.spec["job"]}
        yield {"args": args, "env": own, "pass_fds": numbers, "preexec_fn": becoming(job, by_enter=True)}
    finally:
        for number in numbers:
            os.close(number)


def becoming(job: Job, *, by_enter: bool) -> Callable[[], None]:
    """What a new process of the job does first: enter its group, and become its user, unless `enter` does that."""
    group, score, user_limit = job.group, oom_score(job.spec), _user_limit(job)
    account = job.account if job.switches_user and not by_enter else None
    groups = os.getgrouplist(account.pw_name, account.pw_gid) if account else []
    is_root = os.getuid() == 0

    def become() -> None:
        group.enter()  # still as root, who alone may
        if user_limit is not None:
            _soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
            limit = user_limit if hard == resource.RLIM_INFINITY else min(hard, user_limit)
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
        if score is not None and is_root:
            set_oom_score("self", score)
        if account is not None:
            os.setgroups(groups)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            tree.forbid_new_privileges()

    return become


def _user_limit(job: Job) -> int | None:
    """How many processes the job's user may have, where its cgroup has no limit; never where that is the runner's own.

    The kernel counts all of the user's, and so those of other jobs: this keeps only the machine from being filled.
    """
    limit = job.spec.get("process_limit")
    return USER_FACTOR * limit if limit and job.switches_user else None


def oom_score(spec: dict[str, Any]) -> int | None:
    """How soon the kernel ends the job when the host is out of memory: before all that use less than they asked for.

    Its measure is 1000 for a process with all memory, plus this. So one above the job's own share counts over 1000.
    """
    asked, total = spec.get("memory_mib"), spec.get("host_memory_mib")
    return max(2, min(999, 1000 - 1000 * asked // total)) if asked and total else None


def set_oom_score(pid: int | str, score: int) -> None:
    """Set it for a process and those that it starts from now on. Raises OSError."""
    with open(f"/proc/{pid}/oom_score_adj", "w", encoding="utf-8") as file:
        file.write(str(score))


def _enter_working_dir(job: Job) -> None:
    """Change directory with the job's rights: with root's, it could enter a directory that is closed to the job."""
    folder = job.spec["working_dir"] or job.run_dir
    try:
        with acting_as(job.account):
            os.chdir(os.path.join(job.run_dir, folder))
    except FileNotFoundError:
        raise CannotStart(f"working_dir {folder!r} does not exist on this host") from None
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in HOST_ERRORS:
            raise
        raise CannotStart(f"working_dir {folder!r} can't be entered: {error}") from error


def script(job: Job) -> str:
    """The commands, which stop at the first that fails.

    Each is an `eval` of its own, so that `set -e` sees its whole status: a bare `a && b` would not stop if `a` fails.
    """
    return "\n".join(["set -e", *(f"eval {shlex.quote(command)}" for command in job.spec["commands"])]) + "\n"


def _script_arguments(job: Job, script: str) -> list[str]:
    if len(script.encode()) <= SCRIPT_ARGUMENT_LIMIT:
        return ["-c", script]
    path = os.path.join(job.run_dir, ".dstackweb-commands.sh")
    with among_files_of(job.account):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        script_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(script_file, "w", encoding="utf-8") as file:
            file.write(script)
    return [path]


def _base_env(job: Job) -> dict[str, str]:
    """The environment of every job, without the server's.

    Python is unbuffered: it would hold back output that isn't a terminal, and users follow logs live.
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


def dstack_env(job: Job) -> dict[str, str]:
    """Variables for a job's place among its nodes and its GPUs, and for where it reports tasks and leaves files."""
    spec = job.spec
    env = {
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
    if spec.get("service_port"):
        env["DSTACK_SERVICE_PORT"] = str(spec["service_port"])
    if tasks := spec.get("tasks"):
        env |= {"DSTACKWEB_TASKS_URL": job.api.rstrip("/") + tasks["path"], "DSTACKWEB_TASKS_TOKEN": tasks["token"]}
    if spec.get("artifacts"):
        env["DSTACKWEB_ARTIFACTS"] = os.path.join(job.run_dir, ARTIFACTS, str(spec["attempt"]))
    return env


def _after_setup(job: Job, env: dict[str, str]) -> dict[str, str]:
    """The environment after the host's set-up snippet, which runs by itself so that `set -e` doesn't affect it.

    Raises HostFault where the snippet fails: it is the host's, and would fail every run.
    """
    setup = job.spec.get("setup") or ""
    if not setup.strip():
        return {}
    # Files, not pipes: background processes of the snippet may keep them open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as chatter:
        argv = [job.spec["shell"], "-c", f"exec 3>&1 1>&2\n{setup}\nenv -0 >&3"]
        try:
            with _fenced(job, argv, env) as start:
                process = subprocess.Popen(**start, stdin=subprocess.DEVNULL, stdout=output, stderr=chatter)
            with process:
                status = _setup_status(process, output, chatter)
        except subprocess.TimeoutExpired as error:
            raise HostFault(f"the host's set-up snippet failed: {error}") from error
        except (OSError, subprocess.SubprocessError) as error:  # it did not begin, perhaps for want of the run's shell
            if getattr(error, "errno", None) in HOST_ERRORS:
                raise
            raise CannotStart(f"the host's set-up snippet failed: {error}") from error
        if output.seek(0, os.SEEK_END) > SETUP_OUTPUT:
            raise HostFault("the host's set-up snippet leaves an environment of more than 1 MiB")
        output.seek(0)
        chatter.seek(0)
        if status:
            message = chatter.read(SETUP_OUTPUT).decode(errors="replace").strip()[-300:]
            raise HostFault(f"the host's set-up snippet failed with {status}: {message}")
        lines = output.read().decode(errors="surrogateescape").split("\0")
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name: value for name, _, value in pairs if name not in ("_", "PWD", "SHLVL")}


def _setup_status(process: subprocess.Popen[bytes], *written: IO[bytes]) -> int:
    """Wait for a set-up snippet. Raises HostFault for too much output, TimeoutExpired."""
    until = time.monotonic() + SETUP_S
    try:
        while True:
            try:
                return process.wait(SETUP_LOOK_S)
            except subprocess.TimeoutExpired:
                if sum(os.fstat(file.fileno()).st_size for file in written) > SETUP_WRITTEN:
                    raise HostFault("the host's set-up snippet writes more than 16 MiB") from None
                if time.monotonic() > until:
                    raise subprocess.TimeoutExpired(process.args, SETUP_S) from None
    finally:
        process.kill()
