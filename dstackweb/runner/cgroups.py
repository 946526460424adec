"""A control group (cgroup) for each job, of version 2 or 1, where the machine lets this process make one.

No process leaves its group by changing its parent, session or environment. So the group says what is left of a job
whose runner was killed, ends all of it, and limits its memory, CPUs and processes. `python -m
dstackweb.runner.cgroups` prints what this machine allows.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CONTROLLERS = ("memory", "cpu")
"""What a folder must give to jobs' groups to be their parent; `pids` comes with them where it can."""
PREFIX = "dstackweb-"
PERIOD_US = 100_000
MIB = 1 << 20
REMOVE_TRIES, REMOVE_WAIT_S = 20, 0.01
"""A group can't be removed until the kernel has finished its last process."""


class CannotMake(Exception):
    """No group can be made. `code` says why: `not_mounted`, `read_only`, `not_permitted` or `failed`."""

    def __init__(self, code: str, text: str = "") -> None:
        super().__init__(text or code)
        self.code, self.text = code, text


@dataclass(frozen=True)
class Group:
    """One job's group: a folder in each hierarchy that is used; none if it has no group.

    `memory_mib` and `cpus` are the limits that the kernel has accepted.
    """

    folders: tuple[str, ...] = ()
    memory_mib: int | None = None
    cpus: int | None = None

    def enter(self) -> None:
        """Move this process into the group. Raises OSError."""
        for folder in self.folders:
            _write(folder, "cgroup.procs", "0")

    def processes(self) -> set[int]:
        """The living processes in the group and in groups below it."""
        pids = {pid for folder in self._all() for pid in _pids(folder)}
        return {pid for pid in pids if pid and stat_of(pid)}

    def kill(self) -> None:
        """SIGKILL to all at once, frozen meanwhile, so that none forks away or sees another's end."""
        frozen = [folder for folder in self.folders if _freeze(folder, True)]
        try:
            for folder in self.folders:
                _attempt(folder, "cgroup.kill", "1")
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            for folder in frozen:
                _freeze(folder, False)

    def ran_out_of_memory(self) -> str:
        """`limit` if the kernel killed a process at the group's own limit, `machine` if at another; else empty."""
        for folder in self.folders:
            events = _table(folder, "memory.events") or _table(folder, "memory.oom_control")
            if events.get("oom_kill"):
                own = self.memory_mib is not None and (events.get("oom") or self._was_full(folder))
                return "limit" if own else "machine"
        return ""

    def _was_full(self, folder: str) -> bool:
        """Of version 1. Memory is counted in steps of less than 1 MiB."""
        return _number(folder, "memory.max_usage_in_bytes") >= ((self.memory_mib or 0) - 1) * MIB

    def remove(self) -> None:
        """Remove the group, if nothing is in it."""
        for folder in list(self._all(bottom_up=True)):
            for _ in range(REMOVE_TRIES):
                try:
                    os.rmdir(folder)
                except OSError as error:
                    if error.errno != errno.EBUSY or _pids(folder):
                        break
                    time.sleep(REMOVE_WAIT_S)
                else:
                    break

    def stored(self) -> str:
        return json.dumps({"folders": self.folders, "memory_mib": self.memory_mib, "cpus": self.cpus})

    def _all(self, bottom_up: bool = False) -> Iterator[str]:
        for top in self.folders:
            for folder, _, _ in os.walk(top, topdown=not bottom_up):
                yield folder


NO_GROUP = Group()


def read(state_dir: str) -> Group:
    """The group of the job with this folder; without folders if it has none."""
    try:
        with open(os.path.join(state_dir, "cgroup"), encoding="utf-8") as file:
            kept = json.load(file)
        return Group(tuple(kept["folders"]), kept["memory_mib"], kept["cpus"])
    except (OSError, ValueError, LookupError, TypeError):
        return NO_GROUP


