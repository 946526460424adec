"""Processes that end with their parent, locks that end with their process, files, and garbage collection."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import resource
import secrets
import signal
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "DSTACKWEB_SUPERVISOR"
"""Set by a supervisor to its pid: the program must end with that process."""
REFUSED = 78
"""Exit code of a program that does not fit the database (EX_CONFIG): starting it again changes nothing."""

_prctl = ctypes.CDLL(None, use_errno=True).prctl
_forking_pid = 0


def die_with_parent(parent: int | None = None) -> None:
    """End this process, and the processes that it forks, when its parent ends for any reason.

    After kill -9 of one of them no process below it survives. `parent` is the pid of a parent that may have ended
    already. Programs started by subprocess (runners) are not affected.

    The kernel sends SIGKILL when the *thread* that forked this process ends: fork from a permanent thread.
    """
    global _forking_pid
    _die_with(parent or os.getppid())
    if not _forking_pid:
        os.register_at_fork(before=_remember_pid, after_in_child=lambda: _die_with(_forking_pid))
    _remember_pid()


def die_with_supervisor() -> None:
    """`die_with_parent` for a program started by a supervisor; does nothing for other programs."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        die_with_parent(int(parent))


def try_lock(path: Path) -> IO[str] | None:
    """Lock a file until the returned file is closed; None while it is locked elsewhere.

    The kernel releases the lock of a process that dies. Who can read the file can lock it, so only its owner can.
    """
    try:
        return wait_for_lock(path, fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def wait_for_lock(path: Path, how: int = 0) -> IO[str]:
    """As `try_lock`, but waits until the file is free."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "a+")  # noqa: SIM115
    try:
        if os.fstat(file.fileno()).st_uid == os.geteuid():
            os.fchmod(file.fileno(), 0o600)  # an older version's
        fcntl.flock(file, fcntl.LOCK_EX | how)
    except BaseException:
        file.close()
        raise
    return file


def raise_file_limit(wanted: int) -> int:
    """Let this process have so many open files, as far as it may; returns how many it may have now."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(now, min(most, wanted))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return files


def write_once(path: Path, content: bytes) -> None:
    """Make a file for its owner alone, unless another process does: link() puts the whole of it in place, or fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def collect_rarely() -> None:
    """Run the garbage collector less often, for processes whose requests make many objects and few cycles.

    With the default of every 700 objects it took a sixth of a large request's time.
    """
    gc.set_threshold(50_000, 10, 10)


def collect_no_more_of_what_is_loaded() -> None:
    """Leave the objects of the loaded program out of all later collections: it never becomes garbage.

    A collection of everything took a web process 360 to 580 ms on a busy machine: one request in many waited for it.
    """
    gc.collect()
    gc.freeze()


def _remember_pid() -> None:
    global _forking_pid
    _forking_pid = os.getpid()


def _die_with(parent: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before that.
    if os.getppid() != parent:
        os._exit(1)
