"""The agent of a joined host: `dstackweb host run`, or `runner.pyz host`.

It registers the machine, asks the server what its jobs need, starts and stops their runners, sends samples of its GPUs
and removes old files. All of it by HTTP with the host's own token; the server repeats everything that may get lost.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import UUID

import dstackweb
from dstackweb.runner import isolation, machine, nvml, tree
from dstackweb.runner.agent import job_path
from dstackweb.runner.client import Client, Refused, Unreachable, backoff
from dstackweb.runner.engine import Finder
from dstackweb.runner.jobs import LocalJobs, NotLaunched, old_runs, remove_runs
from dstackweb.runner.machine import BackgroundProbe, Probe, probe
from dstackweb.runner.relay import start_relay
from dstackweb.runner.state import HOST_CONFIG, say

TICK_S = 0.25
SOON_S, BUSY_FOR_S = 0.5, 5.0
"""How often to ask for so long after a start or an end: the next job is then likely."""
REFUSED_S = 15.0
UNUSABLE = 422
"""The answer to a report that has something the server can't use."""
REFUSAL_SHOWN_S = 60.0
"""Time without another refusal after which the machine no longer shows it as its error."""
STARTS_AT_ONCE = 4
PROBE_EVERY_S = 10.0
SAMPLES_KEPT, SAMPLES_AT_ONCE, NO_GPUS_EVERY_S = 30, 10, 60.0
CLEANUP_EVERY_S, CLEANUP_SOON_S = 600.0, 2.0
CLEANUP_S = 5.0
"""How long one round of removing old files may take; the next one is soon if something remains."""
CLEANED_AT_ONCE = 500
TICKETS_AT_ONCE = 500
STOPPED, NEVER, RETRY = 0, 2, 1
"""Exit codes: stopped or removed from the deployment; invalid settings; start it again."""


