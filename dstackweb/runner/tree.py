"""A job's processes: all of its cgroup, all descendants of the runner, which adopts orphans, and all with its marker.

The cgroup finds them all. The others are what there is without one, and cost little beside it. Any program can set any
marker, so it counts only where neither the cgroup nor the user says that the process is another job's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping

from dstackweb.runner.cgroups import Group, jobs_of, stat_of

MARKER = "DSTACKWEB_JOB"
_VARIABLE = f"\0{MARKER}=".encode()
ENVIRON_MAX = 2 << 20
"""Bytes: more than a job is started with."""
MARKER_MAX = 100
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
PR_SET_NO_NEW_PRIVS = 38


def protect_memory() -> None:
    """Protect the runner's memory, with its token, from processes of the same user."""
    _prctl(PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Adopt descendants of this process that lose their parent from now on."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def detach(work: Callable[[], None], source: int = 0, sink: int = 1, second: int | None = None) -> None:
    """Run `work` in another process, with the descriptors `source`, `sink` and `second` as 0, 1 and 3, and else only 2.

    It is no child of this process, and its signals don't reach it. Call this before `adopt_orphans`, so that it doesn't
    become an orphan of the job.
    """
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            os.dup2(source, 0)
            os.dup2(sink, 1)
            if second is not None:
                os.dup2(second, 3)
            os.closerange(
                3 if second is None else 4, 65536
            )  # among them the runner's lock, which must end with the runner
            work()
    finally:
        os._exit(0)


def forbid_new_privileges() -> None:
    """No program that this process starts can give it more rights, as sudo would."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def processes(job: str, group: Group, runner: set[int] | None = None, uid: int | None = None) -> set[int]:
    """The living processes of a job except its runner: this process, or those given. A zombie runs nothing.

    `uid` is the user that the job's commands run as, if that is another than the runner's.
    """
    own = {os.getpid()} if runner is None else runner
    parents = _parents()
    found = {pid for pid in parents if _may_be_of(pid, uid) and job_of(pid) == job}
    above = found | own
    while below := {pid for pid, parent in parents.items() if parent in above} - above:
        above |= below
    return (above | group.processes()) - own


def below(above: set[int]) -> set[int]:
    parents, found = _parents(), set(above)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - above


def born(pid: int) -> str:
    """When a process was started, in the kernel's ticks, by which a later one of its number differs; empty if gone."""
    return fields[19].decode() if (fields := stat_of(pid)) else ""


def pids() -> set[int]:
    return set(_parents())


def ancestry(pid: int) -> set[int]:
    """A process and all above it."""
    parents, found = _parents(), set()
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def is_childless() -> bool:
    """Whether this process, if it adopts orphans, has certainly no descendants; without a look at all processes."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _parents() -> dict[int, int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: int(fields[1]) for pid in pids if (fields := stat_of(pid))}


def job_of(pid: int) -> str:
    """The job that a process was started for; empty if nothing says so.

    Its cgroup says it. The marker in its environment counts only where that doesn't: any program can set any marker,
    and make its environment so large that reading those of many processes takes minutes.
    """
    # This process may itself be in a job, whose groups then say nothing of the processes below.
    groups = jobs_of(pid) - jobs_of(os.getpid())
    if len(groups) == 1:
        return next(iter(groups))
    job = _marker(pid)
    return job if not groups or job in groups else ""


def _marker(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = b"\0" + file.read(ENVIRON_MAX)
    except OSError:
        return ""
    at = variables.find(_VARIABLE)
    value = variables[at + len(_VARIABLE) :].partition(b"\0")[0] if at >= 0 else b""
    return value[:MARKER_MAX].decode(errors="replace")


def _may_be_of(pid: int, uid: int | None) -> bool:
    """Whether a process can be of a job that runs as this user: the user's, or of its sandbox, which root starts."""
    return uid is None or uid_of(pid) in (uid, os.getuid())


def uid_of(pid: int) -> int | None:
    """The user of a process; None for one that has ended or can't be seen from this container."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Uid:")), None)
    except OSError:
        return None


def from_above(pids: set[int], parents: Mapping[int, int]) -> list[int]:
    """These processes, parents before their children; `parents` has that of each living process.

    A shell must get a signal before it sees that a command has ended of it, or `set -e` ends it before its trap runs.
    """
    depths = dict.fromkeys(pids, 0)
    for pid in pids:
        above = parents.get(pid, 0)
        while above and depths[pid] < len(parents):  # a loop there can be while numbers are used again
            depths[pid] += 1
            above = parents.get(above, 0)
    return sorted(pids, key=depths.__getitem__)


def terminate(pids: set[int]) -> None:
    """SIGTERM to each, from above."""
    send(from_above(pids, _parents()) if len(pids) > 1 else pids, signal.SIGTERM)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each; one that has ended meanwhile is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def kill(pids: set[int], group: Group) -> None:
    """Stop all before killing any, so that none sees another's end: a shell would print it, a loop would continue."""
    group.kill()
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


def end(job: str, group: Group, uid: int | None = None) -> None:
    """Kill what is left of a job, until the last process is confirmed gone."""
    pause_s = 0.01
    while left := processes(job, group, uid=uid):
        kill(left, group)
        time.sleep(pause_s)
        # A process that hangs in the kernel may take long.
        pause_s = min(0.5, pause_s * 2)
        reap()
