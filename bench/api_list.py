"""API list requests a second at 8 clients, against the real server with a long queue, on SQLite and on PostgreSQL.

    python bench/api_list.py [sqlite|postgres] [WAITING]

`manage.py up` serves as it would anywhere, with its passes and its watching beside; the clients (processes that keep
their connections) share the machine with it. `/healthz` is the floor: an answer without a token, a query or a body.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from bench import sides
from tests.support import eventually, free_port

CLIENTS = 8
SECONDS = 4.0
ROUNDS = 3
PATHS = {
    "GET /healthz": "/healthz",
    "GET …/runs?limit=20": "/api/v1/projects/main/runs?limit=20",
    "GET …/runs (50)": "/api/v1/projects/main/runs",
    "GET …/queues/default?limit=20": "/api/v1/projects/main/queues/default?limit=20",
}


def measure(waiting: int) -> None:
    """Prints a table for one web process, and one for as many as there are cores."""
    token = _fill(waiting)
    cores = os.cpu_count() or 1
    for workers in sorted({1, cores}):
        port = free_port()
        env = os.environ | {
            "DSTACKWEB_PORT": str(port), "DSTACKWEB_WEB_WORKERS": str(workers), "DSTACKWEB_SHARED_UID": "1"
        }  # fmt: skip
        with open(Path(env["DSTACKWEB_HOME"], "up.log"), "ab") as log:
            up = subprocess.Popen([sys.executable, "manage.py", "up"], cwd=sides.ROOT, env=env, stdout=log, stderr=log)
        try:
            eventually(lambda port=port: _get(port, "/healthz", "")[0] == 200, deadline=60)  # type: ignore[misc]
            _table(port, token, f"{sides.database()}; {waiting:,} waiting; {workers} web process(es)")
            print(f"memory of the web processes: {_web_memory_mb(up.pid):.0f} MB\n", flush=True)
        finally:
            up.terminate()
            up.wait(60)


def _fill(waiting: int) -> str:
    import django

    django.setup()
    from django.db import connections

    from bench.filled import Filled
    from dstackweb.accounts.services import create_token

    there = Filled(room=100)
    there.fill(waiting)
    token = create_token(there.ada, "bench")[1]
    connections.close_all()
    return token


def _table(port: int, token: str, heading: str) -> None:
    rows: dict[str, list[str]] = {}
    for name, path in PATHS.items():
        status, size = _get(port, path, token)
        sides.must_be(status, 200)
        rounds = [_load(port, path, token) for _ in range(ROUNDS)]
        latencies = sorted(ms for _, found in rounds for ms in found)
        rows[name] = [
            sides.cell([rate for rate, _ in rounds]),
            f"{statistics.median(latencies):.1f}",
            f"{latencies[int(len(latencies) * 0.99)]:.1f}",
            f"{size / 1024:.1f}",
        ]
    sides.table(heading, ["requests a second", "median ms", "p99 ms", "KB"], rows)


def _load(port: int, path: str, token: str) -> tuple[float, list[float]]:
    """Requests a second of all clients together, and how long each took (ms)."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.SimpleQueue()
    begin = time.monotonic() + 0.3
    clients = [context.Process(target=_client, args=(port, path, token, begin, answers)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    latencies = [ms for _ in clients for ms in answers.get()]
    for client in clients:
        client.join()
    return len(latencies) / SECONDS, latencies


def _client(port: int, path: str, token: str, begin: float, answers: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Authorization": f"Bearer {token}"}
    found: list[float] = []
    time.sleep(max(0.0, begin - time.monotonic()))
    while (began := time.monotonic()) < begin + SECONDS:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200, response.status
        found.append((time.monotonic() - began) * 1000)
    answers.put(found)


def _get(port: int, path: str, token: str) -> tuple[int, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
    response = connection.getresponse()
    return response.status, len(response.read())


def _web_memory_mb(up: int) -> float:
    """Unique memory of gunicorn's processes; what they share counts once, with the first."""
    web = [child for child in psutil.Process(up).children(recursive=True) if "gunicorn" in " ".join(child.cmdline())]
    return sum(process.memory_full_info().uss for process in web) / 2**20


if __name__ == "__main__":
    if sides.here():
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
    else:
        sides.on_each_side(__file__, sys.argv[1:])