class HostAgent:
    """The agent's state. Runners outlive it, and the server knows which jobs there are."""

    def __init__(self, home: str, labels: Mapping[str, str], address: str) -> None:
        self.home, self.labels, self.address = home, labels, address
        self.process = secrets.token_hex(16)
        """Tells the server this process from one on another machine with a copy of its settings."""
        self.jobs = LocalJobs(home)
        self.relay = os.path.join(self.jobs.folder(""), "heartbeats")
        self.stopping = threading.Event()
        self.pool = ThreadPoolExecutor(STARTS_AT_ONCE)
        self.cleanup = Cleanup(self.jobs)
        self.snapshots: deque[tuple[float, nvml.Snapshot]] = deque(maxlen=SAMPLES_KEPT)
        self.active: set[str] = set()
        self.working: dict[str, Future[None]] = {}
        self.failed: dict[str, str] = {}
        self.probed: dict[str, str] | None = None
        self.written: dict[str, Any] | None = None
        self.sending: list[tuple[float, nvml.Snapshot]] = []
        self.tickets: list[dict[str, Any]] | None = None
        """Tickets that a restored server has asked for and has not got yet; None while it does not ask."""
        self.busy_until = self.next_probe = self.next_empty = 0.0
        self.failures = 0
        self.refusal, self.refused_at = "", 0.0
        self.background: BackgroundProbe | None = None
        self.load()

    def load(self) -> None:
        """Read the settings and the token, which a new `host join` may have changed. Raises OSError, ValueError."""
        with open(os.path.join(self.home, HOST_CONFIG), encoding="utf-8") as file:
            self.config: dict[str, Any] = json.load(file)
        self.insecure = bool(self.config.get("insecure"))
        self.engine = Finder(
            self.home,
            str(self.config.get("engine", "")),
            network=str(self.config.get("container_network") or "host"),
            volumes=self.config.get("job_volumes", []),
        )
        self.client = self.connect()

    def connect(self) -> Client:
        """A connection of its own to the server. Raises ValueError, KeyError."""
        url, name, token = self.config["url"], self.config["name"], self.config["token"]
        return Client(url, f"hosts/{name}", token, self.process, insecure=self.insecure)

    def run(self) -> int:
        with contextlib.suppress(OSError):  # then starts fail, and say why
            self.jobs.make_folder()
        if not start_relay(self.config["url"], self.relay, insecure=self.insecure):
            say("runners send their heartbeats one by one")
        self.background = BackgroundProbe(self._look)
        while not self.stopping.is_set():
            again_s = self._turn()
            if again_s is None:
                say(f"host {self.config['name']} was removed from the deployment. Join again to come back")
                break
            self._wait(again_s)
        self.pool.shutdown()
        return STOPPED

    def _turn(self) -> float | None:
        """One exchange with the server; seconds until the next, None if the host was removed."""
        try:
            seen = self.background.current() if self.background else None
            if seen is None:
                return TICK_S
            answer = self._register(seen) or self._poll()
        except (Unreachable, Refused) as error:
            self.failures += 1
            if self.failures in (1, 10, 100):
                say(f"the API can't be used, retrying: {error}")
            if isinstance(error, Refused):
                self._reload()
                # Another process may have taken over: only what the machine has makes this one the host's agent again.
                self.written = {}
                return min(REFUSED_S, float(self.failures))
            return backoff(self.failures)
        if self.failures:
            say("the API answers again")
        self.failures = 0
        if answer.get("removed"):
            return None
        return self._follow(answer)

    def _reload(self) -> None:
        """The token may be a new one since this machine has joined again."""
        try:
            self.load()
        except (OSError, ValueError, KeyError) as error:
            say(f"can't read {HOST_CONFIG}: {error}")

    def _register(self, seen: Probe) -> dict[str, Any]:
        """Register the machine at the start and when something changed; empty unless the host was removed."""
        facts = self._facts(seen)
        if facts == self.written:
            return {}
        body = {**facts, "starting": self.written is None, "labels": dict(self.labels)}
        try:
            answer = self.client.post("facts", body)
        except Refused as refused:
            if refused.status != UNUSABLE or not facts["gpus"]:
                raise
            error = f"the server refuses the GPUs: {refused}"
            say(error)
            answer = self.client.post("facts", body | {"gpus": [], "error": error})
        self.written = facts
        return answer

    def _poll(self) -> dict[str, Any]:
        """Report, and ask what the jobs need. Samples that the server refuses are dropped: jobs don't wait for them."""
        report = self._report()
        try:
            answer = self.client.post("poll", report)
        except Refused as refused:
            if refused.status != UNUSABLE or not self.sending:
                raise
            self.refusal, self.refused_at = f"the server refuses samples of the GPUs: {refused}", time.monotonic()
            say(self.refusal)
            answer = self.client.post("poll", report | {"samples": []})
        if time.monotonic() - self.refused_at > REFUSAL_SHOWN_S:
            self.refusal = ""
        return answer

    def _facts(self, seen: Probe) -> dict[str, Any]:
        how = isolation.prepare(
            isolation.arrange(
                Path(self.home),
                uid=os.getuid(),
                job_user=str(self.config.get("job_user") or isolation.PROJECT_UIDS),
                shared_uid=bool(self.config.get("shared_uid")),
            )
        )
        self.how = how
        return {
            **asdict(seen),
            "engine": self.engine.report(seen.engine),
            "gpus": [asdict(gpu) for gpu in seen.gpus],
            "error": "; ".join(filter(None, [how.error, seen.error, self.refusal])),
            "isolation": how.isolation,
            "job_user": how.job_user,
            "runs_dir": str(how.runs_dir),
            "home": "{0.st_dev}-{0.st_ino}".format(os.stat(self.home)),
            "address": self.address or machine.address(self.config["url"]),
            "version": getattr(dstackweb, "__version__", ""),
        }

    def _look(self) -> Probe:
        """Read the GPUs once, for what the machine has and for a sample."""
        # Dated before reading: a GPU that a job gets meanwhile was not the job's yet.
        at = time.monotonic()
        snapshot = nvml.read()
        self.snapshots.append((at, snapshot))
        return probe(self.jobs.is_ours, snapshot, self.engine.current()[1])

    def _report(self) -> dict[str, Any]:
        self.sending = self._due_samples()
        self.reported = dict(self.failed), self.probed
        return {
            "jobs": {job: self._state(job) for job in self.active},
            "failed": self.reported[0],
            "probe": self.reported[1],
            "samples": [_sample(at, snapshot) for at, snapshot in self.sending],
        } | self._tickets()

    def _tickets(self) -> dict[str, Any]:
        if self.tickets is None:
            return {}
        return {"tickets": self.tickets[:TICKETS_AT_ONCE], "tickets_left": len(self.tickets[TICKETS_AT_ONCE:])}

    def _state(self, job: str) -> str:
        """`starting`, `runner`, `left` (processes without a runner), or `gone`."""
        if job in self.working:
            return "starting"
        if self.jobs.has_runner(job):
            return "runner"
        return "left" if self.jobs.has_orphans(job) else "gone"

    def _due_samples(self) -> list[tuple[float, nvml.Snapshot]]:
        """Samples to send. A machine without GPUs sends its last now and then."""
        waiting = list(self.snapshots)
        has_gpus = any(snapshot.samples or snapshot.error for _at, snapshot in waiting)
        if not has_gpus and waiting and time.monotonic() < self.next_empty:
            return []
        self.next_empty = time.monotonic() + NO_GPUS_EVERY_S
        return waiting[:SAMPLES_AT_ONCE] if has_gpus else waiting[-1:]

    def _follow(self, answer: dict[str, Any]) -> float:
        """Do what the server says; seconds until the next exchange."""
        now = time.monotonic()
        for one in self.sending:
            while self.snapshots and self.snapshots[0][0] <= one[0]:
                self.snapshots.popleft()
        for job in self.reported[0]:
            self.failed.pop(job, None)
        if self.probed is self.reported[1]:
            self.probed = None
        if not answer.get("tickets"):
            self.tickets = None
        elif self.tickets is None:
            self.tickets = self.jobs.tickets()
        else:
            self.tickets = self.tickets[TICKETS_AT_ONCE:]
        self.active = set(answer.get("active", ()))
        for orders in answer.get("start", ()):
            self._work(str(orders["job"]), self._start, orders)
        for job in answer.get("kill", ()):
            self._work(str(UUID(job)), self._kill, job)
        for job in answer.get("stop", ()):
            self.jobs.nudge(str(UUID(job)))
        if (orders := answer.get("probe")) and now >= self.next_probe:
            self.next_probe = now + PROBE_EVERY_S
            self.pool.submit(self._probe_start, orders)
        if answer.get("start") or answer.get("register") or answer.get("tickets"):
            self.busy_until = now + BUSY_FOR_S
        if answer.get("register"):
            self.written = None
        if files := answer.get("files"):
            self.cleanup.start(files, self.connect, str(self.how.runs_dir))
        if self.background:
            self.background.every_s = float(answer.get("sample_every_s", self.background.every_s))
        return float(answer.get("again_s", 2.0))

    def _wait(self, again_s: float) -> None:
        """Until the next exchange is due: earlier after a start or an end, when the server waits for this."""
        began = time.monotonic()
        had = {job for job in self.active if self._has_runner(job)}
        while not self.stopping.wait(TICK_S):
            now = time.monotonic()
            for job in [job for job, future in self.working.items() if future.done()]:
                self.working.pop(job)
                self.busy_until = now + BUSY_FOR_S
                if job in self.failed:
                    return
            if not all(self._has_runner(job) for job in had):
                self.busy_until = now + BUSY_FOR_S
                return
            if now - began >= (min(again_s, SOON_S) if now < self.busy_until and not self.failures else again_s):
                return

    def _has_runner(self, job: str) -> bool:
        return job in self.working or self.jobs.has_runner(job)

    def _work(self, job: str, step: Any, argument: Any) -> None:
        """Do it in another thread, one step of a job at a time."""
        if job not in self.working:
            self.working[job] = self.pool.submit(step, argument)

    def _start(self, orders: dict[str, Any]) -> None:
        job = str(UUID(orders["job"]))
        try:
            os.makedirs(self.jobs.folder(job), mode=0o700, exist_ok=True)
            run_dir = self.how.runs_dir / str(UUID(orders["run_uid"])) / f"node-{int(orders['node'])}"
            self.jobs.launch(self._complete(job, orders["token"], run_dir=str(run_dir)))
            self.failed.pop(job, None)
        except (NotLaunched, OSError, ValueError) as error:
            self.failed[job] = str(error) if isinstance(error, NotLaunched) else f"{type(error).__name__}: {error}"
            say(f"job {job}: can't start: {self.failed[job]}")

    def _complete(self, job: str, token: str, **more: Any) -> dict[str, Any]:
        account = isolation.find_user(self.how.job_user) if self.how.job_user else None
        engine = self.engine.usable()
        return {
            "api": self.config["url"],
            "job": job,
            "token": token,
            "state_dir": self.jobs.folder(job),
            "user": self.how.job_user or None,
            "writable": self.config.get("job_writable", []) if self.how.isolation == isolation.SANDBOX else None,
            "engine": engine.stored() if engine else None,
            "path": job_path(account),
            "insecure": self.insecure,
            "relay": self.relay,
            **more,
        }

    def _kill(self, job: str) -> None:
        if not self.jobs.kill(job):
            say(f"job {job}: processes are still alive after a kill, will retry")

    def _probe_start(self, orders: dict[str, Any]) -> None:
        job = str(UUID(orders["job"]))
        error = ""
        try:
            self.jobs.probe(self._complete(job, orders["token"]))
        except NotLaunched as problem:
            error = str(problem)
        self.probed = {"error": error}


