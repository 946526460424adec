"""A job's runner, its processes and its files on this machine. Each step may be repeated or doubled at any moment. A
living runner is recognized by the lock that it holds."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from django.conf import settings

from dstackweb.backends.contract import StartFailed
from dstackweb.runner import disk
from dstackweb.runner.engine import Finder
from dstackweb.runner.isolation import can_traverse, find_user, make_runs_dir
from dstackweb.runner.jobs import LocalJobs, NotLaunched, old_runs, remove_runs
from dstackweb.runner.relay import start_relay

log = logging.getLogger(__name__)

PATH_KEPT_S = 60.0
"""How long a look at the directories in PATH counts."""
AT_ONCE = 200
"""Jobs whose files are removed after one look at all processes."""


def here() -> LocalJobs:
    """The jobs of this machine."""
    return LocalJobs(str(settings.DSTACKWEB_HOME), log.warning)


def state_dir(job_id: UUID) -> Path:
    return Path(here().folder(str(job_id)))


def relay_path() -> Path:
    """Where this host's process takes the heartbeats of its runners (`runner.relay`); only its user can reach it."""
    return Path(here().folder("heartbeats"))


def take_heartbeats() -> bool:
    """Send the heartbeats of this machine's runners together from now on. If it can't, each sends its own."""
    with contextlib.suppress(OSError):
        here().make_folder()
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
        str(settings.DSTACKWEB_HOME), settings.DSTACKWEB_ENGINE,
        network=settings.DSTACKWEB_CONTAINER_NETWORK, volumes=settings.DSTACKWEB_JOB_VOLUMES,
    )  # fmt: skip


def engine_orders(image: str | None) -> dict[str, object] | None:
    """What a runner needs to know of the container engine; None for a job without an image, or without an engine."""
    found = engine().usable() if image else None
    return found.stored() if found else None


def orders(job_id: UUID, token: str, runs_dir: str, run_uid: UUID, node: int = 0) -> dict[str, object]:
    """What each runner's standard input has (docs/runner.md); `runs_dir` is the host's."""
    return {
        "job": str(job_id),
        "token": token,
        "state_dir": str(state_dir(job_id)),
        "run_dir": str(run_dir(runs_dir, run_uid, node)),
        "insecure": settings.DSTACKWEB_INSECURE_HTTP,
    }


def ensure_runner(order: Mapping[str, object]) -> None:
    """Start a job's runner, detached from this process, unless one is alive. Raises StartFailed.

    `order` is the runner's standard input (docs/runner.md). The runner gets nothing of the server's environment.
    """
    job_id = UUID(str(order["job"]))
    for folder in (state_dir(job_id).parent, state_dir(job_id)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_runs_dir(Path(str(order["run_dir"])).parents[1])
    try:
        here().launch(dict(order))
    except NotLaunched as error:
        raise StartFailed(str(error)) from error


def probe_runner(runs_dir: str, job_id: UUID, token: str) -> None:
    """Start a runner as for a job, which only checks its files and the API, and wait for its answer.

    `job_id` is of no job, `token` of that id. Raises StartFailed, OSError.
    """
    try:
        ensure_runner({"probe": True, "api": settings.DSTACKWEB_API_URL, **orders(job_id, token, runs_dir, job_id)})
    finally:
        disk.remove(state_dir(job_id))


def runner_alive(job_id: UUID) -> bool:
    """Whether a job's runner is alive here."""
    return here().has_runner(str(job_id))


def tree_gone(job_id: UUID) -> bool:
    """Whether the job's runner and all its processes have certainly ended here."""
    return here().is_gone(str(job_id))


def kill_job(job_id: UUID) -> bool:
    """SIGKILL a job's process tree, then its runner. True when all are confirmed gone; else call again."""
    return here().kill(str(job_id))


def jobs_here() -> list[UUID]:
    """The jobs whose runners have files here."""
    return list(map(UUID, here().all()))


def old_job_files(active: Collection[str], older_than_s: float) -> list[UUID]:
    """Jobs with old files here that are not among the `active` ids.

    Young files stay, since a job may have become active after `active` was read.
    """
    return [UUID(job) for job in here().old(older_than_s) if job not in active]


def forget_all(jobs: Sequence[UUID], ends: float) -> int:
    """Remove the files of these jobs' runners, until the monotonic time `ends`; returns how many.

    Those of a job stay while a process of it is alive. One look at all processes serves many jobs.
    """
    forgotten = 0
    for start in range(0, len(jobs), AT_ONCE):
        if time.monotonic() >= ends:
            break
        forgotten += here().forget([str(job_id) for job_id in jobs[start : start + AT_ONCE]])
    return forgotten


def old_run_dirs(runs_dir: str, may_go: Callable[[Sequence[str]], Collection[str]], older_than_s: float) -> list[str]:
    """The runs (uids) with old directories here that `may_go` returns; it gets some of them and returns which.

    The directory's age says when its last node started: it is never younger than that, and only `may_go` knows the end.
    """
    old = old_runs(runs_dir, older_than_s)
    return [name for start in range(0, len(old), 500) for name in may_go(old[start : start + 500])]


def remove_run_dirs(runs_dir: str, uids: Collection[str], ends: float) -> int:
    """Remove the directories of these runs, until the monotonic time `ends`; returns how many."""
    return remove_runs(runs_dir, uids, ends, log.warning)
