"""API list requests a second at 8 clients, against the real server with a long queue, on SQLite and on PostgreSQL.

    python -m bench.api_list [sqlite|postgres] [WAITING [DSTACK]]

`manage.py up` serves as it would anywhere, with its passes and its watching beside; the clients (processes that keep
their connections) share the machine with it. `/healthz` is the floor: an answer without a token, a query or a body.
DSTACK is the path of another program of that name, whose lists of as many runs are measured beside on SQLite.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench import dstack_server, sides
from tests.support import eventually, free_port

CLIENTS = 8
SECONDS = 4.0
ROUNDS = 3


class Call(NamedTuple):
    """A request without its token."""

    path: str
    method: str = "GET"
    body: bytes | None = None


CALLS = {
    "GET /healthz": Call("/healthz"),
    "GET …/runs?limit=20": Call("/api/v1/projects/main/runs?limit=20"),
    "GET …/runs (50)": Call("/api/v1/projects/main/runs"),
    "GET …/queues/default?limit=20": Call("/api/v1/projects/main/queues/default?limit=20"),
}
CALLS_OF_DSTACK = {
    f"POST {dstack_server.LIST}, limit {limit}": Call(dstack_server.LIST, "POST", dstack_server.body(limit))
    for limit in (20, 50)
}


def measure(waiting: int, dstack: str = "") -> None:
    """Prints a table for one web process, one for as many as there are cores, and one of dstack."""
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
            eventually(partial(_size, port, CALLS["GET /healthz"], ""), deadline=120)
            heading = f"{sides.database()}; {waiting:,} waiting; {workers} web process(es)"
            _table(port, token, heading, CALLS)
            print(f"memory of the web processes: {_web_memory_mb(up.pid):.0f} MB\n", flush=True)
        finally:
            up.terminate()
            up.wait(60)
    if dstack and os.environ["BENCH_SIDE"] == "sqlite":
        with dstack_server.filled(dstack, Path(os.environ["DSTACKWEB_HOME"]), waiting) as port:
            heading = f"dstack {dstack_server.version(dstack)}, SQLite; {waiting:,} ended runs"
            _table(port, dstack_server.TOKEN, heading, CALLS_OF_DSTACK)


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


def _table(port: int, token: str, heading: str, calls: dict[str, Call]) -> None:
    rows: dict[str, list[str]] = {}
    for name, call in calls.items():
        size = _size(port, call, token)
        rounds = [_load(port, call, token) for _ in range(ROUNDS)]
        latencies = sorted(ms for _, found in rounds for ms in found)
        rows[name] = [
            sides.cell([rate for rate, _ in rounds]),
            f"{statistics.median(latencies):.1f}",
            f"{latencies[int(len(latencies) * 0.99)]:.1f}",
            f"{size / 1024:.1f}",
        ]
    sides.table(heading, ["requests a second", "median ms", "p99 ms", "KB"], rows)


def _load(port: int, call: Call, token: str) -> tuple[float, list[float]]:
    """Requests a second of all clients together, and how long each took (ms)."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.SimpleQueue()
    begin = time.monotonic() + 0.3
    clients = [context.Process(target=_client, args=(port, call, token, begin, answers)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    latencies = [ms for _ in clients for ms in answers.get()]
    for client in clients:
        client.join()
    return len(latencies) / SECONDS, latencies


def _client(port: int, call: Call, token: str, begin: float, answers: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    found: list[float] = []
    time.sleep(max(0.0, begin - time.monotonic()))
    while (began := time.monotonic()) < begin + SECONDS:
        _answer(connection, call, token)
        found.append((time.monotonic() - began) * 1000)
    answers.put(found)


def _size(port: int, call: Call, token: str) -> int:
    """Bytes of the answer; 0 while nothing answers."""
    try:
        return len(_answer(http.client.HTTPConnection("127.0.0.1", port, timeout=60), call, token))
    except OSError:
        return 0


def _answer(connection: http.client.HTTPConnection, call: Call, token: str) -> bytes:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    connection.request(call.method, call.path, body=call.body, headers=headers)
    response = connection.getresponse()
    found = response.read()
    sides.must_be(response.status, 200)
    return found


def _web_memory_mb(up: int) -> float:
    """Unique memory of gunicorn's processes; what they share counts once, with the first."""
    web = [child for child in psutil.Process(up).children(recursive=True) if "gunicorn" in " ".join(child.cmdline())]
    return sum(process.memory_full_info().uss for process in web) / 2**20


if __name__ == "__main__":
    if sides.here():
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, *sys.argv[2:3])
    else:
        sides.on_each_side(sys.argv[1:])