def make(
    name: str,
    memory_mib: int | None = None,
    cpus: int | None = None,
    cpu_share: int | None = None,
    processes: int | None = None,
) -> Group:
    """Make the group of a job, or find it again. Raises CannotMake; limits that can't be set are left out.

    None is no limit. While CPUs are short, jobs get them in proportion to `cpu_share`; `processes` counts threads too.
    """
    used = [one for one in hierarchies() if one.version == 2 or one.controllers & {*CONTROLLERS, "pids", "freezer"}]
    if not used:
        raise CannotMake("not_mounted")
    folders, problem = _made([os.path.join(hierarchy.parent(), PREFIX + name) for hierarchy in used])
    if not folders:
        assert problem is not None
        raise CannotMake(_code(problem), str(problem))
    memory = [_limit_memory(folder, memory_mib) for folder in folders]
    cpu = [_limit_cpu(folder, cpus, cpu_share) for folder in folders]
    if processes:
        for folder in folders:
            _attempt(folder, "pids.max", str(processes))
    return Group(tuple(folders), memory_mib if any(memory) else None, cpus if any(cpu) else None)


def _made(wanted: list[str]) -> tuple[list[str], OSError | None]:
    """The folders that could be made and entered, and what went wrong first with another."""
    problem: OSError | None = None
    made: list[str] = []
    for folder in wanted:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o755)
            made.append(folder)
        except OSError as error:
            problem = problem or error
    if made and _trouble_entering(made) is None:
        return made, problem
    usable = []
    for folder in made:
        if (trouble := _trouble_entering([folder])) is None:
            usable.append(folder)
        else:
            problem = problem or trouble
            Group((folder,)).remove()
    return usable, problem


def support() -> dict[str, Any]:
    """What this machine allows: `version` ("v1", "v2" or empty), `memory`, `cpu`; `code` and `error` if not all."""
    try:
        group = make(f"check-{os.getpid()}", memory_mib=64, cpus=1, cpu_share=1)
    except CannotMake as cannot:
        return {"version": "", "memory": False, "cpu": False, "code": cannot.code, "error": cannot.text}
    version = _version(group)
    group.remove()
    memory, cpu = group.memory_mib is not None, group.cpus is not None
    code = "" if memory and cpu else "no_controllers"
    return {"version": version, "memory": memory, "cpu": cpu, "code": code, "error": ""}


def jobs_of(pid: int) -> set[str]:
    """The jobs whose groups a process is in, by their names: none, one, or more where a job has started a host."""
    names = text_of(f"/proc/{pid}", "cgroup").replace("\n", "/").split("/")
    return {name[len(PREFIX) :] for name in names if name.startswith(PREFIX)}


def _version(group: Group) -> str:
    """That of the limits, or of the group where it has none. Every group of version 2 has `cgroup.controllers`."""
    limiting = [folder for folder in group.folders if _has(folder, "memory.max") or _has(folder, "memory.failcnt")]
    return "v2" if any(_has(folder, "cgroup.controllers") for folder in limiting or group.folders) else "v1"


@dataclass(frozen=True)
class Hierarchy:
    """A mounted tree of groups: `top` is its folder, `own` the folder of this process's group in it."""

    version: int
    top: str
    own: str
    controllers: frozenset[str]

    def parent(self) -> str:
        """The folder for jobs' groups: as low as possible, so that limits of this process's group apply to jobs.

        In version 2 a group with processes can't give controllers to groups below it, except at the top.
        """
        wanted = self.controllers & set(CONTROLLERS)
        if self.version == 2 and wanted:
            for folder in upwards(self.own, self.top):
                if _gives(folder, wanted):
                    _attempt(folder, "cgroup.subtree_control", "+pids")
                    return folder
        return self.own


