"""What watching costs a real Dask scheduler: processor time for each of its transitions, and its transitions a second.

    python -m bench.dask_progress [PAIRS]

Tasks that do nothing, four to a group, go from released to forgotten. Rates of a shared machine go up and down by much
more than the plugin takes, so watched and unwatched rounds take turns (A B B A) in the same processes, and a round is
compared with the one beside it, and the median and the quartiles are printed.

First the scheduler's engine in this process, without network, ticks and sending, in rounds so short that noise cancels:
what the plugin's hook adds to a transition. Then a scheduler in a process of its own that is watched as any is. Its
worker only says that each task is done: a real one is several times slower than the scheduler, and would hide what that
loses. The scheduler has the first core; worker, client, and a route that throws away what it gets have the last one in
both kinds of rounds. Processor time is all of the scheduler's process, until a second after the last task is gone; the
plugin's ticks and its sending thread have clocks of their own within it. The garbage collector rests during a round: it
takes 0.1 s at once, from the code that happens to allocate. Rates of transitions depend on load: while the scheduler
waits for its client, or for a busy core, they say little about the plugin.
"""

from __future__ import annotations

import asyncio
import gc
import http.server
import json
import logging
import multiprocessing
import os
import pickle
import platform
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from dask._task_spec import Task
from distributed import Client, Scheduler, wait
from distributed.batched import BatchedSend
from distributed.core import connect
from distributed.deploy.subprocess import SubprocessCluster

from bench import sides
from dstackweb.tracking.dask import ReportingPlugin, watch

PREFIXES = ("load", "clean", "augment", "train", "score")
TASKS = 4
"""In each group."""
ENGINE_GROUPS, ENGINE_PAIRS, ENGINE_WARM_UP = 50, 400, 20
GROUPS, PAIRS = 3_000, 10
PAUSE_S = 1.0
"""After a round: its last counts are reported meanwhile."""
SPEC = Task("bench", abs, 1)
WORKER = "tcp://127.0.0.1:1"
FINISHED = {"nbytes": 28, "type": pickle.dumps(int), "typename": "int", "metadata": {}, "thread": 1, "status": "OK"}
CORES = (0, (os.cpu_count() or 1) - 1)
"""The scheduler's, and everything else's."""


def measure(pairs: int) -> None:
    """Prints the tables."""
    machine = f"{sides.cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}; load {os.getloadavg()[0]:.1f} at the start\n", flush=True)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with _other(_serve) as port:
        url = f"http://127.0.0.1:{port}/tasks"
        _pin(CORES[0])
        asyncio.run(_engine(url))
        _pin(CORES[1])
        _cluster(url, pairs)


def _spread(values: list[float], digits: int = 2) -> str:
    """The median, and between the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


class _Sink:
    """Stands in for a worker's connection: keeps what the scheduler asks it to do."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, *messages: dict[str, Any]) -> None:
        self.messages += messages


class _Silent:
    """A worker's connection that never says anything."""

    name = local_address = peer_address = ""

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    async def write(self, message: object, **more: object) -> None:
        pass

    async def read(self, **more: object) -> object:
        return await self._closed.wait()

    def closed(self) -> bool:
        return self._closed.is_set()

    async def close(self) -> None:
        self._closed.set()

    abort = close


async def _engine(url: str) -> None:
    async with Scheduler(port=0, protocol="inproc", dashboard=False) as scheduler:
        joined = asyncio.create_task(scheduler.add_worker(_Silent(), address=WORKER, **_registration()))
        await asyncio.sleep(0.1)
        scheduler.stream_comms[WORKER] = sink = _Sink()
        plugin = ReportingPlugin(url, "t")
        await scheduler.register_scheduler_plugin(plugin, name=plugin.name, idempotent=True)
        pairs = []
        for number in range(ENGINE_WARM_UP + ENGINE_PAIRS):
            took = {}
            for watched in (number % 2 == 0, number % 2 == 1):
                scheduler.plugins.pop(plugin.name, None)
                if watched:
                    scheduler.plugins[plugin.name] = plugin
                took[watched] = _live(scheduler, sink)
                plugin._counter.dirty.clear()
            pairs.append((took[False], took[True]))
        joined.cancel()
        await asyncio.wait([joined])
    del pairs[:ENGINE_WARM_UP]
    sides.table(
        "the engine alone, processor time",
        ["µs a transition", "more by the hook, µs", "%"],
        {
            "without watch": [_spread([plain for plain, _ in pairs])],
            "with watch": [
                _spread([watched for _, watched in pairs]),
                _spread([watched - plain for plain, watched in pairs]),
                _spread([100 * (watched / plain - 1) for plain, watched in pairs], 1),
            ],
        },
    )


