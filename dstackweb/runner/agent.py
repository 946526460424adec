"""`runner.pyz agent`: the agent of a cloud instance. It starts the jobs' runners, reports spot interruptions, and
powers the instance off when the server says so or has not answered for long.

In an allocation of a cluster (`--allocation`) it ends instead, and SIGTERM is the notice of an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import json
import os
import pwd
import signal
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from dstackweb.runner import machine, tree
from dstackweb.runner.client import Client, Refused, Unreachable, backoff
from dstackweb.runner.engine import EngineSetup
from dstackweb.runner.isolation import can_traverse
from dstackweb.runner.jobs import LocalJobs, NotLaunched
from dstackweb.runner.state import StateDir, say

POLL_S = 0.1
METADATA_EVERY_S = 5.0
JOIN_S = 1800.0
"""How long to try to join."""
ALONE_S = 3600.0
"""How long the server may not answer, until it sets this itself."""
UNREPORTED_S = 6 * 3600.0
"""How much longer while a job's end is unreported: it would be lost with the instance."""
TERM_NOTICE_S = 25.0
"""How long after SIGTERM a cluster kills what is left; Slurm's `KillWait` is 30 s by default."""
STARTS_AT_ONCE, AGAIN_CAP_S = 3, 30.0
"""How often a dead runner is replaced immediately, and the longest delay after that."""
ENGINE_AGAIN_S = 1.0
"""How often a job that waits for its container engine is looked at."""
REPORT_ATTEMPTS = 5
"""Runners of a job that may try to report its end before that counts as lost."""
OFF, NEVER, RETRY = 0, 2, 1
"""Exit codes: the instance powers off; invalid arguments; anything else, start the agent again."""

JOB_USERS = ("dstackweb", "nobody")
"""Users that jobs run as where the agent is root: the first that exists."""
FALLBACK_HOME = "/var/lib/dstackweb"


class Agent:
    """The agent's state. The job's runner and the token outlive it; the server repeats everything else."""

    def __init__(self, client: Client, work: InstanceJobs, metadata: machine.Metadata | TermNotice) -> None:
        self.client, self.work, self.metadata = client, work, metadata
        self.engines = EngineSetup(work.home)
        self.job = ""
        self.starts = 0
        self.error = ""
        self.interruption: str | None = None
        self.had_runner = False
        self.alone_s = ALONE_S
        self.contact = time.monotonic()
        self.failures = 0

    def run(self, first: dict[str, Any] | None = None) -> None:
        """Run until the instance should be powered off. `first`: the first order, if the server has given it."""
        self.job = self.work.last_job()
        next_ask = next_metadata = 0.0
        if first:
            again_s = self._obey(first)
            if again_s is None:
                return
            next_ask = time.monotonic() + again_s
        while True:
            now = time.monotonic()
            if now >= next_metadata:
                next_metadata = now + self.metadata.every_s
                if self.interruption is None and (at := self.metadata.interruption()):
                    say(f"spot interruption at {at}")
                    self.interruption, next_ask = at, 0.0
            has_runner = bool(self.job) and self.work.has_runner(self.job)
            if self.had_runner and not has_runner and self.starts < STARTS_AT_ONCE:
                next_ask = 0.0
            self.had_runner = has_runner
            if now >= next_ask:
                again_s = self._ask(has_runner)
                if again_s is None:
                    return
                next_ask = time.monotonic() + again_s
            if self._is_abandoned():
                say("the server has not answered for too long")
                return
            time.sleep(POLL_S)

    def _ask(self, has_runner: bool) -> float | None:
        """Report the status and do what the answer says; seconds until the next call, None to power off."""
        status = {
            "job": self.job if has_runner else None,
            "left": bool(self.job) and self._has_remains(),
            "interruption": {"at": self.interruption} if self.interruption else None,
            "error": self.error,
            "engine": self.engines.report,
        }
        try:
            answer = self.client.post("next", status)
        except (Unreachable, Refused) as error:
            # A refusal may be temporary too, e.g. of a server with another key; it ends no job.
            self.failures += 1
            if self.failures in (1, 10):
                say(f"the API can't be reached, retrying: {error}")
            return backoff(self.failures)
        self.failures, self.contact = 0, time.monotonic()
        return self._obey(answer)

    def _obey(self, answer: dict[str, Any]) -> float | None:
        if answer.get("do") == "off":
            say("the server no longer needs this instance")
            return None
        self.alone_s = float(answer.get("alone_s", self.alone_s))
        if answer.get("do") == "run":
            return self._start(answer)
        self.error = ""
        return float(answer.get("again_s", METADATA_EVERY_S))

    def _has_remains(self) -> bool:
        """Whether the job has processes or an end for another runner to handle."""
        return self.work.has_orphans(self.job) or (
            self.starts < REPORT_ATTEMPTS and self.work.has_end_to_report(self.job)
        )

    def _start(self, answer: dict[str, Any]) -> float:
        orders = self.engines.prepare(answer["orders"])
        if orders is None:
            return ENGINE_AGAIN_S
        if self.job != answer["job"]:
            self.job, self.starts = answer["job"], 0
        self.starts += 1
        say(f"starting the runner of job {self.job}")
        try:
            self.work.start(orders)
            self.error, self.had_runner = "", True
        except NotLaunched as error:
            self.error = str(error)
            say(f"the runner did not start: {error}")
        return min(AGAIN_CAP_S, 2.0 ** (self.starts - 1))

    def _is_abandoned(self) -> bool:
        """Whether the server was silent for so long that it counts the instance as lost, and no job is running."""
        silent_s = time.monotonic() - self.contact
        if silent_s <= self.alone_s or self.work.is_running_any():
            return False
        return silent_s > self.alone_s + UNREPORTED_S or not self.work.has_unreported_end()


