"""Measure what reporting costs a program, in microseconds per task, compared with a plain loop and with tqdm.

    python -m bench.tracking [TASKS [ROUNDS]]

Each cell is a process of its own, in alternating rounds. The tasks do nothing, so that nothing hides the cost. The
server is another process, which answers at once, never answers, or does not exist. tqdm is timed if it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.sides import cpu
from tests.servers import free_port

ROOT = Path(__file__).resolve().parent.parent
LOOPS = {
    "a loop": "for number in range(N): work(number)",
    "track(range(N))": "for number in track(range(N), prefix='rows'): work(number)",
    "with task(f'train-{number}')": "for number in range(N):\n    with task(f'train-{number}'): work(number)",
    "@task": "for number in range(N): reported(number)",
    "tqdm(range(N))": "for number in tqdm(range(N), file=quiet): work(number)",
}
PROGRAM = """
import io, os, time
from dstackweb.tracking import flush, task, track
{more}
def work(number): pass
reported = task(work)
quiet = io.StringIO()
with task("first"): pass
flush(0.2)
N = {count}
began = time.perf_counter()
{loop}
ended = time.perf_counter()
print((ended - began) / N * 1e6)
flush(60 if {flush} else 0.01)
print(N / (time.perf_counter() - began), flush=True)
os._exit(0)
"""
LISTENER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import sleep
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/hung":
            sleep(600)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *args):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@contextmanager
def listener() -> Iterator[str]:
    """The address of a server in a process of its own."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", LISTENER, str(port)])
    try:
        time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def one(loop: str, url: str | None, count: int, *, flush: bool) -> tuple[float, float]:
    """Microseconds per task while the loop runs, and tasks per second until the last one had been delivered."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSTACKWEB_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if url is not None:
        env |= {"DSTACKWEB_TASKS_URL": url, "DSTACKWEB_TASKS_TOKEN": "secret"}
    more = "from tqdm import tqdm" if "tqdm" in loop else ""
    count *= 1 if "task" in loop else 10
    program = PROGRAM.format(more=more, loop=LOOPS[loop], count=count, flush=flush)
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    first, last = done.stdout.splitlines()
    return float(first), float(last)


def main(count: int, rounds: int) -> None:
    print(f"{cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}; load {os.getloadavg()[0]:.1f} at the "
          f"start; {count:,} tasks that do nothing, or {count * 10:,} items, {rounds} rounds\n")  # fmt: skip
    with listener() as there:
        where: dict[str, str | None] = {
            "no environment": None,
            "a server": f"{there}/",
            "a hung server": f"{there}/hung",
            "no server": f"http://127.0.0.1:{free_port()}/",
        }
        cases: list[tuple[str, str]] = [("a loop", "no environment")]
        if importlib.util.find_spec("tqdm") is not None:
            cases.append(("tqdm(range(N))", "no environment"))
        else:
            print("tqdm is not installed: not timed\n")
        for loop in ("track(range(N))", "with task(f'train-{number}')", "@task"):
            cases += [(loop, name) for name in where]
        found: dict[tuple[str, str], list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(rounds):
            for loop, name in cases:
                found[loop, name].append(one(loop, where[name], count, flush=name == "a server"))
    print(f"{'':32}{'':18}{'µs per task':>26}{'tasks/s until delivered':>30}")
    for (loop, name), values in found.items():
        delivered = spread([rate for _, rate in values], "{:,.0f}") if name == "a server" else ""
        print(f"{loop:32}{name:18}{spread([cost for cost, _ in values], '{:.2f}'):>26}{delivered:>30}")


def spread(values: list[float], form: str) -> str:
    """The median, and between the least and the most."""
    write: Callable[[float], str] = form.format
    return f"{write(statistics.median(values))} ({write(min(values))}–{write(max(values))})"


if __name__ == "__main__":
    main(*(int(argument) for argument in (sys.argv[1:] + ["100000", "5"][len(sys.argv) - 1 :])))
