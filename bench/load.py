"""Open pages, log tails, submits and reports of tasks at once, against a real server for a bounded time.

    python -m bench.load [sqlite|postgres] [SECONDS [PAGES [TAILS [SUBMITS_PER_S [BATCHES_PER_S]]]]]

The clients do what browsers and programs do: a page asks again 2 s after its last answer (static/js/polling.js), a log
1 s after. Submits and batches come at their rate, whether those before were answered or not. Everything shares one
machine: web, workers, database, and the clients, whose CPU is in the table as well. The submitted runs wait in the
queue, so that what is measured is serving; `bench.throughput` measures executing.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import httpx
import psutil

from bench import sides
from tests.support import eventually, free_port

KEY, PASSWORD = "dw_benchmark-token-of-the-first-admin", "correct horse battery"
DEFAULTS = (60, 500, 50, 10, 50)
PRINTING = 5
PAGE_S, TAIL_S = 2.0, 1.0
TIMEOUT_S, SLOWEST_S = 30.0, 15.0
BATCH = 20
KINDS = {
    "web": "gunicorn", "workers": "qcluster", "ticker": "ticker", "host": "host", "PostgreSQL": "postgres",
    "Redis": "redis-server", "runners and their commands": "dstackweb.runner", "the clients": "bench.load",
}  # fmt: skip


def delay_s(every_s: float, failures: int, took_s: float = 0.0) -> float:
    """How long a page waits after so many failures in a row, or an answer that took so long (static/js/polling.js)."""
    return min(max(every_s * 2.0**failures, 4 * took_s), SLOWEST_S)


@dataclass
class Connection:
    """One kept connection to the server, as a browser's."""

    port: int
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, headers: dict[str, str], body: str = "") -> tuple[int, dict[str, str]]:
        """Status and headers; the body is read and dropped. Raises OSError, TimeoutError."""
        try:
            return await asyncio.wait_for(self._ask(method, path, headers, body), TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    async def _ask(self, method: str, path: str, headers: dict[str, str], body: str) -> tuple[int, dict[str, str]]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self._streams
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", "Accept-Encoding: gzip", *lines]
        writer.write("\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode())
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in answer[1:])}
        if found.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        else:
            await reader.readexactly(int(found.get("content-length") or 0))
        if found.get("connection") == "close":
            self.close()
        return int(answer[0].split()[1]), found

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@dataclass
class Load:
    """What all clients do until `ends` (monotonic), and how long each answer took (ms)."""

    port: int
    cookie: str
    ends: float
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By status; `none`: no answer within TIMEOUT_S."""
    late: float = 0.0
    """The most that a request was sent after its time: then the clients are the bottleneck."""

    async def timed(
        self, kind: str, connection: Connection, method: str, path: str, headers: dict[str, str], body: str = ""
    ) -> dict[str, str]:
        """One request; returns its headers, or nothing after an error."""
        began = time.monotonic()
        try:
            status, found = await connection.ask(method, path, headers, body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            status, found = 0, {}
        self.took[f"{kind}, nothing new" if status == 204 else kind].append((time.monotonic() - began) * 1000)
        if not 200 <= status < 300:
            self.errors[kind][str(status or "none")] += 1
            return {}
        return found

    async def page(self) -> None:
        """An open queue page."""
        connection, shows, failures = Connection(self.port), "", 0
        await asyncio.sleep(random.uniform(0, PAGE_S))
        while time.monotonic() < self.ends:
            headers = {"Cookie": self.cookie, "HX-Request": "true"} | ({"HX-PTag": shows} if shows else {})
            began = time.monotonic()
            found = await self.timed("poll of a queue page", connection, "GET", "/p/main/queue/", headers)
            shows, failures = found.get("hx-ptag", shows), 0 if found else failures + 1
            await asyncio.sleep(delay_s(PAGE_S, failures, time.monotonic() - began))
        connection.close()

    async def tail(self, run: str) -> None:
        """An open log."""
        connection, query, failures = Connection(self.port), {"attempt": "1", "node": "0", "tail": "2000"}, 0
        await asyncio.sleep(random.uniform(0, TAIL_S))
        while time.monotonic() < self.ends:
            path = f"/p/main/runs/{run}/log/?{urlencode(query)}"
            found = await self.timed("tail of a log", connection, "GET", path, {"Cookie": self.cookie})
            if "x-next-offset" in found:
                query = {"attempt": "1", "node": "0", "offset": found["x-next-offset"]}
            failures = 0 if found else failures + 1
            await asyncio.sleep(delay_s(TAIL_S, failures))
        connection.close()

    async def at_rate(self, rate: float, act: Callable[[int], Awaitable[object]]) -> None:
        """So many a second, whether those before were answered or not."""
        going: set[asyncio.Future[object]] = set()
        began, number = time.monotonic(), 0
        while rate and (due := began + number / rate) < self.ends:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.late = max(self.late, time.monotonic() - due)
            task = asyncio.ensure_future(act(number))
            going.add(task)
            task.add_done_callback(going.discard)
            number += 1
        await asyncio.gather(*going)

    async def submit(self, number: int) -> None:
        config = {"type": "task", "name": f"load-{number}", "commands": ["true"], "resources": {"cpu": 2}}
        body = json.dumps({"config": config})
        await self._post("submit", "/api/v1/projects/main/runs", body)

    async def report(self, run: str, number: int) -> None:
        events = [
            {
                "key": f"step-{number % 50}-{task}",
                "prefix": f"step-{task % 5}",
                "state": random.choice(("running", "done")),
            }
            for task in range(BATCH)
        ]
        path = f"/api/v1/projects/main/runs/{run}/tasks"
        await self._post(
            f"batch of {BATCH} tasks", path, json.dumps({"reporter": f"load-{number % 10}", "events": events})
        )

    async def _post(self, kind: str, path: str, body: str) -> None:
        connection = Connection(self.port)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        await self.timed(kind, connection, "POST", path, headers, body)
        connection.close()


def measure(seconds: int, pages: int, tails: int, submits: int, batches: int) -> None:
    """Prints two tables: requests, and processes."""
    port = free_port()
    env = os.environ | {
        "DSTACKWEB_PORT": str(port), "DSTACKWEB_ADMIN_TOKEN": KEY, "DSTACKWEB_ADMIN_PASSWORD": PASSWORD,
        "DSTACKWEB_SHARED_UID": "1", "DSTACKWEB_WEB_WORKERS": "2",
    }  # fmt: skip
    Path(env["DSTACKWEB_HOME"]).mkdir(exist_ok=True)
    with open(Path(env["DSTACKWEB_HOME"], "up.log"), "ab") as log:
        up = subprocess.Popen([sys.executable, "manage.py", "up"], cwd=sides.ROOT, env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        api = httpx.Client(base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        eventually(lambda: api.get("/hosts").json()["items"][0]["online"], deadline=90)
        _only_for(PRINTING)
        runs = [_printing(api, number) for number in range(PRINTING)]
        load = Load(port, _sign_in(url), time.monotonic() + seconds)
        before, began = _usage(), time.monotonic()
        asyncio.run(_all(load, runs, pages, tails, submits, batches))
        _print(
            load,
            before,
            time.monotonic() - began,
            f"{pages} pages, {tails} tails, {submits} submits/s, {batches} batches/s",
        )
        for run in runs:
            api.post(f"/projects/main/runs/{run}/stop", json={"abort": True})
        eventually(lambda: not api.get("/hosts").json()["items"][0]["cpus_used"], deadline=60)
    finally:
        up.terminate()
        up.wait(60)


async def _all(load: Load, runs: list[str], pages: int, tails: int, submits: int, batches: int) -> None:
    await asyncio.gather(
        *(load.page() for _ in range(pages)),
        *(load.tail(runs[number % len(runs)]) for number in range(tails)),
        load.at_rate(submits, load.submit),
        load.at_rate(batches, lambda number: load.report(runs[number % len(runs)], number)),
    )


def _only_for(cpus: int) -> None:
    """The host has room for the printing runs alone."""
    import django

    django.setup()
    from django.db import connections

    from dstackweb.backends.models import Host

    Host.objects.update(cpus=cpus, memory_mib=cpus * 1024)
    connections.close_all()


def _printing(api: httpx.Client, number: int) -> str:
    """A running run that prints two lines a second."""
    config = {
        "type": "task", "name": f"prints-{number}",
        "commands": ["while true; do echo $(date) loss $RANDOM; sleep 0.5; done"],
    }  # fmt: skip
    api.post("/projects/main/runs", json={"config": config}).raise_for_status()
    eventually(lambda: api.get(f"/projects/main/runs/prints-{number}").json()["status"] == "running", deadline=60)
    return f"prints-{number}"


def _sign_in(url: str) -> str:
    """The cookies of a signed-in browser."""
    with httpx.Client(base_url=url, follow_redirects=True, timeout=60) as browser:
        found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', browser.get("/login/").text)
        assert found is not None
        form = {"csrfmiddlewaretoken": found[1], "username": "admin", "password": PASSWORD}
        sides.must_be(browser.post("/login/", data=form, headers={"Referer": url}).status_code, 200)
        return "; ".join(f"{cookie.name}={cookie.value}" for cookie in browser.cookies.jar)


def _usage() -> dict[str, tuple[float, float]]:
    """CPU seconds, children that ended included, and memory (MiB, shared parts counted once) by kind of process."""
    used: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    parent = psutil.Process(os.getppid())
    for process in parent.children(recursive=True):
        try:
            words, times = [process.name(), *process.cmdline()], process.cpu_times()
            memory = process.memory_full_info().pss
        except psutil.Error:
            continue
        kind = next((kind for kind, word in KINDS.items() if any(one.endswith(word) for one in words[:5])), None)
        if kind is not None:
            cpu, mib = used[kind]
            cpu += times.user + times.system + times.children_user + times.children_system
            used[kind] = cpu, mib + memory / 2**20
    return dict(used)


def _print(load: Load, before: dict[str, tuple[float, float]], took: float, heading: str) -> None:
    rows = {}
    for kind, values in sorted(load.took.items()):
        ordered = sorted(values)
        p50, p99 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        errors = ", ".join(f"{count} × {status}" for status, count in sorted(load.errors[kind].items()))
        rows[kind] = [f"{len(values) / took:.1f}", f"{p50:,.0f}", f"{p99:,.0f}", errors or "none"]
    name = sides.database()
    from django.db import connections

    connections.close_all()
    sides.table(f"{name}; {took:.0f} s", ["a second", "p50, ms", "p99, ms", "errors"], rows)
    print(f"{heading}; a submit or batch was sent at most {load.late * 1000:.0f} ms after its time\n")
    usage = {
        kind: [f"{(cpu - before.get(kind, (0.0, 0.0))[0]) / took * 100:.0f}", f"{mib:,.0f}"]
        for kind, (cpu, mib) in _usage().items()
    }
    usage["the whole machine"] = [f"{psutil.cpu_percent() * (os.cpu_count() or 1):.0f}", ""]
    sides.table("processes", ["% of one core", "memory, MiB"], usage)


if __name__ == "__main__":
    if sides.here():
        numbers = [int(word) for word in sys.argv[1:]]
        psutil.cpu_percent()
        measure(*numbers, *DEFAULTS[len(numbers) :])
    else:
        sides.on_each_side(sys.argv[1:])
