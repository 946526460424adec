"""What breaks: each fault is a function that breaks something now, and says what and how it is repaired."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dstackweb.runner.state import is_locked, runner_lives
from tools.chaos.deployment import LOST_AFTER_S, Deployment
from tools.chaos.workload import Task, now_s

HOSTS = ("one", "two", "far")


@dataclass
class Fault:
    """One that happened. `repair` ends it, at `until` or when all is over; without it it repairs itself."""

    kind: str
    what: str
    began: float
    until: float
    repair: Callable[[], None] | None = None


@dataclass
class Breaker:
    """Breaks a deployment, and remembers the jobs whose runner or output it killed."""

    deployment: Deployment
    tasks: dict[str, Task]
    rng: random.Random
    victims: set[str] = field(default_factory=set)
    happened: list[Fault] = field(default_factory=list)
    _deck: list[str] = field(default_factory=list)

    def strike(self) -> Fault | None:
        """The next fault. All kinds come once before one comes again; None if it has nothing to break now."""
        kinds = self._kinds()
        if not self._deck:
            self._deck = self.rng.sample(sorted(kinds), len(kinds))
        kind = self._deck.pop()
        if any(fault.kind == kind and fault.repair for fault in self.happened):
            return None  # it still lasts
        found = kinds[kind]()
        if found is None:
            return None
        what, lasts_s, repair = found
        fault = Fault(kind, what, now_s(), now_s() + lasts_s, repair)
        self.happened.append(fault)
        return fault

    def repair(self, *, everything: bool = False) -> list[Fault]:
        """End what has lasted long enough; returns it."""
        over = [fault for fault in self.happened if fault.repair and (everything or fault.until <= now_s())]
        for fault in over:
            assert fault.repair is not None
            fault.repair()
            fault.repair, fault.until = None, now_s()
        return over

    def _kinds(self) -> dict[str, Callable[[], tuple[str, float, Callable[[], None] | None] | None]]:
        kill = self._kill
        kinds: dict[str, Callable[[], tuple[str, float, Callable[[], None] | None] | None]] = {
            "web process killed": lambda: kill("gunicorn", 0.5),
            "worker killed": lambda: kill("qcluster", 0.5),
            "launcher of runners killed": lambda: kill("dstackweb.runner", 0.5),
            "ticker killed": lambda: kill("ticker"),
            "host process killed": lambda: kill("host"),
            "control plane killed": self._kill_plane,
            "runner killed": self._kill_runner,
            "output relay killed": self._kill_relay,
            "Redis killed, back empty": self._kill_redis,
            "PostgreSQL killed": self._kill_postgres,
            "process stopped for a while": self._stop_process,
            "runner stopped for a while": self._stop_runner,
            "host cut off": self._cut,
        }
        if self.deployment.has_disk:
            kinds["host's disk full"] = self._fill_disk
        return kinds

    def _kill(self, role: str, all_of_them: float = 0.0) -> tuple[str, float, None] | None:
        """One process of a role on one machine; with a probability of `all_of_them` all of them at once."""
        host = self.rng.choice(HOSTS)
        found = self.deployment.role(host, role) or self.deployment.role(host := "one", role)
        if not found:
            return None
        chosen = found if self.rng.random() < all_of_them else [self.rng.choice(found)]
        for process in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return f"{len(chosen)} of {len(found)} {role} on {host}", 0.0, None

    def _kill_plane(self) -> tuple[str, float, None] | None:
        plane = self.rng.choice(self.deployment.planes)
        if plane.process is None or plane.process.poll() is not None:
            return None
        plane.process.kill()
        plane.process.wait(30)
        return plane.env["DSTACKWEB_HOST_NAME"], 0.0, None

    def _jobs(self, lock: str) -> Iterator[tuple[str, Path]]:
        """Jobs here whose file `lock` is held, and that may be lost: their runs are retried."""
        with self.deployment.database() as database:
            rows = database.execute(
                "SELECT job.id, run.name FROM runs_job job JOIN runs_run run ON run.id = job.run_id "
                "WHERE job.status IN ('provisioning', 'running')"
            ).fetchall()
        for job, name in rows:
            if name in self.tasks and self.tasks[name].is_retried:
                for host in HOSTS:
                    folder = self.deployment.home(host) / "jobs" / str(job)
                    if is_locked(str(folder / lock)):
                        yield str(job), folder

    def _kill_runner(self) -> tuple[str, float, None] | None:
        jobs = list(self._jobs("lock"))
        if not jobs:
            return None
        job, folder = self.rng.choice(jobs)
        self.victims.add(job)
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int((folder / "lock").read_text()), signal.SIGKILL)
        return f"of job {job}", 0.0, None

    def _kill_relay(self) -> tuple[str, float, None] | None:
        jobs = list(self._jobs("spool"))
        if not jobs:
            return None
        job, folder = self.rng.choice(jobs)
        self.victims.add(job)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "fd" / "1") == str(folder / "spool"):
                        os.kill(int(entry.name), signal.SIGKILL)
        return f"of job {job}", 0.0, None

    def _kill_redis(self) -> tuple[str, float, Callable[[], None]]:
        self.deployment.redis.kill()
        return "", self.rng.uniform(0, 4), lambda: (self.deployment.redis.start(), None)[1]

    def _kill_postgres(self) -> tuple[str, float, Callable[[], None]]:
        self.deployment.postgres.kill()
        return "", self.rng.uniform(0, 4), self._start_postgres

    def _start_postgres(self) -> None:
        """Its own processes may take a moment to notice that their first one is gone."""
        (self.deployment.folder / "postgres" / "data" / "postmaster.pid").unlink(missing_ok=True)
        for left in range(20, -1, -1):
            try:
                self.deployment.postgres.start()
                return
            except RuntimeError:
                if not left:
                    raise
                time.sleep(0.2)

    def _stop_process(self) -> tuple[str, float, Callable[[], None]] | None:
        host = self.rng.choice(HOSTS)
        found = self.deployment.processes(host)
        if not found:
            return None
        process = self.rng.choice(found)
        words = " ".join(_words(process)[1:4])
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
        return f"{words} on {host}", self.rng.uniform(6, 25), lambda: _resume(process)

    def _stop_runner(self) -> tuple[str, float, Callable[[], None]] | None:
        """For less than a runner may be silent: it must be able to stop its commands itself."""
        jobs = list(self._jobs("lock"))
        if not jobs:
            return None
        job, folder = self.rng.choice(jobs)
        try:
            process = psutil.Process(int((folder / "lock").read_text()))
            process.suspend()
        except (ValueError, psutil.NoSuchProcess):
            return None
        return f"of job {job}", self.rng.uniform(3, LOST_AFTER_S / 2), lambda: _resume(process)

    def _cut(self) -> tuple[str, float, Callable[[], None]]:
        self.deployment.far.cut()
        return "far", self.rng.uniform(3, 2 * LOST_AFTER_S), self.deployment.far.reconnect

    def _fill_disk(self) -> tuple[str, float, Callable[[], None]]:
        path = self.deployment.far_home / "ballast"
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        return "far", self.rng.uniform(5, 20), path.unlink


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def living(deployment: Deployment) -> list[str]:
    """Jobs that have a runner now."""
    return [
        folder.name
        for host in HOSTS
        for folder in (deployment.home(host) / "jobs").glob("*-*")
        if runner_lives(str(folder))
    ]