def _live(scheduler: Any, sink: _Sink) -> float:
    """Tasks from their making to their end, by the scheduler's own handlers; processor time of a transition in µs."""
    keys = _keys(ENGINE_GROUPS)
    gc.collect(1)
    gc.disable()
    before, began = scheduler.transition_counter, time.thread_time()
    for number, key in enumerate(keys):
        scheduler.new_task(key, SPEC, "released").priority = (0, 1, number)
    scheduler.client_desires_keys(keys, "bench")
    scheduler.transitions(dict.fromkeys(reversed(keys), "waiting"), "bench")
    while sink.messages:
        messages, sink.messages = sink.messages, []
        for message in messages:
            if message["op"] == "compute-task":
                scheduler.handle_task_finished(worker=WORKER, **_finished(message))
    scheduler.client_releases_keys(keys, "bench")
    took = time.thread_time() - began
    gc.enable()
    sink.messages.clear()
    sides.must_be(len(scheduler.tasks), 0)
    return 1e6 * took / (scheduler.transition_counter - before)


class Reading(NamedTuple):
    """A scheduler's process at a moment; seconds: the clock's, its processor time, and the plugin's share in that."""

    transitions: int
    clock: float
    process: float
    ticks: float
    thread: float


class Round(NamedTuple):
    """Transitions a second, the share of a core while they lasted in %, and µs of processor time for a transition."""

    rate: float
    core: float
    process: float
    ticks: float
    thread: float


def _cluster(url: str, pairs: int) -> None:
    options = {"dashboard": False, "worker_ttl": "1h"}
    with (
        SubprocessCluster(n_workers=0, dashboard_address=None, scheduler_kwargs=options) as cluster,
        Client(cluster) as client,
        _other(_work, cluster.scheduler_address),
    ):
        client.run_on_scheduler(_pin, CORES[0])
        rounds = []
        for number in range(-1, pairs):  # the first pair warms up
            first = number % 2 == 1
            took = {watched: _round(client, url if watched else None) for watched in (first, not first)}
            rounds.append((took[False], took[True]))
    rows = {}
    for name, of in {"without watch": 0, "with watch": 1}.items():
        these = [pair[of] for pair in rounds[1:]]
        values = zip(*these, strict=True)
        rows[name] = [_spread(list(column), 0 if n < 2 else 1 if n == 2 else 2) for n, column in enumerate(values)]
    del rows["without watch"][3:]
    columns = ["transitions/s", "% of its core", "µs CPU a transition", "by its ticks", "by its thread"]
    sides.table(f"a scheduler, {pairs} pairs of rounds", columns, rows)
    found = rounds[1:]
    rates = [100 * (watched.rate / plain.rate - 1) for plain, watched in found]
    times = [100 * (watched.process / plain.process - 1) for plain, watched in found]
    plugin = [100 * (watched.ticks + watched.thread) / watched.process for _, watched in found]
    print(f"watched beside not: {_spread(rates, 1)} % transitions a second, {_spread(times, 1)} % processor time;\n"
          f"by its own clocks, ticks and thread are {_spread(plugin, 1)} % of the scheduler's", flush=True)  # fmt: skip


def _round(client: Client, url: str | None) -> Round:
    name = ""
    if url:
        watch(client, url=url, token=uuid.uuid4().hex)
        name = client.run_on_scheduler(_clock_ticks)
    keys = _keys(GROUPS)
    before = client.run_on_scheduler(_before)
    futures = client.map(abs, range(len(keys)), key=keys)
    wait(futures)
    del futures
    done, after = client.run_on_scheduler(_after)
    if name:
        client.unregister_scheduler_plugin(name)
        client.run_on_scheduler(_until_unwatched)
    transitions, seconds = done.transitions - before.transitions, done.clock - before.clock
    return Round(
        transitions / seconds,
        100 * (done.process - before.process) / seconds,
        *(1e6 * (b - a) / transitions for a, b in zip(before[2:], after[2:], strict=True)),
    )


