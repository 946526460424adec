"""A job's runner, its processes and its files on this machine.

Each step may be repeated or doubled at any moment. A living runner is recognized by the lock that it holds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

import psutil
from django.conf import settings

from dstackweb.backends.contract import StartFailed
from dstackweb.runner import cgroups, container, removal, tree
from dstackweb.runner.engine import Finder
from dstackweb.runner.isolation import can_traverse, find_user, make_runs_dir
from dstackweb.runner.launcher import Launcher, NotLaunched
from dstackweb.runner.relay import start_relay
from dstackweb.runner.state import job_uid, runner_lives

log = logging.getLogger(__name__)

KILL_S = 2.0
"""How long a kill waits for the processes to end; the next call continues."""
PATH_KEPT_S = 60.0
"""How long a look at the directories in PATH counts."""
AT_ONCE = 200
"""Jobs whose files are removed after one look at all processes."""


def state_dir(job_id: UUID) -> Path:
    """The directory of a job's runner."""
    return _jobs_dir() / str(job_id)


def _jobs_dir() -> Path:
    return Path(settings.DSTACKWEB_HOME) / "jobs"


def relay_path() -> Path:
    """Where this host's process takes the heartbeats of its runners (`runner.relay`); only its user can reach it."""
    return _jobs_dir() / "heartbeats"


def take_heartbeats() -> bool:
    """Send the heartbeats of this machine's runners together from now on. If it can't, each sends its own."""
    with contextlib.suppress(OSError):
        _jobs_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    return start_relay(settings.DSTACKWEB_API_URL, str(relay_path()), insecure=settings.DSTACKWEB_INSECURE_HTTP)


def run_dir(runs_dir: str, run_uid: UUID, node: int) -> Path:
    """The working directory of one node of a run, kept across attempts. `runs_dir` is the host's."""
    return Path(runs_dir) / str(run_uid) / f"node-{node}"


