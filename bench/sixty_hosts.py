"""Measure how long heartbeats and polls wait for a server while the runs of many hosts start at once.

    python -m bench.sixty_hosts [sqlite|postgres] [HOSTS [RUNS]]

`manage.py up` serves with one web process. Simulated hosts behind one address poll, start what they are told to as
their runners would (claim, start, a line of log, end), and send the heartbeats of their jobs together, each every
second. A line gives seconds: median, 99 % and most. The floor: the same calls once all runs have ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from bench import sides
from dstackweb.runner.client import Client, Refused, Unreachable
from tests.support import eventually, free_port

STARTERS = 60
RUN_S = 3.0
"""How long the job of a run goes on."""
IDLE_S = 10.0
FACTS = {
    "version": "", "cpus": 64, "memory_mib": 65536, "boot_id": "b", "gpus": [], "isolation": "shared", "job_user": "",
    "cgroups": {"version": "v2", "memory": True, "cpu": True}, "runs_dir": "/srv/runs", "error": "", "labels": {},
}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Measure on both sides, or in this process the one it is on."""
    if sides.here():
        measure(*map(int, arguments))
    else:
        sides.on_each_side(arguments)


def measure(hosts: int = 60, runs: int = 600) -> None:
    """Print the table of this process's database."""
    import django

    django.setup()
    tokens = fill(hosts, runs)
    port = free_port()
    env = os.environ | {"DSTACKWEB_PORT": str(port), "DSTACKWEB_WEB_WORKERS": "1", "DSTACKWEB_SHARED_UID": "1"}
    api = f"http://127.0.0.1:{port}"
    with open(Path(env["DSTACKWEB_HOME"], "up.log"), "ab") as log:
        up = subprocess.Popen([sys.executable, "manage.py", "up"], cwd=sides.ROOT, env=env, stdout=log, stderr=log)
    try:
        eventually(lambda: urllib.request.urlopen(f"{api}/healthz", timeout=2).status == 200, deadline=60)
        fleet = Fleet(api, tokens)
        fleet.start()
        eventually(lambda: fleet.ended >= runs, deadline=300, every=0.2)
        busy = fleet.take()
        time.sleep(IDLE_S)
        idle = fleet.take()
        fleet.over.set()
    finally:
        up.terminate()
        up.wait(60)
    rows = {
        f"{what}, {when}": [cell(times[what])] for when, times in (("busy", busy), ("idle", idle)) for what in times
    }
    sides.table(f"{sides.database()}; {runs} runs start on {hosts} hosts", ["median  99 %  most, s"], rows)


def cell(times_s: list[float]) -> str:
    """The median, the 99 % quantile and the longest."""
    ordered = sorted(times_s)
    quantiles = (ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))], ordered[-1])
    return "  ".join(f"{seconds:.3f}" for seconds in quantiles)


def fill(hosts: int, runs: int) -> list[tuple[str, str]]:
    """Write hosts that have joined and runs that wait; return the hosts' names and tokens."""
    from django.core.management import call_command
    from django.db import connections

    from dstackweb.lib.secrets import digest
    from tests.factories import join, make_host, make_project, make_run, make_user

    call_command("migrate", verbosity=0)
    project = make_project("main")
    ada = join(project, make_user("ada"))
    tokens = [(f"host-{number}", f"dwh_{uuid4().hex}") for number in range(hosts)]
    for name, token in tokens:
        make_host(name, cpus=64, memory_gib=64, token_digest=digest(token), labels={"fleet": "1"})
    for _ in range(runs):
        make_run(project, ada, labels={"fleet": "1"})
    connections.close_all()
    return tokens


class Fleet:
    """Hosts that do what the server says. `ended` counts the runs that have ended."""

    def __init__(self, api: str, tokens: list[tuple[str, str]]) -> None:
        self.api, self.tokens = api, tokens
        self.over = threading.Event()
        self.ended = 0
        self._times: dict[str, list[float]] = defaultdict(list)
        self._starters = ThreadPoolExecutor(STARTERS)

    def start(self) -> None:
        for name, token in self.tokens:
            threading.Thread(target=self._host, args=(name, token), daemon=True).start()

    def take(self) -> dict[str, list[float]]:
        """Return the seconds that calls took since this was last asked."""
        times, self._times = self._times, defaultdict(list)
        return times

    def _timed(self, what: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            return call()
        except (Unreachable, Refused):
            return {}
        finally:
            self._times[what].append(time.monotonic() - began)

    def _host(self, name: str, token: str) -> None:
        client, relay = Client(self.api, f"hosts/{name}", token, name), Client(self.api, "jobs", "", "")
        running: dict[str, dict[str, str]] = {}
        begun: set[str] = set()
        client.post("facts", {**FACTS, "starting": True, "labels": {"fleet": "1"}})
        while not self.over.wait(1.0):
            states = dict.fromkeys(begun, "runner")
            answer = self._timed("poll", lambda: client.post("poll", {"jobs": states}))  # noqa: B023
            for order in answer.get("start", ()):
                if order["job"] not in begun:
                    begun.add(order["job"])
                    self._starters.submit(self._run, order, running)
            if entries := list(running.values()):
                relay.use_token(entries[0]["token"])
                self._timed("heartbeats", lambda: relay.post("heartbeats", {"jobs": entries}))

    def _run(self, order: dict[str, str], running: dict[str, dict[str, str]]) -> None:
        """Call as the runner of a job that writes a line and ends well."""
        nonce = uuid4().hex
        client = Client(self.api, f"jobs/{order['job']}", order["token"], nonce)
        self._patiently("claim", lambda: client.post("claim", {"nonce": nonce, "host": "fleet"}))
        running[order["job"]] = {"token": order["token"], "nonce": nonce}
        self._patiently("started", lambda: client.post("started", {}))
        time.sleep(RUN_S)
        self._patiently("log", lambda: client.post_bytes("logs?offset=0", b"hello\n"))
        del running[order["job"]]
        self._patiently(
            "exit", lambda: client.post("exit", {"exit_code": 0, "reason": "done_by_runner", "log_size": 6})
        )
        self.ended += 1

    def _patiently(self, what: str, call: Callable[[], dict[str, Any]]) -> None:
        """Call until it is answered, as runners do."""
        while not self.over.is_set():
            began = time.monotonic()
            try:
                call()
                return
            except Unreachable:
                time.sleep(0.5)
            finally:
                self._times[what].append(time.monotonic() - began)


if __name__ == "__main__":
    main(sys.argv[1:])