def _clock_ticks(dask_scheduler: Any) -> str:
    """Adds up what the plugin's ticks take, in its scheduler; its name."""
    name, plugin = next(item for item in dask_scheduler.plugins.items() if item[0].startswith("dstackweb-"))
    plugin.ticks_s = 0.0

    def around(act: Callable[..., None]) -> Callable[..., None]:
        def clocked(*args: Any) -> None:
            began = time.thread_time()
            act(*args)
            plugin.ticks_s += time.thread_time() - began

        return clocked

    plugin._mark_changed, plugin._report = around(plugin._mark_changed), around(plugin._report)
    return name


def _before(dask_scheduler: Any) -> Reading:
    gc.collect()
    gc.disable()
    return _reading(dask_scheduler)


async def _after(dask_scheduler: Any) -> tuple[Reading, Reading]:
    """When all tasks are gone, and when all of them are reported."""
    while dask_scheduler.tasks:
        await asyncio.sleep(0.01)
    done = _reading(dask_scheduler)
    await asyncio.sleep(PAUSE_S)
    reported = _reading(dask_scheduler)
    gc.enable()
    return done, reported


async def _until_unwatched() -> None:
    """The plugin ends by itself, at its next tick."""
    while _thread_s():
        await asyncio.sleep(0.05)


def _reading(scheduler: Any) -> Reading:
    ticks_s = sum(getattr(plugin, "ticks_s", 0.0) for plugin in scheduler.plugins.values())
    return Reading(scheduler.transition_counter, time.perf_counter(), time.process_time(), ticks_s, _thread_s())


def _thread_s() -> float:
    """Processor seconds of the sending thread."""
    for thread in threading.enumerate():
        if thread.name == "dstackweb-tracking" and thread.is_alive() and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0


def _keys(groups: int) -> list[tuple[str, int]]:
    names = [f"{PREFIXES[i % len(PREFIXES)]}-{uuid.uuid4().hex}" for i in range(groups)]
    return [(name, number) for name in names for number in range(TASKS)]


def _registration() -> dict[str, Any]:
    """What a worker says of itself, the address left out."""
    metrics = {
        "task_counts": {}, "bandwidth": {"total": 1e8, "workers": {}, "types": {}}, "managed_bytes": 0, "memory": 0,
        "digests_total_since_heartbeat": {}, "spilled_bytes": {"memory": 0, "disk": 0}, "event_loop_interval": 0.02,
        "transfer": {}, "time": time.time(), "cpu": 0,
    }  # fmt: skip
    return {
        "status": "running", "nthreads": 16, "name": "bench", "now": time.time(), "resources": {}, "memory_limit": 0,
        "local_directory": "", "services": {}, "nanny": None, "pid": os.getpid(), "versions": {}, "metrics": metrics,
        "extra": {}, "stimulus_id": "bench", "server_id": "bench",
    }  # fmt: skip


def _finished(message: dict[str, Any]) -> dict[str, Any]:
    """The answer to a task that is to be computed: it is done."""
    now = time.time()
    times = [{"action": "compute", "start": now, "stop": now + 1e-5}]
    return {**FINISHED, "key": message["key"], "run_id": message["run_id"], "startstops": times, "stimulus_id": "bench"}


def _work(port: Any, address: str) -> None:
    asyncio.run(_answer(port, address))


async def _answer(port: Any, address: str) -> None:
    comm = await connect(address, deserialize=False)
    hello = {"op": "register-worker", "reply": False, "address": WORKER, **_registration()}
    await comm.write(hello, serializers=["msgpack"])
    await comm.read()
    port.put(0)
    answers = BatchedSend("2ms")
    answers.start(comm)
    while True:
        for message in await comm.read():
            if message["op"] == "compute-task":
                answers.send({"op": "task-finished", **_finished(message)})


@contextmanager
def _other(act: Callable[..., None], *arguments: Any) -> Iterator[int]:
    """A process on the last core, and the port that it puts."""
    context = multiprocessing.get_context("spawn")
    port: Any = context.SimpleQueue()
    process = context.Process(target=_pinned, args=(act, port, *arguments), daemon=True)
    process.start()
    try:
        yield port.get()
    finally:
        process.terminate()
        process.join()


def _pinned(act: Callable[..., None], *arguments: Any) -> None:
    _pin(CORES[1])
    act(*arguments)


def _pin(core: int) -> None:
    """This process with all of its threads, where the system can."""
    if sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), {core})


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
    measure(int(sys.argv[1]) if sys.argv[1:] else PAIRS)
