"""The jobs of one machine, for its agent or its server: their runners, processes and files.

Each step may be repeated or doubled at any moment. A living runner is recognized by the lock that it holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from uuid import UUID, uuid4

from dstackweb.runner import cgroups, container, disk, tree
from dstackweb.runner.state import PROGRAM, StateDir, job_uid, runner_lives, say

KILL_S = 2.0
"""How long a kill waits for the processes to end; the next call continues."""
ANSWER_S = 10.0
"""How long a runner may take to detach."""


class NotLaunched(Exception):
    """No runner was started, as far as is known; the message says why."""


class Launcher:
    """Starts runners by `python -m dstackweb.runner`, which has loaded the runner once and forks one per start.

    It ends with this one, which it belongs to: a fork makes one of its own. Runners detach from it, so neither its
    death nor its parent's reaches them. A start may happen twice: the runner's lock and its claim see to that.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def launch(self, order: Mapping[str, object]) -> dict[str, Any]:
        """Start a runner with these orders (docs/runner.md); its answer. Raises NotLaunched, OSError."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                try:
                    return self._ask(self._process, order)
                except (NotLaunched, OSError):
                    self._end(self._process)  # it was killed, or hangs: try once with another
            self._process, self._owner = self._start(), os.getpid()
            try:
                return self._ask(self._process, order)
            except (NotLaunched, OSError):
                self._end(self._process)
                self._process = None
                raise

    def _start(self) -> subprocess.Popen[str]:
        # -S: the runner needs the standard library alone, and starts twice as fast without the rest.
        command, pipe = [sys.executable, "-S", "-m", "dstackweb.runner"], subprocess.PIPE
        env = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONPATH": PROGRAM}
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env, cwd="/")

    def _ask(self, process: subprocess.Popen[str], order: Mapping[str, object]) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps(dict(order)) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], ANSWER_S)[0]:
            raise NotLaunched(f"the runner gave no answer within {ANSWER_S:.0f} s")
        line = process.stdout.readline()
        if not line:
            process.kill()
            raise NotLaunched(f"the runner failed with {process.wait()}: {process.stderr.read().strip()[-500:]}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise NotLaunched(f"the runner answered {line[:200]!r}") from error
        return answer

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # what a dead process was to read is lost with it
                    stream.close()


_launcher = Launcher()
"""This process's own, kept for its life."""


