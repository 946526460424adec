"""Starting a job's commands in a container: what of the job's spec goes into it."""

from __future__ import annotations

import os
import posixpath
import shlex
from collections.abc import Sequence

from dstackweb.runner import container, tree
from dstackweb.runner.child import SCRIPT_ARGUMENT_LIMIT as ARGUMENT_LIMIT
from dstackweb.runner.child import CannotStart, Job, acting_as, dstack_env, make_gpu_devices, oom_score, script
from dstackweb.runner.commands import Contained
from dstackweb.runner.engine import Engine, EngineError
from dstackweb.runner.images import Image
from dstackweb.runner.isolation import uids_of
from dstackweb.runner.probe import usable_cpus, usable_memory_mib
from dstackweb.runner.state import StateDir

SHELL = "/bin/sh"


class CannotContain(Exception):
    """The container can't be made; the message says why."""


def engine_of(job: Job) -> Engine:
    """The engine that makes the job's container. Raises CannotContain: the host may have lost it since."""
    if job.engine is None:
        raise CannotContain("this host has no container engine now")
    return job.engine


def spawn(job: Job, image: Image, state: StateDir, output: int) -> Contained:
    """Make the container and start it, with its output to the descriptor `output`.

    Raises CannotContain, CannotStart, OSError.
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
        job=spec["job"], image=image.id, argv=tuple(argv), entrypoint=entrypoint, env=env, user=account,
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
        raise CannotContain(str(error)) from error
    return Contained(made, output, start.memory_mib, account.pw_uid)


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
    account, uids = job.account, uids_of(job.user or "")
    ids = range(uids[0], uids[1] + 1) if uids else {account.pw_uid, *os.getgrouplist(account.pw_name, account.pw_gid)}
    try:
        return [container.volume(text, engine.volumes, ids) for text in job.spec.get("volumes", ())]
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
