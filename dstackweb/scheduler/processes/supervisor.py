"""Keeps a set of processes running: starts them, restarts them when they end, stops them all together.

Each process dies with the supervisor (`lib.process`), so kill -9 leaves nothing behind. Each writes to its own log
file; errors also go to the console with the process's name.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dstackweb.lib.network import full_jitter
from dstackweb.lib.process import PARENT_VARIABLE, REFUSED

LOG_LIMIT = 10 * 1024 * 1024
STOP_S = 15.0
"""How long processes may take to finish their work; every step is safe to cut off."""
STEADY_S = 60.0
"""A process that lived this long restarts with a short back-off."""
SLOW_START_S = 30.0
TICK_S = 0.1

_ERROR = re.compile(rb" (ERROR|CRITICAL) |\[(ERROR|CRITICAL)\]")


@dataclass(frozen=True)
class ProcessSpec:
    """A process to keep running. `ready(pid)`: whether it answers; without it, being alive is enough."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[int], bool] | None = None


class ProcessLog:
    """A process's log file, moved to `<name>.log.1` at 10 MB."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"{name}.log"
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        if self.path.exists() and self.path.stat().st_size > LOG_LIMIT:
            self.path.replace(self.path.with_suffix(".log.1"))
        # Unbuffered: the last lines before a crash matter most.
        return open(self.path, "ab", buffering=0)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        if self._file.tell() > LOG_LIMIT:
            self._file.close()
            self._file = self._open()


class SupervisedProcess:
    """A process across its restarts."""

    def __init__(self, spec: ProcessSpec, log: ProcessLog, cwd: Path) -> None:
        self.spec, self.log, self.cwd = spec, log, cwd
        self.process: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        self.failures = 0
        self.started_at = 0.0
        self.start_at: float | None = 0.0
        """When to start it (monotonic); None while it is alive."""
        self.last_line = b""
        self._rest = b""

    def start(self) -> IO[bytes]:
        """Start it; returns its output stream."""
        env = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1", **self.spec.env}
        # Its own process group: Ctrl-C reaches only the supervisor, which stops the others in order.
        self.process = subprocess.Popen(
            self.spec.argv, cwd=self.cwd, env=env, process_group=0,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.started_at, self.start_at, self.is_ready, self.last_line = time.monotonic(), None, False, b""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        return self.process.stdout

    def take(self, data: bytes) -> list[bytes]:
        """Log its output; returns the lines that report errors."""
        self.log.write(data)
        *lines, self._rest = (self._rest + data)[-65536:].split(b"\n")
        self.last_line = next((line for line in reversed(lines) if line.strip()), self.last_line)
        return [line for line in lines if _ERROR.search(line)]

    def check_ready(self) -> bool:
        """Whether it answers."""
        if not self.is_ready and self.process is not None and self.start_at is None:
            self.is_ready = self.spec.ready is None or self.spec.ready(self.process.pid)
        return self.is_ready

    def ended(self, code: int) -> str:
        """Schedule its restart; returns what happened in one line."""
        lived = time.monotonic() - self.started_at
        self.failures = 0 if lived > STEADY_S else self.failures + 1
        wait_s = 0.2 + full_jitter(self.failures, 0.25, 30)
        self.start_at = time.monotonic() + wait_s
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = f" ({self.last_line.decode(errors='replace').strip()[:200]})" if code > 0 and self.last_line else ""
        return f"{how}{said}; restarting in {wait_s:.1f} s (log: {self.log.path})"


class Supervisor:
    """`Supervisor(specs, logs, cwd, say).run(on_ready)` until SIGINT, SIGTERM or SIGHUP. `say` prints one line.

    A process that ends with REFUSED, because the database is for newer programs, ends them all.
    """

    def __init__(self, specs: Sequence[ProcessSpec], logs: Path, cwd: Path, say: Callable[[str], None]) -> None:
        self.children = [SupervisedProcess(spec, ProcessLog(logs, spec.name), cwd) for spec in specs]
        self.say = say
        self._outputs = selectors.DefaultSelector()
        self._stop_requests = 0
        self._refused = False

    def run(self, on_ready: Callable[[], None]) -> bool:
        """Start all processes, call `on_ready` once when all answer, keep them running, stop them when asked to.

        Returns whether they were stopped because one refused to go on.
        """
        began = time.monotonic()
        announced = warned = False
        with self._signals():
            try:
                while not self._stop_requests and not self._refused:
                    self._keep()
                    self._read(TICK_S)
                    if not announced and all(child.check_ready() for child in self.children):
                        announced = True
                        on_ready()
                    if not announced and not warned and time.monotonic() - began > SLOW_START_S:
                        warned = True
                        self.say(f"still waiting for {self._waiting()} after {SLOW_START_S:.0f} s")
            finally:
                self._end_all()
        return self._refused

    def _waiting(self) -> str:
        return " and ".join(f"{c.spec.name} (log: {c.log.path})" for c in self.children if not c.is_ready)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def request_stop(*_: object) -> None:
            self._stop_requests += 1

        old = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _keep(self) -> None:
        for child in self.children:
            if child.start_at is not None and child.start_at <= time.monotonic():
                output = child.start()
                self._outputs.register(output, selectors.EVENT_READ, (child, output))
            elif child.process is not None and child.start_at is None and child.process.poll() is not None:
                self._read(0)
                if child.process.returncode == REFUSED:
                    self._refused = True
                    self.say(f"{child.spec.name} refused to go on ({child.last_line.decode(errors='replace').strip()})")
                    return
                self.say(f"{child.spec.name} {child.ended(child.process.returncode)}")

    def _read(self, timeout: float) -> None:
        for key, _ in self._outputs.select(timeout):
            child, output = key.data
            data = os.read(key.fd, 65536)
            if not data:
                self._outputs.unregister(output)
                output.close()
                continue
            for line in child.take(data):
                self.say(f"[{child.spec.name}] {line.decode(errors='replace')}")

    def _end_all(self) -> None:
        """TERM to all; KILL after STOP_S or a second request. Their own children follow."""
        alive = [child.process for child in self.children if child.process and child.process.poll() is None]
        for process in alive:
            process.terminate()
        deadline, requests = time.monotonic() + STOP_S, self._stop_requests
        while any(process.poll() is None for process in alive):
            if time.monotonic() > deadline or self._stop_requests > requests:
                for process in alive:
                    process.kill()
            self._read(TICK_S)
        self._read(0)