class TermNotice:
    """The notice of a cluster that it ends an allocation soon: SIGTERM to all its processes."""

    every_s = POLL_S

    def __init__(self) -> None:
        self._at: str | None = None
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        at = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=TERM_NOTICE_S)
        self._at = self._at or at.isoformat()

    def interruption(self) -> str | None:
        return self._at


def main(arguments: list[str]) -> int:
    """Join if needed, and run. The caller starts it again unless it returns OFF."""
    parser = argparse.ArgumentParser(prog="agent", description=__doc__)
    parser.add_argument("--api", required=True, help="the server's URL")
    parser.add_argument("--instance", required=True, help="the ID of this instance")
    parser.add_argument("--home", required=True, help="where the agent keeps its files")
    parser.add_argument("--allocation", action="store_true", help="this is a part of a cluster: power nothing off")
    parser.add_argument("--insecure", action="store_true", help="allow plain HTTP to another machine")
    options = parser.parse_args(arguments)
    _detach()
    state = StateDir(options.home)
    try:
        state.make()
        if not state.lock():
            say("another agent is running here")
            return RETRY
        join_token = os.environ.pop("DSTACKWEB_JOIN_TOKEN", "")
        caller = functools.partial(Client, options.api, f"instances/{options.instance}", insecure=options.insecure)
        token, first = state.read("token"), None
        if not token:
            token, first = _join(caller(join_token, state.nonce()), state, join_token, options)
    except OSError as error:
        say(f"can't start: {error}")
        return RETRY
    except ValueError as error:
        say(str(error))
        return NEVER
    if token:
        work = InstanceJobs(options.home)
        notice = TermNotice() if options.allocation else machine.Metadata()
        Agent(caller(token, state.nonce()), work, notice).run(first)
    if options.allocation:
        return OFF
    say("powering off")
    return OFF if machine.switch_off() else RETRY


def _detach() -> None:
    """Leave the session it was started in, and protect its memory from processes of its user."""
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.umask(0o022)
    tree.protect_memory()


