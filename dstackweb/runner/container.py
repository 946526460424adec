"""A job's container: what it is made with, and what became of it. The engine finds it again by its label.

`container` in the state directory is written before the container is made, and removed with it: where the file is, the
engine has to be asked before the job counts as gone. An engine that gives no answer says nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import pwd
import resource
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstackweb.runner import disk, enter
from dstackweb.runner.engine import Engine, EngineAway, EngineError
from dstackweb.runner.state import StateDir, say

FILE, SCRIPT_FILE = "container", "script"
LABEL = "dstackweb.job"
SCRIPT = "/dstackweb-commands.sh"
MEMORY_LEAST_MIB = 16
ENV_LINE = 60_000
"""Bytes of a line in the file of variables; Docker reads 64 KiB at most."""
USER_FACTOR = 8
"""As for jobs without a container (`child`)."""
FOLDERS = """{{with .GraphDriver.Data.UpperDir}}{{.}}{{end}}
{{range .Mounts}}{{if eq .Type "volume"}}{{.Source}}{{end}}
{{end}}"""
ENDED = ("exited", "dead", "stopped")


@dataclass(frozen=True)
class Container:
    """The container of one job, there or not."""

    engine: Engine
    job: str

    @property
    def name(self) -> str:
        return f"dstackweb-{self.job}"

    def states(self) -> dict[str, str]:
        """The state of each container with the job's label, by id. Raises EngineAway, EngineError."""
        label = f"label={LABEL}={self.job}"
        lines = self.engine.call("ps", "--all", "--no-trunc", "--filter", label, "--format", "{{.ID}} {{.State}}")
        return {words[0]: words[1].lower() for words in (line.split() for line in lines.splitlines()) if len(words) > 1}

    def state(self) -> dict[str, Any]:
        """As the engine has it: Status, Pid, ExitCode, OOMKilled, Error. Empty if there is none."""
        try:
            found: dict[str, Any] = json.loads(
                self.engine.call("inspect", "--type", "container", "--format", "{{json .State}}", self.name)
            )
        except EngineAway:
            raise
        except EngineError as error:
            if "no such" in str(error).lower():
                return {}
            raise
        return found

    def folders(self) -> list[str]:
        """Those with what it has changed of its image, and the volumes that its image has made for it.

        Raises EngineAway, EngineError.
        """
        found = self.engine.call("inspect", "--type", "container", "--format", FOLDERS, self.name)
        return [line for line in found.splitlines() if os.path.isabs(line)]

    def is_gone(self) -> bool:
        """Whether certainly nothing of it runs. An engine that gives no answer makes nothing certain."""
        try:
            return all(state in ENDED for state in self.states().values())
        except EngineError as error:
            say(f"it is not known whether a container of job {self.job} runs: {error}")
            return False

    def remove(self) -> bool:
        """Kill and remove it; whether it is confirmed that none is left."""
        try:
            for found in self.states():
                self.engine.call("rm", "--force", "--volumes", found)
            return not self.states()
        except EngineError as error:
            say(f"can't remove the container of job {self.job}: {error}")
            return False


def store(state: StateDir, container: Container) -> None:
    """Note that there may be a container from now on."""
    state.write(FILE, json.dumps({"engine": container.engine.stored(), "job": container.job}))


