"""A job's commands in a container: what of its spec goes into it, and the container while it runs."""

from __future__ import annotations

import os
import posixpath
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from dstackweb.runner import container, tree
from dstackweb.runner.cgroups import NO_GROUP
from dstackweb.runner.child import (
    SCRIPT_ARGUMENT_LIMIT as ARGUMENT_LIMIT,
    CannotStart,
    Job,
    acting_as,
    dstack_env,
    make_gpu_devices,
    oom_score,
    script,
)
from dstackweb.runner.engine import Engine, EngineAway, EngineError, note_failed
from dstackweb.runner.images import Image
from dstackweb.runner.machine import usable_cpus, usable_memory_mib
from dstackweb.runner.state import StateDir, say

AGAIN_S = 1.0
"""How long until an engine that gave no answer is asked again."""
KILLED, LOST = 137, "instance_unreachable"


class CannotContain(Exception):
    """The container of this run can't be made, though others can; the message says why."""


class EngineFailed(Exception):
    """The host's engine makes no containers; the message says why."""


def engine_of(job: Job) -> Engine:
    """The engine that makes the job's container. Raises EngineFailed: the host may have lost it since."""
    if job.engine is None:
        raise EngineFailed("this host has no container engine now")
    return job.engine


def blame(engine: Engine, error: EngineError) -> CannotContain | EngineFailed:
    """Find out whether the engine that refused a call refuses every container, which is no fault of the run."""
    if not isinstance(error, EngineAway):
        try:
            engine.try_out()
        except EngineError as broken:
            return EngineFailed(str(broken))
        return CannotContain(str(error))
    return EngineFailed(str(error))


def spawn(job: Job, image: Image, state: StateDir, output: int) -> Contained:
    """Make the container and start it, with its output to the descriptor `output`.

    Raises CannotContain, EngineFailed, CannotStart, OSError.
    """
    engine, spec = engine_of(job), job.spec
    if spec["gpus"]:
        make_gpu_devices()
    env, long = container.split_env(environment(job))
    entrypoint, argv, script_file = command(job, long)
    mounts = [container.Mount(job.run_dir, job.run_dir, True), *volumes(job, engine)]
    if script_file:
        path = _store_script(job, state, script_file)
        mounts.append(container.Mount(path, container.SCRIPT))
    account = job.account
    start = container.Start(
        job=spec["job"], image=image.id, argv=tuple(argv), entrypoint=entrypoint, user=account,
        groups=os.getgrouplist(account.pw_name, account.pw_gid) if job.switches_user else [],
        working_dir=_working_dir(job), mounts=mounts, gpus=spec["gpus"],
        memory_mib=spec.get("memory_max_mib") or spec.get("host_memory_mib") or usable_memory_mib(),
        cpus=min(spec.get("cpu_max") or usable_cpus(), os.cpu_count() or 1),
        cpu_share=spec.get("cpus"), oom_score=oom_score(spec), processes=spec.get("process_limit") or 0,
    )  # fmt: skip
    made = container.Container(engine, spec["job"])
    try:
        with container.env_file(env) as (number, name):
            engine.call(*container.arguments(engine, start, name), pass_fds=[number])
    except EngineError as error:
        raise blame(engine, error) from error
    return Contained(made, output, start.memory_mib, account.pw_uid, state.home)


def environment(job: Job) -> dict[str, str]:
    """The variables of the commands: as without a container, but the image has its own PATH.

    An engine may give containers GPUs by a variable: this one always names the job's own.
    """
    base = {"HOME": job.run_dir, "USER": job.account.pw_name, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
    own = {"NVIDIA_VISIBLE_DEVICES": ",".join(job.spec["gpus"]) or "void", tree.MARKER: job.spec["job"]}
    return {**base, **job.spec["env"], **dstack_env(job), **own}


def command(job: Job, long: dict[str, str]) -> tuple[str | None, Sequence[str], str]:
    """The container's entrypoint, its arguments, and the script that it needs as a file, if any.

    With `entrypoint` the commands are its arguments; without commands the image's own program runs; otherwise a shell
    runs them. Raises CannotStart for variables (`long`) that can be set by a shell alone.
    """
    spec = job.spec
    if spec.get("entrypoint") or not spec["commands"]:
        if long:
            names = ", ".join(sorted(long))
            raise CannotStart(f"{names}: values with several lines or over 60 KB need `commands` in a container")
        program, *words = shlex.split(spec.get("entrypoint") or "") or [""]
        return program or None, [*words, *spec["commands"]], ""
    # One stream: an engine mixes two in an order of its own.
    text = "exec 2>&1\n" + container.exports(long) + script(job)
    if long or len(text.encode()) > ARGUMENT_LIMIT:
        return spec["shell"], [container.SCRIPT], text
    return spec["shell"], ["-c", text], ""


def volumes(job: Job, engine: Engine) -> list[container.Mount]:
    """The folders of the host that the run file names. Raises CannotStart for one that is not listed."""
    try:
        return [container.volume(text, engine.volumes, job.ids_of_jobs) for text in job.spec.get("volumes", ())]
    except (container.VolumeRefused, OSError) as error:
        raise CannotStart(str(error)) from None


def _working_dir(job: Job) -> str:
    """An absolute one is the image's; others are the run's, and there already: the engine would make them as root."""
    folder = job.spec["working_dir"] or ""
    path = posixpath.normpath(posixpath.join(job.run_dir, folder))
    if posixpath.isabs(folder):
        return path
    try:
        with acting_as(job.account):
            found = os.path.isdir(path)
    except (OSError, ValueError) as error:
        raise CannotStart(f"working_dir {folder!r} can't be entered: {error}") from error
    if not found or not f"{path}/".startswith(f"{job.run_dir}/"):
        raise CannotStart(f"working_dir {folder!r} does not exist in the run's directory")
    return path


def _store_script(job: Job, state: StateDir, text: str) -> str:
    """In the runner's folder, which is closed to jobs; the container gets this file alone."""
    path = state.path(container.SCRIPT_FILE)
    if os.path.exists(path):
        os.unlink(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w", encoding="utf-8") as file:
        file.write(text)
    os.chown(path, job.account.pw_uid, job.account.pw_gid)
    return path


class Contained:
    """A container, and the engine's command that is attached to its output: as `child.Processes`.

    All its processes are below its first one, which takes them with it. So they are found, signalled and killed without
    the engine; only how they ended is the engine's to say.
    """

    def __init__(self, made: container.Container, output: int, memory_mib: int, uid: int, home: str) -> None:
        self._container, self.memory_mib, self._uid, self._home = made, memory_mib, uid, home
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
                note_failed(self._home, str(error))
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
        first = self.first()
        inside = tree.below({first}) | {first} if first else set()
        return tree.processes(self._container.job, NO_GROUP, uid=self._uid) | inside

    def first(self) -> int:
        if not self._first and time.monotonic() >= self._away_until:
            try:
                state = self._container.state()
            except EngineError as error:
                return self._put_off(error)
            self._first, self._keeper = int(state.get("Pid", 0)), int(state.get("ConmonPid", 0))
            self._born = tree.born(self._first)
        return self._first if self._born and tree.born(self._first) == self._born else 0

    def spared(self) -> set[int]:
        return {pid for pid in (self.first(), *self._outside()) if pid}

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
            note_failed(self._home, str(error))
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

    def folders(self) -> Sequence[str]:
        """What the container has written, as far as the engine keeps that in folders."""
        if self._folders is None:
            try:
                self._folders = self._container.folders()
            except EngineError:
                return ()
        return self._folders
