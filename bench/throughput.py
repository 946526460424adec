"""Short runs a second from submit to done, and a burst of submits: a real server and its API, on both databases.

    python bench/throughput.py [sqlite|postgres] [RUNS [CLIENTS [AT_ONCE]]]

Everything is on one machine: web, workers, the runners of `true`, and the clients. AT_ONCE runs may be placed at once
(0: as many as there are cores). The floor is the same command as a bare process for each run.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from bench import sides
from tests.support import eventually, free_port

KEY = "dw_benchmark-token-of-the-first-admin"
WARM_UP = 10
BURST = 200
KINDS = ("gunicorn", "qcluster", "ticker", "host")


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
    _submit(port, WARM_UP, 2, "warm")
    _wait(port, WARM_UP)
    cpu, busy, began = _cpu_s(up), _busy_s(), time.monotonic()
    latencies = _submit(port, runs, clients, "run")
    submitted = time.monotonic() - began
    _wait(port, WARM_UP + runs)
    took = time.monotonic() - began
    used = {kind: (after - cpu[kind]) * 1000 / runs for kind, after in _cpu_s(up).items()}
    rows = {
        "runs a second, submit to done": [f"{runs / took:.1f}"],
        "submits a second": [f"{runs / submitted:.1f}"],
        f"a submit of {clients} clients, ms": [_spread(latencies)],
        **{f"CPU ms for each run: {kind}": [f"{ms:.0f}"] for kind, ms in used.items()},
        "CPU ms for each run: the whole machine": [f"{(_busy_s() - busy) * 1000 / runs:.0f}"],
        "floor: `sh -c true` a second": [f"{_floor(runs):.0f}"],
    }
    busy, began = _busy_s(), time.monotonic()
    rows[f"a burst of {BURST} submits of {BURST // 5} clients, ms"] = [
        _spread(_submit(port, BURST, BURST // 5, "burst"))
    ]
    rows["… of them a second"] = [f"{BURST / (time.monotonic() - began):.0f}"]
    _wait(port, WARM_UP + runs + BURST)
    heading = f"{_database()}; {runs} runs, {at_once or os.cpu_count()} at once"
    sides.table(heading, ["median (10–90 %, most)"], rows)


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


def _wait(port: int, done: int) -> None:
    """Until so many runs have ended. Asks rarely, since it shares the machine."""
    while True:
        text = _raw(port, "GET", "/metrics")
        counted: defaultdict[str, float] = defaultdict(float)
        for line in text.splitlines():
            if line.startswith("dstackweb_runs{"):
                status = line.partition('status="')[2].partition('"')[0]
                counted[status] += float(line.rpartition(" ")[2])
        assert not counted["failed"], text
        if counted["done"] >= done:
            return
        time.sleep(0.5)


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


def _cpu_s(up: int) -> dict[str, float]:
    """CPU seconds of the server's processes by kind, with what they started and waited for."""
    used = dict.fromkeys(KINDS, 0.0)
    for process in psutil.Process(up).children(recursive=True):
        words = process.cmdline()
        kind = next((kind for kind in KINDS if any(word.endswith(kind) for word in words)), None)
        if kind is not None:
            times = process.cpu_times()
            used[kind] += times.user + times.system + times.children_user + times.children_system
    return used


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + times.softirq + times.irq)


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
        sides.on_each_side(__file__, sys.argv[1:])
