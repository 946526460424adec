"""What watching costs a real Dask scheduler: its transitions a second with `tracking.dask.watch` and without it.

    python bench/dask_progress.py [ROUNDS]

A cluster (the scheduler in this process, one worker in another) runs 20,000 tasks that do nothing, in 5,000 groups, by
turns with and without `watch`, whose route is a process that throws away what it gets. Rates of a shared machine go up
and down by more than the plugin takes; so what it took itself is measured, too: on the scheduler's loop by a clock
around its calls (the clock's cost included), and processor time of its sending thread. The first round is left out.
"""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed import Client, LocalCluster, wait

from bench import sides
from dstackweb.tracking.dask import watch

GROUPS = 5_000
TASKS = 4
"""In each group."""
PREFIXES = ("load", "clean", "augment", "train", "score")
ROUNDS = 5


class Took(NamedTuple):
    """A run: its transitions and seconds, and those of the plugin on the loop and in its own thread."""

    transitions: int
    seconds: float
    loop_s: float = 0.0
    thread_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.transitions / self.seconds


def measure(rounds: int) -> None:
    """Prints the table."""
    machine = f"{sides.cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}; load {os.getloadavg()[0]:.1f} at the start\n", flush=True)
    with _route() as url:
        pairs = [(_run(None), _run(url)) for _ in range(rounds + 1)][1:]
    clocked = [watched for _, watched in pairs]
    sides.table(
        f"{GROUPS * TASKS:,} tasks in {GROUPS:,} groups",
        ["transitions/s", "% of the loop", "% in its thread", "µs a transition"],
        {
            "without watch": [sides.cell([plain.rate for plain, _ in pairs])],
            "with watch": [
                sides.cell([took.rate for took in clocked]),
                *(f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})" for values in (
                    [100 * took.loop_s / took.seconds for took in clocked],
                    [100 * took.thread_s / took.seconds for took in clocked],
                    [1e6 * (took.loop_s + took.thread_s) / took.transitions for took in clocked],
                )),
            ],
        },
    )  # fmt: skip
    slower = [100 * (1 - watched.rate / plain.rate) for plain, watched in pairs]
    print(f"watched rounds were slower by {sides.cell(slower)} %", flush=True)


def _run(url: str | None) -> Took:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, silence_logs=50) as cluster,
        Client(cluster) as client,
    ):
        scheduler = cluster.scheduler
        clock = _Clock()
        if url:
            watch(client, url=url, token=uuid.uuid4().hex)
            plugin = next(plugin for name, plugin in scheduler.plugins.items() if name.startswith("dstackweb-"))
            for name in ("transition", "_look_over", "_tell"):
                setattr(plugin, name, clock.around(getattr(plugin, name)))
        keys = [(f"{PREFIXES[i % len(PREFIXES)]}-{uuid.uuid4().hex}", n) for i in range(GROUPS) for n in range(TASKS)]
        before = scheduler.transition_counter
        began = time.perf_counter()
        futures = client.map(abs, range(len(keys)), key=keys)
        wait(futures)
        seconds = time.perf_counter() - began
        return Took(scheduler.transition_counter - before, seconds, clock.seconds, _thread_s())


class _Clock:
    """Adds up how long the calls took of what it was put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, act: Callable[..., None]) -> Callable[..., None]:
        def clocked(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            act(*args, **kwargs)
            self.seconds += time.perf_counter() - began

        return clocked


def _thread_s() -> float:
    """Processor seconds of the sending thread."""
    for thread in threading.enumerate():
        if thread.name == "dstackweb-tracking" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


@contextmanager
def _route() -> Iterator[str]:
    """The URL of a process that takes everything."""
    context = multiprocessing.get_context("spawn")
    port: Any = context.SimpleQueue()
    process = context.Process(target=_serve, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get()}/tasks"
    finally:
        process.terminate()
        process.join()


def _serve(port: Any) -> None:
    answer = json.dumps({"applied": 0, "outdated": 0, "refused": []}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.put(server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    measure(int(sys.argv[1]) if sys.argv[1:] else ROUNDS)
