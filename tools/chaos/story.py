"""The course of events: submit, break, repair, drain, look."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psycopg

from tests.server import TOKEN
from tools.chaos import checks, stalls
from tools.chaos.deployment import Deployment
from tools.chaos.faults import Breaker
from tools.chaos.workload import now_s, read_notes, tasks

EVERY_S = (2.0, 6.0)
STUCK_S = 120.0
"""When no run has ended for so long, those that are left never will."""
SUBMIT_SHARE = 0.85
"""Runs are submitted evenly over this share of the time."""
LOOK_S, SAY_S = 0.5, 10.0
ENDED = {"done", "failed", "terminated"}


class Story:
    """`run()` plays it, and returns the violations. `say` prints a line."""

    def __init__(self, folder: Path, runs: int, minutes: float, seed: int) -> None:
        self.folder, self.seconds, self.seed = folder, minutes * 60, seed
        rng = random.Random(seed)
        (folder / "notes").mkdir()
        (folder / "notes" / "flags").mkdir()
        self.notes = folder / "notes" / "commands"
        self.notes.touch()
        for path, mode in ((self.notes, 0o666), (folder / "notes" / "flags", 0o777)):
            path.chmod(mode)
        self.tasks = {task.name: task for task in tasks(runs, self.notes, rng)}
        self.rng = rng
        self.submitted = 0
        self.statuses: Counter[str] = Counter()
        self.idle: list[float] = []
        self._over = threading.Event()

    def run(self) -> list[str]:
        self.say(f"SEED={self.seed}; {len(self.tasks)} runs, {self.seconds:.0f} s; {os.cpu_count()} cores, "
                 f"load {os.getloadavg()[0]:.1f}")  # fmt: skip
        with Deployment(self.folder) as deployment:
            self.deployment, self.breaker = deployment, Breaker(deployment, self.tasks, self.rng)
            self.began = now_s()
            self.say("two control planes and three hosts are there" + self._lacking())
            prober = stalls.Prober(deployment.url)
            submitter = threading.Thread(target=self._submit, daemon=True)
            submitter.start()
            try:
                self._break()
                for fault in self.breaker.repair(everything=True):
                    self.say(f"repaired: {fault.kind}")
                self._drain(submitter)
            finally:
                self._over.set()
                prober.stop()
            over = now_s()
            executions = read_notes(self.notes)
            found = list(checks.violations(deployment, self.tasks.values(), self.breaker, executions))
            starts = sorted(at for execution in executions.values() for at in execution.starts)
            self._print(found, stalls.table(self.breaker.happened, starts, prober.answered, self.idle, over), starts)
        return found

    def say(self, line: str) -> None:
        at = now_s() - self.began if hasattr(self, "began") else 0.0
        print(f"{at:6.1f} s  {line}", flush=True)

    def _lacking(self) -> str:
        real, disk = self.deployment.network.is_real, self.deployment.has_disk
        return "" if real and disk else f" (network namespace: {real}, disk of its own: {disk}; both need root)"

    def _submit(self) -> None:
        """One client, which repeats each request until it is answered."""
        pace = self.seconds * SUBMIT_SHARE / max(1, len(self.tasks))
        for number, task in enumerate(self.tasks.values()):
            while not self._over.is_set() and now_s() < self.began + number * pace:
                time.sleep(0.05)
            self._until_answered("runs", {"config": task.config}, task.name)
            self.submitted += 1
            if task.stop_after_s is not None:
                stopper = threading.Timer(task.stop_after_s, self._until_answered, (f"runs/{task.name}/stop", {}))
                stopper.daemon = True
                stopper.start()

    def _until_answered(self, path: str, body: dict[str, object], key: str = "") -> None:
        while not self._over.is_set() and not self._post(path, body, key):
            time.sleep(0.3)

    def _post(self, path: str, body: dict[str, object], key: str) -> bool:
        headers = {"Authorization": f"Bearer {TOKEN}"} | ({"Idempotency-Key": key} if key else {})
        try:
            url = f"{self.deployment.url}/api/v1/projects/main/{path}"
            answer = httpx.post(url, json=body, headers=headers, timeout=10)
        except httpx.HTTPError:
            return False
        assert answer.is_success or answer.status_code >= 500, f"{answer.status_code} {answer.text}"
        return answer.is_success

    def _break(self) -> None:
        next_at, said_at = now_s() + self.rng.uniform(*EVERY_S), 0.0
        while now_s() < self.began + self.seconds:
            self.deployment.keep()
            for fault in self.breaker.repair():
                self.say(f"repaired: {fault.kind} {fault.what}")
            if now_s() >= next_at:
                next_at = now_s() + self.rng.uniform(*EVERY_S)
                with contextlib.suppress(psycopg.Error):  # it is down itself
                    if struck := self.breaker.strike():
                        self.say(f"{struck.kind} {struck.what}")
            said_at = self._look(said_at)
            time.sleep(LOOK_S)

    def _look(self, said_at: float) -> float:
        """Count the runs, and say so now and then; returns when that was last."""
        with contextlib.suppress(psycopg.Error), self.deployment.database() as database:
            self.statuses = Counter(dict(database.execute("SELECT status, count(*) FROM runs_run GROUP BY 1")))
            if not self.statuses["submitted"]:
                self.idle.append(now_s())
        if now_s() - said_at < SAY_S:
            return said_at
        counts = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        self.say(f"submitted {self.submitted} of {len(self.tasks)}: {counts}")
        return now_s()

    def _drain(self, submitter: threading.Thread) -> None:
        """Until every run has ended, or none has for long. Delays before retries are cut short."""
        ended, ended_at, said_at = 0, now_s(), 0.0
        while now_s() < ended_at + STUCK_S:
            self.deployment.keep()
            said_at = self._look(said_at)
            if ended < (ended := sum(self.statuses[name] for name in ENDED)):
                ended_at = now_s()
            if not submitter.is_alive() and ended >= len(self.tasks) and self._are_well():
                return
            with contextlib.suppress(psycopg.Error), self.deployment.database() as database:
                database.execute("UPDATE runs_run SET retry_at = now() WHERE status = 'pending' AND retry_at > now()")
            time.sleep(LOOK_S)

    def _are_well(self) -> bool:
        return all(host["online"] and not host["held_back_at"] for host in self.deployment.hosts())

    def _print(self, found: list[str], table: str, starts: list[float]) -> None:
        self.say("done: " + ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items())))
        print(f"\n{table}\n\nlongest time without a start while runs waited: "
              f"{stalls.longest_gap(starts, starts[0], starts[-1], self.idle) if starts else 0.0:.1f} s\n")  # fmt: skip
        for line in found:
            print(f"VIOLATION  {line}")
        print(f"{len(found)} violations with SEED={self.seed}", flush=True)