class Cleanup:
    """Removes what ended jobs left: runners' files, and later runs' directories, as the server allows.

    In a thread of its own: a slow disk delays no job.
    """

    def __init__(self, jobs: LocalJobs) -> None:
        self._jobs = jobs
        self._thread = ThreadPoolExecutor(1)
        self._due = 0.0
        self._pruned = self._waiting = {"jobs": 0, "runs": 0}

    def start(self, ages: dict[str, Any], connect: Callable[[], Client], runs_dir: str) -> None:
        """Begin a round if one is due. `ages`: how old files must be, in seconds (`jobs_s`, `runs_s`)."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + CLEANUP_EVERY_S
            self._thread.submit(self._round, float(ages["jobs_s"]), float(ages["runs_s"]), connect(), runs_dir)

    def _round(self, jobs_s: float, runs_s: float, client: Client, runs_dir: str) -> None:
        until = time.monotonic() + CLEANUP_S
        jobs, runs = self._jobs.old(jobs_s), old_runs(runs_dir, runs_s)
        try:
            for start in range(0, max(len(jobs), len(runs), 1), CLEANED_AT_ONCE):
                part = slice(start, start + CLEANED_AT_ONCE)
                self._remove(client, jobs[part], runs[part], runs_dir, until, is_first=start == 0)
                if time.monotonic() >= until:
                    self._due = time.monotonic() + CLEANUP_SOON_S
                    return
        except (Unreachable, Refused, OSError, ValueError, KeyError) as error:
            say(f"can't remove old files: {error}")
        finally:
            client.close()

    def _remove(
        self, client: Client, jobs: list[str], runs: list[str], runs_dir: str, until: float, *, is_first: bool
    ) -> None:
        """Ask which of these may go, and remove them. What was removed is reported with the next call."""
        # Runs that were removed lately are asked for once, with the first part.
        asked = {"jobs": jobs, "runs": runs, "removed": is_first}
        may_go = client.post("files", {**asked, "pruned": self._pruned, "waiting": self._waiting})
        there = [run for run in may_go["runs"] if os.path.isdir(os.path.join(runs_dir, str(UUID(run))))]
        self._pruned = {"jobs": 0, "runs": 0}
        self._pruned = {"jobs": self._jobs.forget(may_go["jobs"]), "runs": remove_runs(runs_dir, there, until)}
        left = {"jobs": len(may_go["jobs"]), "runs": len(there)}
        self._waiting = {kind: left[kind] - self._pruned[kind] for kind in left}


def _sample(at: float, snapshot: nvml.Snapshot) -> dict[str, Any]:
    """A snapshot with its age, since this machine's clock may be wrong."""
    return {
        "age_s": round(max(0.0, time.monotonic() - at), 3),
        "took_ms": snapshot.took_ms,
        "library": snapshot.library,
        "error": snapshot.error,
        "gpus": [one.sent() for one in snapshot.samples],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="host", description=__doc__)
    parser.add_argument("--home", required=True, help="where the agent keeps its files")
    parser.add_argument("--label", action="append", default=[], help="NAME=VALUE")
    parser.add_argument("--address", default="", help="address for other nodes of a run")
    options = parser.parse_args(arguments)
    os.umask(0o022)
    tree.protect_memory()
    home = os.path.realpath(options.home)
    try:
        lock = open(os.path.join(home, "host.lock"), "a")  # noqa: SIM115 - until this process ends
        os.fchmod(lock.fileno(), 0o600)  # jobs that can read it could lock it
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"another host uses {home}: choose another --home")
        return NEVER
    except OSError as error:
        say(f"can't start: {error}")
        return RETRY
    try:
        agent = HostAgent(home, dict(text.split("=", 1) for text in options.label), options.address)
    except (OSError, ValueError, KeyError) as error:
        say(f"can't start: {error}")
        return NEVER
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stopping.set())
    try:
        code = agent.run()
    except OSError as error:
        say(f"can't go on: {error}")
        code = RETRY
    sys.stderr.flush()
    os._exit(code)  # a driver that hangs must not keep this process
