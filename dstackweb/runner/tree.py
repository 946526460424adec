"""A job's processes: all descendants of the runner, which adopts orphans, and all with the job's marker."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

MARKER = "DSTACKWEB_JOB"
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def protect_memory() -> None:
    """Protect the runner's memory, with its token, from processes of the same user."""
    _prctl(PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Adopt descendants of this process that lose their parent from now on."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def processes(job: str) -> set[int]:
    """The living processes of a job except this one. A zombie runs nothing."""
    marker = f"{MARKER}={job}".encode()
    parents = _parents()
    found = {pid for pid in parents if _carries(pid, marker)}
    above = found | {os.getpid()}
    while below := {pid for pid, parent in parents.items() if parent in above} - above:
        above |= below
    return above - {os.getpid()}


def _parents() -> dict[int, int]:
    """Every living process and its parent."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command in brackets may hold anything, brackets and blanks included.
                    status, parent = file.read().rpartition(b") ")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if status not in (b"Z", b"X"):
                parents[int(name)] = int(parent)
    return parents


def _carries(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:
        return False


def send(pids: set[int], number: signal.Signals) -> None:
    """Signal each; one that has ended meanwhile is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def kill(pids: set[int]) -> None:
    """Stop all before killing any, so that none sees another's end: a shell would print it, a loop would continue."""
    send(pids, signal.SIGSTOP)
    send(pids, signal.SIGKILL)


def reap() -> dict[int, int]:
    """Collect children that have ended: pid → wait status."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def end(job: str) -> None:
    """Kill what is left of a job, until the last process is confirmed gone."""
    pause_s = 0.01
    while left := processes(job):
        kill(left)
        time.sleep(pause_s)
        # A process that hangs in the kernel may take long.
        pause_s = min(0.5, pause_s * 2)
        reap()
