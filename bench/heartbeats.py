"""Heartbeats that a web process takes a second, and what a check of the watcher costs, on SQLite and on PostgreSQL.

    python -m bench.heartbeats [sqlite|postgres] [JOBS]

`manage.py up` serves as it would anywhere; the clients share the machine with it, so CPU time of the web process is
what counts. `/healthz` is the floor: an answer without a token, a query or a body.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bench import sides
from tests.support import eventually, free_port

CLIENTS = 8
SECONDS = 4.0
ROUNDS = 3
BATCHES = (8, 50, 200)
NONCE = "n"

Request = tuple[str, str, str, dict[str, str]]
"""Method, path, body, headers."""


def measure(jobs: int) -> None:
    """Prints both tables."""
    import django

    django.setup()
    from django.db import connections

    there = _fill(jobs)
    name = f"{sides.database()}; {jobs:,} running jobs"
    _watcher(name)
    connections.close_all()
    port = free_port()
    env = os.environ | {"DSTACKWEB_PORT": str(port), "DSTACKWEB_WEB_WORKERS": "1", "DSTACKWEB_SHARED_UID": "1"}
    with open(Path(env["DSTACKWEB_HOME"], "up.log"), "ab") as log:
        up = subprocess.Popen([sys.executable, "manage.py", "up"], cwd=sides.ROOT, env=env, stdout=log, stderr=log)
    try:
        eventually(lambda: _answers(port), deadline=60)
        _heartbeats(port, _web_process(up.pid), there, f"{name}; one web process")
    finally:
        up.terminate()
        up.wait(60)


def _fill(number: int) -> list[tuple[str, str]]:
    """Running jobs of a host, written past the services: their ids and tokens."""
    from django.core.management import call_command

    from dstackweb.lib.models import Watch
    from dstackweb.runs.launch import job_token
    from dstackweb.runs.models import Job, Run
    from tests.factories import join, make_host, make_project, make_run, make_user

    call_command("migrate", verbosity=0)
    project = make_project("main")
    ada = join(project, make_user("ada"))
    host = make_host("large", cpus=8, memory_gib=64)
    pattern = make_run(project, ada)
    now_s = Watch.now_s()
    runs = Run.objects.bulk_create(
        (
            Run(project=project, queue=pattern.queue, user=ada, name=f"busy-{index}", status="running",
                shape=pattern.shape, spec=pattern.spec, provenance=pattern.provenance, config_text=pattern.config_text,
                seniority_us=pattern.seniority_us + index, rank=pattern.rank + index)
            for index in range(number)
        ),
        batch_size=1000,
    )  # fmt: skip
    jobs = Job.objects.bulk_create(
        (
            Job(run=run, attempt=1, status="running", backend=host.backend, host=host, claim_nonce=NONCE,
                heard_at_s=now_s, status_at_s=now_s)
            for run in runs
        ),
        batch_size=1000,
    )  # fmt: skip
    sides.settle()
    return [(str(job.pk), job_token(job.pk)) for job in jobs]


def _watcher(heading: str) -> None:
    from django.db.models import F

    from dstackweb.runs.models import Job
    from dstackweb.scheduler import watch

    running = Job.objects.filter(status="running")
    acts: dict[str, Callable[[], object]] = {
        "a check of the watcher": watch.watch,
        "floor: reading one row by its key": lambda: Job.objects.filter(pk=running[0].pk).values_list("pk").get(),
        "for comparison: writing all running jobs once": lambda: running.update(heard_at_s=F("heard_at_s")),
    }
    watch.watch()
    sides.table(heading, ["ms"], {name: [sides.measured(lambda act=act: act, 5)] for name, act in acts.items()})  # type: ignore[misc]


def _heartbeats(port: int, web: psutil.Process, jobs: list[tuple[str, str]], heading: str) -> None:
    kinds: dict[str, tuple[int, list[Request]]] = {"floor: GET /healthz": (1, [("GET", "/healthz", "", {})])}
    kinds["one heartbeat in a request"] = 1, [_single(job, token) for job, token in jobs]
    for size in BATCHES:
        tokens = [token for _, token in jobs]
        batches = [_batch(tokens[first : first + size]) for first in range(0, len(tokens), size)]
        kinds[f"{size} heartbeats in a request"] = size, batches
    rows: dict[str, list[str]] = {}
    for name, (size, requests) in kinds.items():
        rounds = [_load(port, web, requests) for _ in range(ROUNDS)]
        rows[name] = [
            sides.cell([count * size / SECONDS for count, _, _ in rounds]),
            sides.cell([cpu_s * 1000 / count for count, cpu_s, _ in rounds]),
            sides.cell([count * size / cpu_s for count, cpu_s, _ in rounds]),
            f"{statistics.median(ms for _, _, found in rounds for ms in found):.1f}",
        ]
    sides.table(heading, ["jobs a second", "CPU ms a request", "jobs a CPU second", "median ms"], rows)


def _single(job: str, token: str) -> Request:
    headers = {"Authorization": f"Bearer {token}", "X-Nonce": NONCE, "Content-Type": "application/json"}
    return "POST", f"/api/v1/runner/jobs/{job}/heartbeat", '{"beat": 1, "phase": "running"}', headers


def _batch(tokens: list[str]) -> Request:
    body = json.dumps({"jobs": [{"token": token, "nonce": NONCE} for token in tokens]})
    return "POST", "/api/v1/runner/jobs/heartbeats", body, {"Content-Type": "application/json"}


def _load(port: int, web: psutil.Process, requests: list[Request]) -> tuple[int, float, list[float]]:
    """How many requests all clients made together, the web process's CPU time (s), and how long each took (ms)."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.SimpleQueue()
    begin = time.monotonic() + 0.3
    clients = [
        context.Process(target=_client, args=(port, requests[number::CLIENTS] or requests, begin, answers))
        for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    before = _cpu_s(web)
    latencies = [ms for _ in clients for ms in answers.get()]
    cpu_s = _cpu_s(web) - before
    for client in clients:
        client.join()
    return len(latencies), cpu_s, latencies


def _client(port: int, requests: list[Request], begin: float, answers: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    found: list[float] = []
    time.sleep(max(0.0, begin - time.monotonic()))
    while (began := time.monotonic()) < begin + SECONDS:
        method, path, body, headers = requests[len(found) % len(requests)]
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, text
        found.append((time.monotonic() - began) * 1000)
    answers.put(found)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _web_process(up: int) -> psutil.Process:
    """The one process of gunicorn's that answers requests."""
    web = [child for child in psutil.Process(up).children(recursive=True) if "gunicorn" in " ".join(child.cmdline())]
    return next(process for process in web if process.ppid() in {other.pid for other in web})


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    if sides.here():
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    else:
        sides.on_each_side(sys.argv[1:])