def _join(
    client: Client, state: StateDir, join_token: str, options: argparse.Namespace
) -> tuple[str, dict[str, Any] | None]:
    """The instance's token, stored for later agents, and its first order; empty if the instance can't join."""
    gpus = machine.granted_gpus() if options.allocation else machine.gpus()
    about = {"gpus": gpus, "address": machine.address(options.api)}
    until, failures = time.monotonic() + JOIN_S, 0
    while time.monotonic() < until:
        try:
            answer = client.post("join", {"token": join_token, "nonce": state.nonce(), **about})
            token = str(answer["token"])
        except Unreachable as error:
            failures += 1
            if failures in (1, 10, 100):
                say(f"can't join yet, retrying: {error}")
            time.sleep(backoff(failures))
        except Refused as refused:
            say(f"join refused: {refused}")
            return "", None
        else:
            state.write("token", token)
            say(f"joined with {len(about['gpus'])} GPUs")
            return token, answer.get("next")
    say("the server did not answer")
    return "", None


class InstanceJobs(LocalJobs):
    """The jobs of a cloud instance, one after the other."""

    def start(self, orders: dict[str, Any]) -> None:
        """Start the runner of a job unless it has one. Raises NotLaunched."""
        try:
            complete = self._complete(orders)
        except (OSError, KeyError, ValueError) as error:
            raise NotLaunched(f"{type(error).__name__}: {error}") from error
        self.launch(complete)

    def launch(self, orders: dict[str, Any]) -> None:
        """Fork the runner: this process has loaded most of what it needs. Raises NotLaunched."""
        from dstackweb.runner.__main__ import launch

        try:
            answer = json.loads(launch(orders))
        except (OSError, ValueError) as error:
            raise NotLaunched(f"{type(error).__name__}: {error}") from error
        self.require_started(answer)

    def has_end_to_report(self, job: str) -> bool:
        """Whether a new runner would have an end to report, or processes to end first."""
        return not self.has_runner(job) and (self.has(job, "started") or self.has(job, "exit"))

    def last_job(self) -> str:
        """The job that an agent finds when it starts: the last one, or empty."""

        def last(job: str) -> tuple[bool, float]:
            return self.has_runner(job), os.stat(self.folder(job)).st_mtime

        return max(self.all(), key=last, default="")

    def is_running_any(self) -> bool:
        return any(
            self.has(job, "started") and not self.has(job, "exit") and (self.has_runner(job) or self.has_orphans(job))
            for job in self.all()
        )

    def has_unreported_end(self) -> bool:
        return any(self.has(job, "exit") and self.has_runner(job) for job in self.all())

    def _complete(self, orders: dict[str, Any]) -> dict[str, Any]:
        """The server's orders, completed with the instance's own settings."""
        job, run, node = UUID(orders["job"]), UUID(orders["run_uid"]), int(orders["node"])
        account = job_account()
        self.make_folder()
        return {
            "api": orders["api"],
            "job": str(job),
            "token": orders["token"],
            "insecure": orders.get("insecure", False),
            "state_dir": self.folder(str(job)),
            "run_dir": os.path.join(self._runs(account), str(run), f"node-{node}"),
            "user": account.pw_name if account else None,
            "path": job_path(account),
            "metadata": machine.metadata_endpoint(),
            "engine": orders.get("engine"),
        }

    def _runs(self, account: pwd.struct_passwd | None) -> str:
        """The parent of runs' directories: the agent's folder if the jobs' user can enter it. Not listable."""
        above = self.home if _may_enter(self.home, account) else FALLBACK_HOME
        runs = os.path.join(above, "runs")
        for folder in (above, runs):
            os.makedirs(folder, mode=0o711, exist_ok=True)
        return runs


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
    """By mode bits: rights that one thread takes on, for a look, are those of all threads."""
    if not (os.path.isabs(folder) and os.path.isdir(folder)):
        return False
    if account is None:
        return os.access(folder, os.X_OK)
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return can_traverse(Path(folder).resolve(), account.pw_uid, groups)
