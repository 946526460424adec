"""A job's processes: all below the runner, all that carry the job's marker, and all of its shell's session.

The runner adopts orphans (PR_SET_CHILD_SUBREAPER), so while it lives nothing gets out from below it. Marker and
session are for whoever comes after a runner that was killed. Where there is no /proc, `ps` tells less: processes below
the runner and in the shell's process group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

MARKER = "DSTACKWEB_JOB"
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


class Process(NamedTuple):
    """One living process. `start` (clock ticks since boot) tells it from a later one with its pid."""

    pid: int
    parent: int
    session: int
    start: int


class Shell(NamedTuple):
    """The job's first process, which leads its session. `system` names the boot and the container it ran in."""

    pid: int
    start: int
    system: str


def hide_memory() -> None:
    """Keep this process's memory and environment (a token is in it) from processes of the same user."""
    _prctl(PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of whatever descends from this process from now on and loses its own parent."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Be killed when the parent dies; call it after the last change of user, which would cancel it."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def members(job: str, shell: Shell | None) -> set[int]:
    """The living processes of a job except this one. A zombie runs nothing."""
    everything = {each.pid: each for each in alive()}
    marker = f"{MARKER}={job}".encode()
    if shell is not None and shell.system != system():
        shell = None
    found = {pid for pid, each in everything.items() if _in_session(each, shell, everything) or _carries(pid, marker)}
    above = found | {os.getpid()}
    while below := {pid for pid, each in everything.items() if each.parent in above} - above:
        above |= below
    return above - {os.getpid()}


def _in_session(process: Process, shell: Shell | None, everything: dict[int, Process]) -> bool:
    """Whether a process is of the shell's session, and not of one that got the same number later."""
    if shell is None or process.session != shell.pid or process.start < shell.start:
        return False
    leader = everything.get(shell.pid)
    return leader is None or leader.start == shell.start


def _carries(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:
        return False


def alive() -> list[Process]:
    """Every living process of the machine that this one may see."""
    if not os.path.exists("/proc/self/stat"):
        return _by_ps()
    return [each for name in os.listdir("/proc") if name.isdigit() and (each := _by_proc(int(name))) is not None]


def identify(pid: int) -> Shell:
    """A process that can be recognised later by whoever has only its number."""
    found = _by_proc(pid)
    return Shell(pid, found.start if found else 0, system())


def system() -> str:
    """Changes with each boot and each container: numbers of processes mean nothing beyond."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _by_proc(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in brackets may hold anything, brackets and blanks included.
            values = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    if len(values) < 20 or values[0] in (b"Z", b"X"):
        return None
    return Process(pid, int(values[1]), int(values[3]), int(values[19]))


def _by_ps() -> list[Process]:
    """Without /proc. The shell leads its process group as well as its session, and most of the job stays in that."""
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="], stdout=subprocess.PIPE) as ps:
        lines = [line.split() for line in ps.communicate()[0].splitlines()]
    found = [Process(int(pid), int(parent), int(group), 0) for pid, parent, group, stat in lines if stat[:1] != b"Z"]
    return [each for each in found if each.pid != ps.pid]


def send(pids: Iterable[int], number: int) -> None:
    """Signal each; one that has ended meanwhile is no error, and one that may not be signalled stays a member.

    Parents mostly come first: a shell should learn that it was asked to end before it sees its children die of it.
    """
    for pid in sorted(pids):
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


class Reaped(NamedTuple):
    """What a reap brought: wait statuses by pid, and whether this process has no child left at all."""

    statuses: dict[int, int]
    childless: bool


def reap() -> Reaped:
    """Collect children that have ended, adopted ones too."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return Reaped(statuses, True)
        if pid == 0:
            return Reaped(statuses, False)
        statuses[pid] = status
