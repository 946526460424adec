"""The commands of a job once they were started, as processes of the machine or in a container: one path for both."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Protocol

from dstackweb.runner import tree
from dstackweb.runner.cgroups import NO_GROUP, Group
from dstackweb.runner.container import Container
from dstackweb.runner.engine import EngineAway, EngineError
from dstackweb.runner.state import say

AGAIN_S = 1.0
"""How long until an engine that gave no answer is asked again."""
KILLED, LOST = 137, "instance_unreachable"


class Commands(Protocol):
    """What the runner's loop needs of started commands."""

    def status(self, ended: dict[int, int]) -> int | None:
        """Their wait status; None while they run, or nothing is known. `ended`: children that have ended just now."""

    def processes(self) -> set[int]:
        """Their living processes."""

    def spared(self) -> set[int]:
        """Those of them that get no SIGTERM: they end with the others."""

    def kill(self) -> None:
        """Kill them all."""

    def ran_out_of_memory(self) -> str:
        """As `Group.ran_out_of_memory`."""

    def own_end(self) -> tuple[str, str] | None:
        """Reason and message of an end that is not the commands' own."""

    def memory_mib(self) -> int | None:
        """Their limit."""

    def first(self) -> int:
        """The process that was started first; 0 if it is not known."""

    def folders(self) -> Sequence[str]:
        """Folders that their files are in, beside the job's own."""


class Processes:
    """Processes of this machine: descendants of the runner, or in the job's group."""

    def __init__(self, job: str, group: Group, pid: int, uid: int | None, *, fenced: bool) -> None:
        self._job, self._group, self._pid, self._uid, self._fenced = job, group, pid, uid, fenced

    def status(self, ended: dict[int, int]) -> int | None:
        return ended.get(self._pid)

    def processes(self) -> set[int]:
        return self._group.processes() if tree.is_childless() else tree.processes(self._job, self._group, uid=self._uid)

    def spared(self) -> set[int]:
        return {self._pid} if self._fenced else set()

    def kill(self) -> None:
        tree.kill(self.processes(), self._group)

    def ran_out_of_memory(self) -> str:
        return self._group.ran_out_of_memory()

    def own_end(self) -> tuple[str, str] | None:
        return None

    def memory_mib(self) -> int | None:
        return self._group.memory_mib

    def first(self) -> int:
        return self._pid

    def folders(self) -> Sequence[str]:
        return ()


class Contained:
    """A container, and the engine's command that is attached to its output.

    All its processes are below its first one, which takes them with it. So they are found, signalled and killed without
    the engine; only how they ended is the engine's to say.
    """

    def __init__(self, container: Container, output: int, memory_mib: int, uid: int) -> None:
        self._container, self._limit, self._uid = container, memory_mib, uid
        self._output = os.dup(output)
        self._first, self._born, self._keeper = 0, "", 0
        self._ask_at = self._away_until = 0.0
        self._was_away = False
        self._killed = False
        self._state: dict[str, Any] = {}
        self._folders: Sequence[str] | None = None
        self._attached: int | None = self._attach("start", "--attach")

    def _attach(self, *arguments: str) -> int:
        engine = self._container.engine
        env = {**engine.environment(), tree.MARKER: self._container.job}
        child = subprocess.Popen(
            [engine.program, *arguments, self._container.name], env=env, stdin=subprocess.DEVNULL, cwd="/",
            stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        child.returncode = 0  # the runner's loop reaps it, together with orphans
        return child.pid

    def status(self, ended: dict[int, int]) -> int | None:
        """The end of the attached command is only a hint: the engine's daemon may have been killed."""
        if self._attached in ended:
            self._attached = None
        now = time.monotonic()
        if self._attached is not None or now < self._ask_at:
            return None
        try:
            state = self._container.state()
        except EngineError as error:
            if not self._was_away:
                say(f"the container engine gives no answer, waiting for it: {error}")
            self._was_away, self._ask_at = True, now + AGAIN_S
            return None
        if state.get("Running"):
            say("attached to the container again; output of meanwhile may be missing")
            self._attached = self._attach("attach", "--no-stdin", "--sig-proxy=false")
            self._ask_at = now + AGAIN_S
            return None
        self._state = state
        os.close(self._output)
        return int(state.get("ExitCode", KILLED)) << 8

    def processes(self) -> set[int]:
        return tree.processes(self._container.job, NO_GROUP, uid=self._uid) | self._inside()

    def _inside(self) -> set[int]:
        """The container's first process and all below it."""
        first = self._first_process()
        return tree.below({first}) | {first} if first else set()

    def _first_process(self) -> int:
        if not self._first and time.monotonic() >= self._away_until:
            try:
                state = self._container.state()
            except EngineError as error:
                return self._put_off(error)
            self._first, self._keeper = int(state.get("Pid", 0)), int(state.get("ConmonPid", 0))
            self._born = tree.born(self._first)
        return self._first if self._born and tree.born(self._first) == self._born else 0

    def spared(self) -> set[int]:
        return {pid for pid in (self._first_process(), *self._outside()) if pid}

    def _outside(self) -> set[int]:
        """The engine's own: the attached command, and Podman's process that notes the end."""
        return {self._attached or 0, self._keeper}

    def kill(self) -> None:
        self._killed = True
        tree.kill(self.processes() - self._outside(), NO_GROUP)
        if not self._first and time.monotonic() >= self._away_until:
            self._kill_by_engine()

    def _kill_by_engine(self) -> None:
        """Where the first process is not known: it may be starting."""
        try:
            self._container.engine.call("kill", self._container.name)
        except EngineError as error:  # unless the engine is away, it does not run
            self._put_off(error)

    def _put_off(self, error: EngineError) -> int:
        """An engine that is away is asked again after a while: each call is a process. No process is known: 0."""
        if isinstance(error, EngineAway):
            self._away_until = time.monotonic() + AGAIN_S
        return 0

    def ran_out_of_memory(self) -> str:
        return "limit" if self._state.get("OOMKilled") else ""

    def own_end(self) -> tuple[str, str] | None:
        if self._state.get("Error") and not self._killed:
            return "creating_container_error", str(self._state["Error"])
        if self._state.get("Status") == "created" and not self._killed:
            return "creating_container_error", "the container could not be started"
        if self._was_away and not self._killed and self._state.get("ExitCode"):
            return LOST, "the container engine was stopped, and the container with it"
        if not self._state and not self._killed:
            return LOST, "the container was removed while it ran"
        return None

    def memory_mib(self) -> int | None:
        return self._limit

    def first(self) -> int:
        return self._first_process()

    def folders(self) -> Sequence[str]:
        """What the container has written, as far as the engine keeps that in folders."""
        if self._folders is None:
            try:
                self._folders = self._container.folders()
            except EngineError:
                return ()
        return self._folders