def job_path() -> str:
    """The PATH for jobs: the server's, without its virtual environment and directories closed to the jobs' user.

    With a closed directory in it, a shell reports "permission denied" (126) for a missing command (127).
    """
    return _job_path(os.environ.get("PATH", os.defpath), settings.DSTACKWEB_JOB_USER, time.monotonic() // PATH_KEPT_S)


@functools.lru_cache(maxsize=1)
def _job_path(path: str, job_user: str, _moment: float) -> str:
    own = Path(sys.prefix, "bin") if sys.prefix != sys.base_prefix else None
    user = find_user(job_user) if os.getuid() == 0 else None
    gids = os.getgrouplist(user.pw_name, user.pw_gid) if user else []
    kept = [
        entry
        for entry in path.split(os.pathsep)
        if (folder := Path(entry)).is_absolute()
        and os.path.isdir(folder)  # Path.is_dir raises for what lies in a closed directory
        and (own is None or folder.resolve() != own.resolve())
        and (user is None or can_traverse(folder.resolve(), user.pw_uid, gids))
    ]
    return os.pathsep.join(kept) or os.defpath


@functools.cache
def engine() -> Finder:
    """This machine's container engine, as found by this process."""
    return Finder(
        settings.DSTACKWEB_ENGINE,
        network=settings.DSTACKWEB_CONTAINER_NETWORK,
        volumes=settings.DSTACKWEB_JOB_VOLUMES,
    )


def engine_orders(image: str | None) -> dict[str, object] | None:
    """What a runner needs to know of the container engine; None for a job without an image, or without an engine."""
    found = engine().current()[0] if image else None
    return found.stored() if found else None


def ensure_runner(order: Mapping[str, object]) -> None:
    """Start a job's runner, detached from this process, unless one is alive. Raises StartFailed.

    `order` is the runner's standard input (docs/runner.md). The runner gets nothing of the server's environment.
    """
    job_id = UUID(str(order["job"]))
    for folder in (state_dir(job_id).parent, state_dir(job_id)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_runs_dir(Path(str(order["run_dir"])).parents[1])
    answer = _launch(order)
    if "pid" not in answer and not answer.get("already"):
        raise StartFailed(str(answer.get("error") or f"its runner answered {answer!r}"))


def probe_runner(runs_dir: str, job_id: UUID, token: str) -> None:
    """Start a runner as for a job, which only checks its files and the API, and wait for its answer.

    `job_id` is of no job, `token` of that id. Raises StartFailed, OSError.
    """
    try:
        ensure_runner(
            {
                "probe": True,
                "api": settings.DSTACKWEB_API_URL,
                "job": str(job_id),
                "token": token,
                "state_dir": str(state_dir(job_id)),
                "run_dir": str(run_dir(runs_dir, job_id, 0)),
                "insecure": settings.DSTACKWEB_INSECURE_HTTP,
            }
        )
    finally:
        removal.remove(state_dir(job_id))


def _launch(order: Mapping[str, object]) -> dict[str, object]:
    try:
        return _launcher(str(settings.BASE_DIR)).launch(order)
    except NotLaunched as error:
        raise StartFailed(str(error)) from error


@functools.cache
def _launcher(program: str) -> Launcher:
    """This process's own, kept for its life. `program`: the folder of the code."""
    # -S: the runner needs the standard library alone, and starts twice as fast without the rest.
    env = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONPATH": program}
    return Launcher([sys.executable, "-S", "-m", "dstackweb.runner"], env)


def runner_alive(job_id: UUID) -> bool:
    """Whether a job's runner is alive here."""
    return runner_lives(str(state_dir(job_id)))


def nudge(job_id: UUID) -> bool:
    """Make the job's runner call the API now. False if no runner is alive."""
    runner = _runner(job_id)
    if runner is None:
        return False
    send([runner], signal.SIGUSR1)
    return True


def tree_gone(job_id: UUID) -> bool:
    """Whether the job's runner and all its processes have certainly ended here."""
    return not runner_alive(job_id) and not tree_of(job_id, None) and container.is_gone(str(state_dir(job_id)))


def is_ours(pid: int) -> bool:
    """Whether a process belongs to a job whose runner is alive here.

    Processes left behind by an earlier job count as strangers on their GPU.
    """
    try:
        pids = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
    except psutil.Error:
        pids = [pid]
    marked = set(map(tree.job_of, pids))
    if any(_is_uuid(job) and runner_alive(UUID(job)) for job in marked):
        return True
    # A process that cleaned its environment is still below its runner.
    return any(runner.pid in pids for job in jobs_here() if (runner := _runner(job)) is not None)


def kill_job(job_id: UUID) -> bool:
    """SIGKILL a job's process tree, then its runner. True when all are confirmed gone; else call again.

    The runner is stopped meanwhile, so that it starts nothing more and still adopts orphans. It is killed last and
    writes no end: the next runner of the job reports what happened.
    """
    runner = _runner(job_id)
    if runner is not None:
        send([runner], signal.SIGSTOP)
    if not _kill_until_gone(job_id, runner):
        if runner is not None:
            send([runner], signal.SIGCONT)
        return False
    if runner is not None:
        send([runner], signal.SIGKILL)
        ends = time.monotonic() + KILL_S
        while runner_alive(job_id) and time.monotonic() < ends:
            time.sleep(0.01)
    if not container.end(str(state_dir(job_id))) or not tree_gone(job_id):
        return False
    cgroups.read(str(state_dir(job_id))).remove()
    return True


def _kill_until_gone(job_id: UUID, runner: psutil.Process | None) -> bool:
    """Repeatedly, since a process may fork during the search."""
    ends = time.monotonic() + KILL_S
    group = cgroups.read(str(state_dir(job_id)))
    while processes := tree_of(job_id, runner):
        group.kill()
        send(processes, signal.SIGKILL)
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


def forget(job_id: UUID) -> bool:
    """Remove the files of a job's runner, after its end was reported. False while a process of the job is alive."""
    if not tree_gone(job_id) or not container.end(str(state_dir(job_id))):
        return False
    cgroups.read(str(state_dir(job_id))).remove()
    removal.remove(state_dir(job_id), log.warning)
    return True


def jobs_here() -> list[UUID]:
    """The jobs whose runners have files here."""
    return [UUID(folder.name) for folder in _folders(_jobs_dir()) if _is_uuid(folder.name)]


def old_job_files(active: Collection[str], older_than_s: float) -> list[UUID]:
    """Jobs with old files here that are not among the `active` ids.

    Young files stay, since a job may have become active after `active` was read.
    """
    return [
        UUID(folder.name)
        for folder in _folders(_jobs_dir())
        if _is_uuid(folder.name) and folder.name not in active and _age_s(folder) > older_than_s
    ]


def forget_all(jobs: Sequence[UUID], ends: float) -> int:
    """`forget` these jobs, until the monotonic time `ends`; returns how many.

    One look at all processes serves many jobs: only with a process that has its mark, or a runner, a job is alive.
    """
    forgotten = 0
    for start in range(0, len(jobs), AT_ONCE):
        if time.monotonic() >= ends:
            break
        marked = {tree.job_of(pid) for pid in tree.pids()}
        for job_id in jobs[start : start + AT_ONCE]:
            if str(job_id) not in marked and not runner_alive(job_id) and container.end(str(state_dir(job_id))):
                removal.remove(state_dir(job_id), log.warning)
                forgotten += 1
    return forgotten


def old_run_dirs(runs_dir: str, may_go: Callable[[Sequence[str]], Collection[str]], older_than_s: float) -> list[str]:
    """The runs (uids) with old directories here that `may_go` returns; it gets some of them and returns which.

    The directory's age says when its last node started: it is never younger than that, and only `may_go` knows the end.
    """
    old = [
        folder.name for folder in _folders(Path(runs_dir)) if _is_uuid(folder.name) and _age_s(folder) > older_than_s
    ]
    return [name for start in range(0, len(old), 500) for name in may_go(old[start : start + 500])]


def remove_run_dirs(runs_dir: str, uids: Collection[str], ends: float) -> int:
    """Remove the directories of these runs, until the monotonic time `ends`; returns how many."""
    removed = 0
    for uid in uids:
        if time.monotonic() >= ends:
            break
        folder = Path(runs_dir) / str(UUID(uid))
        if folder.is_dir() and not folder.is_symlink():
            removed += removal.remove(folder, log.warning)  # else it is retried next time
    return removed


def _runner(job_id: UUID) -> psutil.Process | None:
    """The runner of a job, if alive. The PID in its lock file counts only while the lock is held: PIDs are reused."""
    try:
        pid = int((state_dir(job_id) / "lock").read_text())
        return psutil.Process(pid) if runner_alive(job_id) else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None


def _folders(above: Path) -> list[os.DirEntry[str]]:
    """The real directories in `above`, which may not exist."""
    try:
        with os.scandir(above) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _age_s(folder: os.DirEntry[str]) -> float:
    """Seconds since a change in the directory; 0 if it vanished."""
    try:
        return max(0.0, time.time() - folder.stat(follow_symlinks=False).st_mtime)
    except FileNotFoundError:
        return 0.0


def _is_uuid(text: str) -> bool:
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False


def tree_of(job_id: UUID, runner: psutil.Process | None) -> list[psutil.Process]:
    """The living processes of a job without its runner: those in its cgroup, those with its marker, and all below these
    and the runner.

    Without a cgroup, a process that cleaned its environment is found only while its runner lives, which adopts orphans.
    """
    everything, folder = list(psutil.process_iter()), str(state_dir(job_id))
    found = tree.processes(str(job_id), cgroups.read(folder), {runner.pid} if runner else set(), job_uid(folder))
    return [process for process in everything if process.pid in found]


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal each; an ended one is no error, and another process with its PID gets no signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
