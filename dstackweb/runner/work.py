"""The jobs on a cloud instance: their runners, files and processes, for the agent."""

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
from dstackweb.runner.child import acting_as
from dstackweb.runner.state import StateDir, runner_lives

JOB_USERS = ("dstackweb", "nobody")
"""Users that jobs run as where the agent is root: the first that exists."""
FALLBACK_HOME = "/var/lib/dstackweb"
LAUNCH_S = 60.0


class NotStarted(Exception):
    """A job's runner could not be started; the message says why."""


class InstanceJobs:
    """`home` is the agent's folder, `program` the archive with runner and agent."""

    def __init__(self, home: str, program: str) -> None:
        self.home, self.program = home, program

    def start(self, orders: dict[str, Any]) -> None:
        """Start the runner of a job unless it has one. Raises NotStarted."""
        try:
            answer = self._launch(self._complete(orders))
        except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            raise NotStarted(f"{type(error).__name__}: {error}") from error
        if "pid" not in answer and not answer.get("already"):
            raise NotStarted(str(answer.get("error", answer)))

    def has_runner(self, job: str) -> bool:
        """Whether a job has a running runner."""
        return runner_lives(self._folder(job))

    def has_orphans(self, job: str) -> bool:
        """Whether processes of a job run without a runner."""
        return not self.has_runner(job) and bool(tree.processes(job))

    def has_end_to_report(self, job: str) -> bool:
        """Whether a new runner would have an end to report, or processes to end first."""
        return not self.has_runner(job) and (self._has(job, "started") or self._has(job, "exit"))

    def last_job(self) -> str:
        """The job that an agent finds when it starts: the last one, or empty."""

        def last(job: str) -> tuple[bool, float]:
            return self.has_runner(job), os.stat(self._folder(job)).st_mtime

        return max(self._jobs(), key=last, default="")

    def is_running_any(self) -> bool:
        """Whether the commands of any job may still be running."""
        return any(
            self._has(job, "started") and not self._has(job, "exit") and (self.has_runner(job) or self.has_orphans(job))
            for job in self._jobs()
        )

    def has_unreported_end(self) -> bool:
        """Whether a runner still has to report how its job ended."""
        return any(self._has(job, "exit") and self.has_runner(job) for job in self._jobs())

    def _jobs(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(os.path.join(self.home, "jobs"))
        return []

    def _has(self, job: str, name: str) -> bool:
        return StateDir(self._folder(job)).has(name)

    def _folder(self, job: str) -> str:
        return os.path.join(self.home, "jobs", job)

    def _complete(self, orders: dict[str, Any]) -> dict[str, Any]:
        """The server's orders, completed with the instance's own settings."""
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
        """The parent of runs' directories: the agent's folder if the jobs' user can enter it. Not listable."""
        above = self.home if _may_enter(self.home, account) else FALLBACK_HOME
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
    """The user that jobs run as; None where the agent is not root and they run as its user. Raises KeyError."""
    if os.getuid() != 0:
        return None
    for name in JOB_USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise KeyError(f"this machine has no user {' or '.join(JOB_USERS)} to run jobs as")


def job_path(account: pwd.struct_passwd | None) -> str:
    """The agent's PATH without entries that the jobs' user can't enter, for which shells print "permission denied"."""
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if _may_enter(entry, account)) or os.defpath


def _may_enter(folder: str, account: pwd.struct_passwd | None) -> bool:
    with contextlib.ExitStack() as stack:
        if account is not None:
            stack.enter_context(acting_as(account))
        return os.path.isabs(folder) and os.path.isdir(folder) and os.access(folder, os.X_OK, effective_ids=True)