class LocalJobs:
    """The jobs below `home`, the agent's or the server's folder. `warn` gets what can't be removed."""

    def __init__(self, home: str, warn: Callable[[str], None] = say) -> None:
        self.home, self._warn = home, warn

    def launch(self, orders: dict[str, Any]) -> None:
        """Start the runner of a job with complete orders, unless it has one. Raises NotLaunched."""
        try:
            answer = _launcher.launch(orders)
        except OSError as error:
            raise NotLaunched(f"{type(error).__name__}: {error}") from error
        self.require_started(answer)

    def require_started(self, answer: dict[str, Any]) -> None:
        """Raises NotLaunched unless a runner's answer says that the job has one."""
        if "pid" not in answer and not answer.get("already"):
            raise NotLaunched(str(answer.get("error") or f"its runner answered {answer!r}"))

    def probe(self, orders: dict[str, Any]) -> None:
        """Start a runner that only checks its files and the API. Raises NotLaunched."""
        job = str(UUID(str(orders["job"])))
        try:
            self.make_folder()
            run_dir = os.path.join(self.home, "runs", str(uuid4()))
            self.launch({**orders, "probe": True, "state_dir": self.folder(job), "run_dir": run_dir})
        except OSError as error:
            raise NotLaunched(f"{type(error).__name__}: {error}") from error
        finally:
            disk.remove(self.folder(job))

    def make_folder(self) -> None:
        """The parent of the jobs' folders, closed to others."""
        os.makedirs(self.folder(""), mode=0o700, exist_ok=True)

    def folder(self, job: str) -> str:
        """Where a job's runner keeps its state."""
        return os.path.join(self.home, "jobs", job)

    def all(self) -> list[str]:
        return [name for name, _age_s in _folders(self.folder(""))]

    def tickets(self) -> list[dict[str, Any]]:
        """The jobs whose commands were started here and have files, as a restored server asks for them.

        A ticket that can't be read says nothing of its job, as with a runner of before there were any.
        """
        jobs = []
        for job in self.all():
            state = StateDir(self.folder(job))
            with contextlib.suppress(OSError, ValueError):
                if state.has("started") and (ticket := state.read("ticket")):
                    jobs.append({"ticket": ticket, "nonce": state.read("nonce"), "ended": state.has("exit")})
        return jobs

    def has(self, job: str, name: str) -> bool:
        return StateDir(self.folder(job)).has(name)

    def has_runner(self, job: str) -> bool:
        return runner_lives(self.folder(job))

    def has_orphans(self, job: str) -> bool:
        """Whether processes of a job run without a runner."""
        return not self.has_runner(job) and self._has_processes(job)

    def is_gone(self, job: str) -> bool:
        """Whether a job's runner and all its processes have certainly ended."""
        return not self.has_runner(job) and not self._has_processes(job)

    def _has_processes(self, job: str) -> bool:
        return bool(self.processes(job, None)) or not container.is_gone(self.folder(job))

    def has_living(self) -> bool:
        """Whether something of any job may live here."""
        marked = {tree.job_of(pid) for pid in tree.pids()}
        return any(
            job in marked or self.has_runner(job) or not container.is_gone(self.folder(job)) for job in self.all()
        )

    def is_ours(self, pid: int) -> bool:
        """Whether a process belongs to a job whose runner is alive. What an earlier job left is a stranger's."""
        above = tree.ancestry(pid)
        marked = {job for job in map(tree.job_of, above) if _is_uuid(job)}
        if any(self.has_runner(job) for job in marked):
            return True
        # A process that cleaned its environment is still below its runner.
        return any(self._runner(job) in above for job in self.all())

    def nudge(self, job: str) -> bool:
        """Make the job's runner call the API now. False if no runner is alive."""
        runner = self._runner(job)
        if runner:
            tree.send({runner}, signal.SIGUSR1)
        return runner is not None

    def kill(self, job: str) -> bool:
        """SIGKILL a job's processes, then its runner. True when all are confirmed gone; else call again.

        The runner is stopped meanwhile, so that it starts nothing more and still adopts orphans. It writes no end: the
        next runner of the job reports what happened.
        """
        runner, group = self._runner(job), cgroups.read(self.folder(job))
        if runner:
            tree.send({runner}, signal.SIGSTOP)
        until = time.monotonic() + KILL_S
        while left := self.processes(job, runner):
            tree.kill(left, group)
            if time.monotonic() > until:
                if runner:
                    tree.send({runner}, signal.SIGCONT)
                return False
            time.sleep(0.01)
        if runner:
            tree.send({runner}, signal.SIGKILL)
            while self.has_runner(job) and time.monotonic() < until + KILL_S:
                time.sleep(0.01)
        if self.has_runner(job) or not container.end(self.folder(job)) or self.processes(job, None):
            return False
        group.remove()
        return True

    def old(self, older_than_s: float) -> list[str]:
        """Jobs whose files have not changed for so long."""
        return [name for name, age_s in _folders(self.folder("")) if age_s > older_than_s]

    def forget(self, jobs: Collection[str]) -> int:
        """Remove the files of these jobs unless something of them lives; returns how many."""
        marked = {tree.job_of(pid) for pid in tree.pids()}
        gone = [job for job in jobs if _is_uuid(job) and job not in marked and not self.has_runner(job)]
        return sum(map(self._forget, gone))

    def _forget(self, job: str) -> bool:
        if not container.end(self.folder(job)):
            return False
        cgroups.read(self.folder(job)).remove()
        return disk.remove(self.folder(job), self._warn)  # else it is retried next time

    def processes(self, job: str, runner: int | None) -> set[int]:
        """The living processes of a job without its runner.

        Without a cgroup, one that cleaned its environment is found only while its runner lives, which adopts orphans.
        """
        folder = self.folder(job)
        return tree.processes(job, cgroups.read(folder), {runner} if runner else set(), job_uid(folder))

    def _runner(self, job: str) -> int | None:
        """The runner's PID. The one in the lock file counts only while the lock is held: PIDs are reused."""
        try:
            with open(os.path.join(self.folder(job), "lock"), encoding="ascii") as file:
                pid = int(file.read())
        except (OSError, ValueError):
            return None
        return pid if self.has_runner(job) else None


def old_runs(runs_dir: str, older_than_s: float) -> list[str]:
    """The runs whose directories have not changed for so long."""
    return [name for name, age_s in _folders(runs_dir) if age_s > older_than_s]


def remove_runs(runs_dir: str, runs: Collection[str], until: float, warn: Callable[[str], None] = say) -> int:
    """Remove the directories of these runs, until the monotonic time `until`; returns how many."""
    removed = 0
    for run in runs:
        if time.monotonic() >= until:
            break
        folder = os.path.join(runs_dir, str(UUID(run)))
        if os.path.isdir(folder) and not os.path.islink(folder):
            removed += disk.remove(folder, warn)  # else it is retried next time
    return removed


def _folders(above: str) -> Iterator[tuple[str, float]]:
    """The real directories in `above` with an id as their name, and how many seconds ago they changed."""
    try:
        with os.scandir(above) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _is_uuid(entry.name) and entry.is_dir(follow_symlinks=False):
                        yield entry.name, max(0.0, time.time() - entry.stat(follow_symlinks=False).st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return


def _is_uuid(text: str) -> bool:
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False