def hierarchies(proc: str = "/proc") -> list[Hierarchy]:
    try:
        with open(f"{proc}/self/cgroup", encoding="utf-8") as file:
            groups = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)
        with open(f"{proc}/self/mountinfo", encoding="utf-8") as file:
            mounts = [line.partition(" - ") for line in file]
    except (OSError, ValueError):
        return []
    found: dict[str, Hierarchy] = {}
    for mounted, _, source in mounts:
        kind, _, options = source.split()[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        root, top = (word.replace("\\040", " ") for word in mounted.split()[3:5])
        name = "" if kind == "cgroup2" else _names(groups, options)
        if name is None or name not in groups or name in found:
            continue
        controllers = text_of(top, "cgroup.controllers").split() if kind == "cgroup2" else name.split(",")
        version = 2 if kind == "cgroup2" else 1
        found[name] = Hierarchy(version, top, _own_folder(top, root, groups[name]), frozenset(controllers))
    return list(found.values())


def _names(groups: dict[str, str], options: str) -> str | None:
    """The controllers of a mount of version 1, as /proc/self/cgroup names them."""
    given = set(options.split(","))
    return next((name for name in groups if name and set(name.split(",")) <= given), None)


def _own_folder(top: str, root: str, path: str) -> str:
    """The folder of a group; the mount's own where a container doesn't show it."""
    inside = os.path.relpath(path, root)
    folder = os.path.normpath(os.path.join(top, inside))
    return folder if not inside.startswith("..") and os.path.isdir(folder) else top


def upwards(folder: str, top: str) -> Iterator[str]:
    while True:
        yield folder
        if folder == top or not folder.startswith(top):
            return
        folder = os.path.dirname(folder)


def _gives(folder: str, wanted: frozenset[str]) -> bool:
    """Whether groups in a folder of version 2 have these controllers, now that they were asked for."""
    if not os.access(folder, os.W_OK) or not wanted <= set(text_of(folder, "cgroup.controllers").split()):
        return False
    missing = wanted - set(text_of(folder, "cgroup.subtree_control").split())
    return not missing or _attempt(folder, "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(missing)))


def _trouble_entering(folders: list[str]) -> OSError | None:
    """Why a process cannot enter these groups: one of its own tries, since this one must stay outside."""
    pid = os.fork()
    if pid == 0:
        number = errno.EIO
        try:
            Group(tuple(folders)).enter()
            number = 0
        except OSError as error:
            number = error.errno or errno.EIO
        finally:
            os._exit(number)
    number = abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return OSError(number, os.strerror(number), folders[0]) if number else None


def _limit_memory(folder: str, mib: int | None) -> bool:
    """Whether the folder's hierarchy now limits the memory; swap doesn't count in addition."""
    _attempt(folder, "memory.oom.group", "1")
    if mib is None:
        return False
    size = str(mib * MIB)
    if _attempt(folder, "memory.max", size):
        _attempt(folder, "memory.swap.max", "0")
        return True
    if _attempt(folder, "memory.limit_in_bytes", size):
        _attempt(folder, "memory.memsw.limit_in_bytes", size)
        return True
    return False


def _limit_cpu(folder: str, cpus: int | None, share: int | None) -> bool:
    """Whether the folder's hierarchy now limits the CPUs; without a limit only their share is set."""
    if share:
        _attempt(folder, "cpu.weight", str(min(10_000, 100 * share)))
        _attempt(folder, "cpu.shares", str(min(262_144, 1024 * share)))
    if cpus is None:
        return False
    quota = cpus * PERIOD_US
    if _attempt(folder, "cpu.max", f"{quota} {PERIOD_US}"):
        return True
    return _attempt(folder, "cpu.cfs_period_us", str(PERIOD_US)) and _attempt(folder, "cpu.cfs_quota_us", str(quota))


def _has(folder: str, name: str) -> bool:
    return os.path.exists(os.path.join(folder, name))


def _code(error: OSError) -> str:
    if error.errno == errno.EROFS:
        return "read_only"
    return "not_permitted" if error.errno in (errno.EACCES, errno.EPERM) else "failed"


def _freeze(folder: str, stop: bool) -> bool:
    """Stop or continue all processes of a group, where its hierarchy can."""
    if _attempt(folder, "freezer.state", "FROZEN" if stop else "THAWED"):
        return True
    # Where there is cgroup.kill, it needs no help.
    return not _has(folder, "cgroup.kill") and _attempt(folder, "cgroup.freeze", "1" if stop else "0")


def stat_of(pid: int) -> list[bytes]:
    """What the kernel says of a living process, from its state on (proc(5)); empty if it has ended, as a zombie has."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in brackets may hold anything, brackets and blanks included.
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return []
    return [] if fields[:1] in ([], [b"Z"], [b"X"]) else fields


def _pids(folder: str) -> list[int]:
    return [int(word) for word in text_of(folder, "cgroup.procs").split()]


def _table(folder: str, name: str) -> dict[str, int]:
    """A file with a name and a number in each line."""
    pairs = (line.split() for line in text_of(folder, name).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(folder: str, name: str) -> int:
    text = text_of(folder, name).strip()
    return int(text) if text.isdigit() else 0


def text_of(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _write(folder: str, name: str, text: str) -> None:
    file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _attempt(folder: str, name: str, text: str) -> bool:
    """Whether a value could be written; each hierarchy has only some of the files."""
    try:
        _write(folder, name, text)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.stdout.write(json.dumps(support()) + "\n")