def read(folder: str) -> Container | None:
    """The container that the job with this state directory may have; None if it has none."""
    try:
        with open(os.path.join(folder, FILE), encoding="utf-8") as file:
            kept = json.load(file)
        return Container(Engine.of(kept["engine"]), str(kept["job"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def is_gone(folder: str) -> bool:
    """Whether no container of the job with this state directory runs. Asks the engine only where there may be one."""
    container = read(folder)
    return container is None or container.is_gone()


def end(folder: str) -> bool:
    """Kill and remove the container of the job with this state directory; whether none is left."""
    container = read(folder)
    if container is None:
        return True
    if not container.remove():
        return False
    for name in (SCRIPT_FILE, FILE):  # the note last: it says what is still to do
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    return True


class VolumeRefused(Exception):
    """A volume that jobs may not mount here; the message says why."""


@dataclass(frozen=True)
class Mount:
    source: str
    target: str
    writable: bool = False

    def option(self) -> str:
        """Its value for `--mount`, which is a line of CSV."""
        fields = [
            "type=bind",
            f"source={self.source}",
            f"target={self.target}",
            *([] if self.writable else ["readonly"]),
        ]
        return ",".join('"' + field.replace('"', '""') + '"' for field in fields)


def volume(text: str, listed: Sequence[str], may_write: Collection[int] = ()) -> Mount:
    """The mount for `/host:/inside[:ro|:rw]`, read-only unless it is listed with `:rw`. Raises VolumeRefused.

    A folder below a listed one is looked at without links, and only where no user of jobs (`may_write`: their uids, and
    gids) can put another in its place: the engine looks at it again, as root.
    """
    asked, inside, *mode = text.split(":")
    real = os.path.realpath(asked)
    for entry in listed:
        top, _, listed_mode = entry.partition(":")
        above = os.path.realpath(top)
        if real != above and not real.startswith(above.rstrip("/") + "/"):
            continue
        if not os.path.isdir(real):
            raise VolumeRefused(f"volumes: {asked} is not a folder on this host")
        if (loose := disk.loose(above, real, may_write)) is not None:
            raise VolumeRefused(f"volumes: {asked} can't be mounted, because others may change {loose}; mount {top}")
        writable = listed_mode == "rw" and mode != ["ro"]
        if mode == ["rw"] and not writable:
            raise VolumeRefused(f"volumes: {asked} may only be read on this host")
        return Mount(real, posixpath.normpath(inside), writable)
    raise VolumeRefused(f"volumes: {asked} is not listed for jobs on this host (DSTACKWEB_JOB_VOLUMES)")


@dataclass(frozen=True)
class Start:
    """What a container is made with, beside its engine. `memory_mib` and `cpus` are limits."""

    job: str
    image: str
    argv: tuple[str, ...]
    entrypoint: str | None
    user: pwd.struct_passwd
    groups: Sequence[int]
    working_dir: str
    mounts: Sequence[Mount]
    gpus: Sequence[str]
    memory_mib: int
    cpus: float
    cpu_share: int | None = None
    oom_score: int | None = None
    processes: int = 0


def arguments(engine: Engine, start: Start, env_file: str) -> list[str]:
    """Those of the engine's `create`. No value of the environment is among them."""
    memory = f"{max(MEMORY_LEAST_MIB, start.memory_mib)}m"
    found = [
        "create", "--name", f"dstackweb-{start.job}", "--label", f"{LABEL}={start.job}", "--init", "--no-healthcheck",
        "--network", engine.network, "--user", f"{start.user.pw_uid}:{start.user.pw_gid}", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--memory", memory,
        "--memory-swap", memory, "--shm-size", memory, "--cpus", f"{start.cpus:g}", "--log-driver", "none",
        "--restart", "no", "--env-file", env_file, "--workdir", start.working_dir,
    ]  # fmt: skip
    for group in start.groups:
        if group != start.user.pw_gid:
            found += ["--group-add", str(group)]
    for mount in start.mounts:
        found += ["--mount", mount.option()]
    if start.processes:
        found += ["--pids-limit", str(start.processes)]
    if start.cpu_share:
        found += ["--cpu-shares", str(min(262_144, 1024 * start.cpu_share))]
    if start.oom_score is not None:
        found += ["--oom-score-adj", str(start.oom_score)]
    found += _gpu_options(engine.name, start.gpus)
    if engine.name == "podman":
        found += _own_limits(start.processes)
    if start.entrypoint is not None:
        found += ["--entrypoint", start.entrypoint]
    return [*found, "--", start.image, *start.argv]


def _own_limits(processes: int) -> list[str]:
    """Podman asks for more than this machine may allow, and takes no more processes for itself than there are numbers.

    The kernel counts the processes of all of the user's jobs.
    """
    with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
        numbers_of_processes = int(file.read())
    asked = {
        "nofile": (resource.RLIMIT_NOFILE, None),
        "nproc": (resource.RLIMIT_NPROC, min(USER_FACTOR * processes or numbers_of_processes, numbers_of_processes)),
    }
    found = []
    for name, (kind, most) in asked.items():
        numbers = [one for one in (resource.getrlimit(kind)[1], most) if one not in (None, resource.RLIM_INFINITY)]
        if numbers:
            found += ["--ulimit", f"{name}={min(numbers)}:{min(numbers)}"]
    return found


def _gpu_options(engine: str, gpus: Sequence[str]) -> list[str]:
    if not gpus:
        return []
    if engine == "podman":
        return [word for gpu in gpus for word in ("--device", f"nvidia.com/gpu={gpu}")]
    return ["--gpus", f'"device={",".join(gpus)}"']


def split_env(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables that fit in a line of the engine's file, and those that don't."""
    lines = {
        name: value
        for name, value in env.items()
        if not any(char in value for char in "\n\r\0") and len(f"{name}={value}".encode(errors="replace")) <= ENV_LINE
    }
    return lines, {name: value for name, value in env.items() if name not in lines}


def exports(env: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


@contextlib.contextmanager
def env_file(env: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """A file of variables in memory alone, and its name for a process that gets its descriptor."""
    number = enter.in_memory("env", "".join(f"{name}={value}\n" for name, value in env.items()))
    try:
        yield number, f"/proc/self/fd/{number}"
    finally:
        os.close(number)
