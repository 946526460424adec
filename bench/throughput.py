"""Short runs a second from submit to done, and a burst of submits: a real server and its API, on both databases.

    python -m bench.throughput [sqlite|postgres] [RUNS [CLIENTS [AT_ONCE]]]

Everything is on one machine: web, workers, the runners of `true`, and the clients. AT_ONCE runs may be placed at once
(0: as many as there are cores). CPU time is that of the processes themselves, so other programs hardly change it:
detached runners become children of this process, which counts what they used when it reaps them. The floor is the same
command as a bare process for each run.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from bench import sides
from tests.support import eventually, free_port

KEY = "dw_benchmark-token-of-the-first-admin"
WARM_UP = 10
BURST = 200
BURST_CLIENTS = (4, 40)
LAUNCHERS, RUNNERS = "launchers", "runners and their commands"
KINDS = {
    "gunicorn": "web",
    "qcluster": "workers",
    "ticker": "ticker",
    "host": "host",
    "dstackweb.runner": LAUNCHERS,
}
PR_SET_CHILD_SUBREAPER = 36


def measure(runs: int, clients: int, at_once: int) -> None:
    """Prints one table: the rate, submits, and CPU time for each run."""
    port = free_port()
    env = os.environ | {"DSTACKWEB_PORT": str(port), "DSTACKWEB_ADMIN_TOKEN": KEY, "DSTACKWEB_SHARED_UID": "1"}
    with open(
        Path(env["DSTACKWEB_HOME"], "up.log") if Path(env["DSTACKWEB_HOME"]).is_dir() else os.devnull, "ab"
    ) as log:
        up = subprocess.Popen([sys.executable, "manage.py", "up"], cwd=sides.ROOT, env=env, stdout=log, stderr=log)
    try:
        eventually(lambda: _call(port, "GET", "/api/v1/hosts")["items"][0]["online"], deadline=90)
        _allow(at_once)
        _measure(port, up.pid, runs, clients, at_once)
    finally:
        up.terminate()
        up.wait(60)


def _measure(port: int, up: int, runs: int, clients: int, at_once: int) -> None:
    reaper = Reaper(up)
    _submit(port, WARM_UP, 2, "warm")
    _wait(WARM_UP)
    cpu, began = _cpu_s(up, reaper), time.monotonic()
    latencies = _submit(port, runs, clients, "run")
    submitted = time.monotonic() - began
    _wait(WARM_UP + runs)
    took = time.monotonic() - began
    time.sleep(1)  # the last runners end after they have reported
    used = {kind: (after - cpu[kind]) * 1000 / runs for kind, after in _cpu_s(up, reaper).items()}
    rows = {
        "runs a second, submit to done": [f"{runs / took:.1f}"],
        "submits a second": [f"{runs / submitted:.1f}"],
        f"a submit of {clients} clients, ms": [_spread(latencies)],
        **{f"CPU ms for each run: {kind}": [f"{ms:.0f}"] for kind, ms in used.items()},
        "CPU ms for each run: all": [f"{sum(used.values()):.0f}"],
        "floor: `sh -c true` a second": [f"{_floor(runs):.0f}"],
    }
    for number, many in enumerate(BURST_CLIENTS, start=1):
        began = time.monotonic()
        took_ms = _submit(port, BURST, many, f"burst-{many}")
        rows[f"a burst of {BURST} submits of {many} clients, ms"] = [_spread(took_ms)]
        rows[f"… of {many} clients a second"] = [f"{BURST / (time.monotonic() - began):.0f}"]
        _wait(WARM_UP + runs + BURST * number)
    heading = f"{_database()}; {runs} runs, {at_once or os.cpu_count()} at once"
    sides.table(heading, ["median (10–90 %, most)"], rows)


class Reaper:
    """Adopts detached runners, and sums what they and their commands used (s)."""

    def __init__(self, up: int) -> None:
        self.used_s, self._up = 0.0, up
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def reap(self) -> float:
        """What the runners that have ended used."""
        for child in psutil.Process().children():
            if child.pid != self._up and child.status() == psutil.STATUS_ZOMBIE:
                _, _, usage = os.wait4(child.pid, 0)
                self.used_s += usage.ru_utime + usage.ru_stime
        return self.used_s


def _allow(at_once: int) -> None:
    """Let the host take so many runs at once."""
    import django

    django.setup()
    from django.db import connections

    from dstackweb.backends.models import Host

    if at_once:
        Host.objects.update(cpus=at_once, memory_mib=at_once * 1024)
    connections.close_all()


def _database() -> str:
    from django.db import connections

    name = sides.database()
    connections.close_all()
    return name


def _submit(port: int, number: int, clients: int, prefix: str) -> list[float]:
    """Submit runs by so many clients at once; how long each request took (ms)."""
    found: list[float] = []
    numbers = iter(range(number))

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for index in numbers:
            config = {"type": "task", "name": f"{prefix}-{index}", "commands": ["true"]}
            began = time.monotonic()
            answer = _call(port, "POST", "/api/v1/projects/main/runs", {"config": config}, connection)
            found.append((time.monotonic() - began) * 1000)
            assert "name" in answer, answer
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _wait(done: int) -> None:
    """Until so many runs have ended. Asks the database rarely, since it shares the machine."""
    from django.db.models import Sum

    from dstackweb.runs.models import QueueCount

    while True:
        counts = QueueCount.objects.aggregate(done=Sum("done"), failed=Sum("failed"))
        sides.must_be(counts["failed"], 0)
        if counts["done"] >= done:
            return
        time.sleep(0.25)


def _call(
    port: int, method: str, path: str, body: Any = None, connection: http.client.HTTPConnection | None = None
) -> Any:
    return json.loads(_raw(port, method, path, body, connection))


def _raw(
    port: int, method: str, path: str, body: Any = None, connection: http.client.HTTPConnection | None = None
) -> str:
    there = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    there.request(method, path, json.dumps(body) if body else None, headers)
    text = there.getresponse().read().decode()
    if connection is None:
        there.close()
    return text


def _cpu_s(up: int, reaper: Reaper) -> dict[str, float]:
    """CPU seconds so far by kind of process."""
    used = dict.fromkeys((*KINDS.values(), RUNNERS), 0.0)
    used[RUNNERS] = reaper.reap()
    for process in psutil.Process(up).children(recursive=True):
        words = process.cmdline()
        kind = next((KINDS[word] for word in map(os.path.basename, words) if word in KINDS), None)
        if kind is not None:
            times = process.cpu_times()
            used[kind] += times.user + times.system
    return used


def _floor(runs: int) -> float:
    began = time.monotonic()
    for _ in range(runs):
        subprocess.run(["/bin/sh", "-c", "true"], check=True)
    return runs / (time.monotonic() - began)


def _spread(values: list[float]) -> str:
    ordered = sorted(values)
    at = [ordered[int(len(ordered) * share)] for share in (0.1, 0.9)]
    return f"{statistics.median(ordered):.0f} ({at[0]:.0f}–{at[1]:.0f}, {ordered[-1]:.0f})"


if __name__ == "__main__":
    if sides.here():
        numbers = [int(word) for word in sys.argv[1:]]
        measure(*numbers, *(100, 4, 0)[len(numbers) :])
    else:
        sides.on_each_side(sys.argv[1:])
