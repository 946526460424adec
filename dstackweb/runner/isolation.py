"""How jobs are isolated from the server on a machine, and where their directories are (docs/design.md#execution)."""

from __future__ import annotations

import functools
import hashlib
import os
import pwd
import re
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path

from dstackweb.runner import sandbox
from dstackweb.runner.state import say

CONTAINER, SANDBOX, PROJECT = "container", "sandbox", "project"
USER, SHARED, NONE = "user", "shared", "none"
"""Jobs run in a container, as their project's user in a sandbox or without one, as one other user, as the server's or
agent's own, or not at all (`backends.models.Isolation`)."""
LEVELS = (NONE, SHARED, USER, PROJECT, SANDBOX, CONTAINER)
"""Weakest first."""
PROJECT_UIDS = "1900000000-1900999999"
"""Numbers that neither distributions nor systemd use."""
TRIED_EVERY_S = 600.0
_UIDS = re.compile(r"(\d{4,10})-(\d{4,10})", re.ASCII)


@dataclass(frozen=True)
class Arrangement:
    """How a machine runs jobs. `error` says why jobs are refused.

    `job_user` is a user's name, or the first and last number of the projects' users; empty for the server's own.
    """

    isolation: str
    job_user: str
    runs_dir: Path
    error: str = ""


def arrange(home: Path, *, uid: int, job_user: str, shared_uid: bool) -> Arrangement:
    """Decide for a server running as `uid` with its files in `home`.

    Root runs jobs as `job_user`. Other users can't switch users, and refuse jobs unless `shared_uid` lets them share
    the server's own.
    """
    if uid == 0:
        user = find_user(job_user)
        if user is not None and user.pw_uid != 0:
            kind = PROJECT if uids_of(job_user) else USER
            return Arrangement(kind, job_user, runs_dir(home, user))
        reason = f"there is no user {job_user!r}" if user is None else f"{job_user!r} is root, which no job may be"
        error = f"{reason}: set DSTACKWEB_JOB_USER to the user that jobs run as"
    else:
        error = (
            "jobs would share the server's user: start as root, or set DSTACKWEB_SHARED_UID=1 where everyone "
            "who may submit runs is trusted"
        )
    if shared_uid:
        return Arrangement(SHARED, "", runs_dir(home, None))
    return Arrangement(NONE, "", runs_dir(home, None), error)


def runs_dir(home: Path, user: pwd.struct_passwd | None) -> Path:
    """The directory of runs: in the server's home if the jobs' user has access, else under /var/lib.

    It is the same at each start, so that checkpoints are found again. `user` None means the server's own.
    """
    home = home.resolve()
    if user is None or can_traverse(home, user.pw_uid, os.getgrouplist(user.pw_name, user.pw_gid)):
        return home / "runs"
    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:8]
    return Path(f"/var/lib/dstackweb-{digest}/runs")


def can_traverse(path: Path, uid: int, gids: list[int]) -> bool:
    """Whether a user may pass through a directory and all above it, by their mode bits. `path` must exist."""
    return all(_may_enter(folder.stat(), uid, gids) for folder in (path, *path.parents))


def _may_enter(info: os.stat_result, uid: int, gids: list[int]) -> bool:
    if info.st_uid == uid:
        return bool(info.st_mode & stat.S_IXUSR)
    if info.st_gid in gids:
        return bool(info.st_mode & stat.S_IXGRP)
    return bool(info.st_mode & stat.S_IXOTH)


def make_runs_dir(path: Path) -> None:
    """Create the directory so that other users can pass through it but not list it."""
    for folder in (path.parent, path):
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o711)


def isolates(isolation: str, least: str) -> bool:
    """Whether an isolation is as strong as required; "" requires none."""
    return not least or LEVELS.index(isolation) >= LEVELS.index(least)


def of_job(job_user: str | None, writable: list[str] | None) -> str:
    if writable is not None:
        return SANDBOX
    if not job_user:
        return SHARED
    return PROJECT if uids_of(job_user) else USER


def find_user(name: str) -> pwd.struct_passwd | None:
    """A user of this machine by name; of a range, its first, who may enter what all of them may."""
    try:
        return account_of(name, 0)
    except KeyError:
        return None


def uids_of(job_user: str) -> tuple[int, int] | None:
    """The first and the last number of the projects' users; None if it is the name of one user."""
    uids = _UIDS.fullmatch(job_user)
    return (int(uids[1]), int(uids[2])) if uids else None


def account_of(job_user: str, project: int) -> pwd.struct_passwd:
    """The user of a project's jobs. Raises KeyError if there is none.

    The numbers of projects are never used again, and so those of their users: files of a deleted project stay its own.
    """
    uids = uids_of(job_user)
    if uids is None:
        return pwd.getpwnam(job_user)
    first, last = uids
    if not 1000 <= first <= first + project <= last < 2**31:
        raise KeyError(job_user)
    uid = first + project
    return pwd.struct_passwd((f"project-{project}", "x", uid, uid, "", "/nonexistent", "/bin/sh"))


def prepare(arrangement: Arrangement) -> Arrangement:
    """Create the runs' directory; if that fails, the arrangement refuses jobs and says why. Try whether jobs of
    projects' users can have a sandbox.
    """
    try:
        make_runs_dir(arrangement.runs_dir)
    except OSError as error:
        reason = f"the runs' directory {arrangement.runs_dir} can't be made: {error.strerror}"
        return replace(arrangement, isolation=NONE, error=reason)
    if arrangement.isolation == PROJECT and _sandbox_works(arrangement.job_user, time.monotonic() // TRIED_EVERY_S):
        return replace(arrangement, isolation=SANDBOX)
    return arrangement


@functools.lru_cache(maxsize=1)
def _sandbox_works(job_user: str, _moment: float) -> bool:
    reason = sandbox.obstacle(account_of(job_user, 0))
    if reason:
        say(f"jobs run without a sandbox: {reason}")
    return not reason
