"""The jobs on a cloud's machine, as its agent starts and sees them: their runners, files and processes."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import subprocess
import sys
from typing import Any
from uuid import UUID

from dstackweb.runner import tree
from dstackweb.runner.state import State, runner_lives
from dstackweb.runner.user import acting_as

JOB_USERS = ("dstackweb", "nobody")
"""Whom jobs run as where the agent is root: an image's own user for them, else the one that is everywhere."""
ELSEWHERE = "/var/lib/dstackweb"
LAUNCH_S = 60.0


class NotStarted(Exception):
    """A job's runner could not be started; the text says why."""


class Work:
    """`home` is the agent's folder, `program` the archive that is runner and agent in one."""

    def __init__(self, home: str, program: str) -> None:
        self.home, self.program = home, program

    def start(self, orders: dict[str, Any]) -> None:
        """Start the runner of a job, unless one lives. Raises NotStarted."""
        try:
            answer = self._launch(self._complete(orders))
        except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            raise NotStarted(f"{type(error).__name__}: {error}") from error
        if "pid" not in answer and not answer.get("already"):
            raise NotStarted(str(answer.get("error", answer)))

    def lives(self, job: str) -> bool:
        """Whether a job's runner lives."""
        return runner_lives(self._folder(job))

    def left(self, job: str) -> bool:
        """Whether processes of a job go on without a runner."""
        return not self.lives(job) and bool(tree.processes(job))

    def has_end_to_tell(self, job: str) -> bool:
        """Whether a runner that is started now would find how a job ended, or that it has to end what was begun."""
        return not self.lives(job) and (self._has(job, "started") or self._has(job, "exit"))

    def at_hand(self) -> str:
        """The job that an agent which has just been started finds here: the last one, or empty."""

        def last(job: str) -> tuple[bool, float]:
            return self.lives(job), os.stat(self._folder(job)).st_mtime

        return max(self._jobs(), key=last, default="")

    def goes_on(self) -> bool:
        """Whether the commands of any job may still be at work."""
        return any(
            self._has(job, "started") and not self._has(job, "exit") and (self.lives(job) or self.left(job))
            for job in self._jobs()
        )

    def has_untold(self) -> bool:
        """Whether a runner has yet to tell how its job ended."""
        return any(self._has(job, "exit") and self.lives(job) for job in self._jobs())

    def _jobs(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(os.path.join(self.home, "jobs"))
        return []

    def _has(self, job: str, name: str) -> bool:
        return State(self._folder(job)).has(name)

    def _folder(self, job: str) -> str:
        return os.path.join(self.home, "jobs", job)

    def _complete(self, orders: dict[str, Any]) -> dict[str, Any]:
        """The server's orders with what is this machine's own."""
        job, run, node = UUID(orders["job"]), UUID(orders["run_uid"]), int(orders["node"])
        account = job_account()
        os.makedirs(self._folder(""), mode=0o700, exist_ok=True)
        return {
            "api": orders["api"],
            "job": str(job),
            "token": orders["token"],
            "insecure": orders.get("insecure", False),
            "state_dir": self._folder(str(job)),
            "run_dir": os.path.join(self._runs(account), str(run), f"node-{node}"),
            "user": account.pw_name if account else None,
            "path": job_path(account),
        }

    def _runs(self, account: pwd.struct_passwd | None) -> str:
        """Where runs' directories lie: with the agent, if the jobs' user gets there. Others see nothing in it."""
        above = self.home if _may_enter(self.home, account) else ELSEWHERE
        runs = os.path.join(above, "runs")
        for folder in (above, runs):
            os.makedirs(folder, mode=0o711, exist_ok=True)
        return runs

    def _launch(self, orders: dict[str, Any]) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-IS", self.program],
            input=json.dumps(orders),
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
            cwd="/",
            timeout=LAUNCH_S,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


def job_account() -> pwd.struct_passwd | None:
    """The other user that jobs run as; None where the agent is not root and they share its own. Raises KeyError."""
    if os.getuid() != 0:
        return None
    for name in JOB_USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise KeyError(f"this machine has no user {' or '.join(JOB_USERS)} to run jobs as")


def job_path(account: pwd.struct_passwd | None) -> str:
    """The agent's PATH, less what the jobs' user may not enter, which a shell would tell as "permission denied"."""
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if _may_enter(entry, account)) or os.defpath


def _may_enter(folder: str, account: pwd.struct_passwd | None) -> bool:
    with contextlib.ExitStack() as stack:
        if account is not None:
            stack.enter_context(acting_as(account))
        return os.path.isabs(folder) and os.path.isdir(folder) and os.access(folder, os.X_OK, effective_ids=True)
