"""Keeps a set of processes running: starts them, restarts them when they end, stops them all together.

Each process dies with the supervisor (`lib.process`), so kill -9 leaves nothing behind. A reload starts all of them
anew, from a new program of the supervisor itself (`home.py`); the former ones go on until their successors answer.
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
from enum import Enum
from pathlib import Path
from typing import IO

from dstackweb.lib.network import full_jitter
from dstackweb.lib.process import PARENT_VARIABLE, REFUSED
from dstackweb.scheduler.processes.home import SIGNALS, AdoptedProcess, FormerChild

LOG_LIMIT = 10 * 1024 * 1024
STOP_S = 15.0
"""How long processes may take to finish their work; every step is safe to cut off."""
LEAVE_S = 35.0
"""The same for former processes of a reload: no one waits for them."""
STEADY_S = 60.0
"""A process that lived this long restarts with a short back-off."""
SLOW_START_S = 30.0
TICK_S = 0.1

_ERROR = re.compile(rb' (ERROR|CRITICAL) |\[(ERROR|CRITICAL)\]|"level": "(ERROR|CRITICAL)"')


class Outcome(Enum):
    """Why a supervisor no longer runs."""

    STOPPED = "stopped"
    REFUSED = "refused"
    """A process does not fit the database. All have ended."""
    RELOAD = "reload"
    """The next program may take over. All processes go on, and SIGNALS are blocked."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to keep running. `ready(pid)`: whether it answers; without it, being alive is enough.

    It gets the open files `files`. One that is `alone` starts only when its predecessor has ended; one that `serves` is
    stopped after all others.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[int], bool] | None = None
    files: Sequence[int] = ()
    alone: bool = False
    serves: bool = False


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

    def __init__(self, spec: ProcessSpec, log: ProcessLog) -> None:
        self.spec, self.log = spec, log
        self.process: subprocess.Popen[bytes] | AdoptedProcess | None = None
        self.output: IO[bytes] | None = None
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
        self.process = process = subprocess.Popen(
            self.spec.argv, env=env, process_group=0, pass_fds=self.spec.files,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.started_at, self.start_at, self.is_ready, self.last_line = time.monotonic(), None, False, b""
        self.output = process.stdout
        assert self.output is not None
        os.set_blocking(self.output.fileno(), False)
        return self.output

    def adopt(self, former: FormerChild) -> IO[bytes]:
        """Go on with a process of the program before, instead of starting one; returns its output stream."""
        self.process, self.start_at, self.is_ready = AdoptedProcess(former.pid), None, True
        self.output = os.fdopen(former.output, "rb")
        return self.output

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.start_at is None and self.process.poll() is None

    def take(self, data: bytes) -> list[bytes]:
        """Log its output; returns the lines that report errors."""
        self.log.write(data)
        *lines, self._rest = (self._rest + data)[-65536:].split(b"\n")
        self.last_line = next((line for line in reversed(lines) if line.strip()), self.last_line)
        return [line for line in lines if _ERROR.search(line)]

    def check_ready(self) -> bool:
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
    """`Supervisor(specs, logs, say).run(on_ready)` until SIGINT, SIGTERM or SIGHUP. `say` prints one line.

    A process that ends with REFUSED, because the database is for newer programs, ends them all. With `preparation` (a
    command and its environment) SIGHUP asks for a reload: that command is run, and if it fails, all goes on. `former`
    are the processes of the program before.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        logs: Path,
        say: Callable[[str], None],
        preparation: tuple[Sequence[str], Mapping[str, str]] | None = None,
        former: Sequence[FormerChild] = (),
    ) -> None:
        files = {name: ProcessLog(logs, name) for name in {*(s.name for s in specs), *(f.name for f in former)}}
        self.children = [SupervisedProcess(spec, files[spec.name]) for spec in specs]
        self.say = say
        self.not_reloaded: Callable[[], None] = lambda: None
        self._preparation = preparation
        self._preparing: subprocess.Popen[bytes] | None = None
        self._outputs = selectors.DefaultSelector()
        self._stop_requests = 0
        self._reload_wanted = False
        self._has_terminal = _has_terminal()
        self._refused = False
        self._leaving: dict[SupervisedProcess, float | None] = {}
        """Former processes, and until when they may finish their work."""
        for one in former:
            child = SupervisedProcess(ProcessSpec(one.name, ()), files[one.name])
            self._listen_to(child, child.adopt(one))
            self._leaving[child] = None

    def run(self, on_ready: Callable[[], None]) -> Outcome:
        """Start all processes, call `on_ready` once when all answer, keep them running, stop them when asked to."""
        began = time.monotonic()
        announced = warned = False
        outcome: Outcome | None = None
        with self._signals():
            try:
                while outcome is None:
                    self._keep()
                    self._retire()
                    self._read(TICK_S)
                    if not announced and not self._leaving and all(child.check_ready() for child in self.children):
                        announced = True
                        on_ready()
                    if not announced and not warned and time.monotonic() - began > SLOW_START_S:
                        warned = True
                        self.say(f"still waiting for {self._waiting()} after {SLOW_START_S:.0f} s")
                    outcome = self._outcome()
            finally:
                if outcome is not Outcome.RELOAD:
                    self._end_all()
        return outcome

    def survivors(self) -> list[FormerChild]:
        living = [child for child in (*self._leaving, *self.children) if child.is_alive]
        return [
            FormerChild(child.spec.name, child.process.pid, child.output.fileno())
            for child in living
            if child.process and child.output
        ]

    def _waiting(self) -> str:
        return " and ".join(f"{c.spec.name} (log: {c.log.path})" for c in self.children if not c.is_ready)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def request_stop(*_: object) -> None:
            self._stop_requests += 1

        def request_reload(*_: object) -> None:
            self._reload_wanted = True

        old = {number: signal.signal(number, request_stop) for number in SIGNALS}
        if self._preparation is not None:
            signal.signal(signal.SIGHUP, request_reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _outcome(self) -> Outcome | None:
        """Whether to stop or to reload now."""
        if self._refused:
            return Outcome.REFUSED
        if self._reload_wanted and self._has_terminal and not _has_terminal():
            self._stop_requests += 1  # its terminal was closed
        if self._stop_requests:
            return Outcome.STOPPED
        if self._preparing is None:
            if self._reload_wanted and self._preparation is not None:
                self._reload_wanted = False
                argv, env = self._preparation
                own = {PARENT_VARIABLE: str(os.getpid())}
                self._preparing = subprocess.Popen(argv, env={**env, **own}, stdin=subprocess.DEVNULL, process_group=0)
            return None
        code = self._preparing.poll()
        if code is None:
            return None
        self._preparing = None
        if code:
            self.say("not reloaded, because of that; the server goes on as it was")
            self.not_reloaded()
            return None
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return Outcome.RELOAD

    def _listen_to(self, child: SupervisedProcess, output: IO[bytes]) -> None:
        self._outputs.register(output, selectors.EVENT_READ, (child, output))

    def _keep(self) -> None:
        leaving = {child.spec.name for child in self._leaving}
        for child in self.children:
            if child.start_at is not None and child.start_at <= time.monotonic():
                if not (child.spec.alone and child.spec.name in leaving):
                    self._listen_to(child, child.start())
            elif child.process is not None and child.start_at is None and child.process.poll() is not None:
                self._read(0)
                if child.process.returncode == REFUSED and self._preparing is None:
                    self._refused = True
                    self.say(f"{child.spec.name} refused to go on ({child.last_line.decode(errors='replace').strip()})")
                    return
                self.say(f"{child.spec.name} {child.ended(child.process.returncode or 0)}")

    def _retire(self) -> None:
        """End former processes once their successors answer, or before these may start."""
        successors = {child.spec.name: child for child in self.children}
        for child, deadline in list(self._leaving.items()):
            successor = successors.get(child.spec.name)
            if not child.is_alive:
                self._read(0)
                del self._leaving[child]
            elif deadline is None:
                if successor is None or successor.spec.alone or successor.check_ready():
                    child.process.terminate()  # type: ignore[union-attr]
                    self._leaving[child] = time.monotonic() + LEAVE_S
            elif time.monotonic() > deadline:
                child.process.kill()  # type: ignore[union-attr]

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
        """TERM to all, last to those that serve; KILL after STOP_S or a second request. Their own children follow."""
        everyone = [*self._leaving, *self.children]
        if self._preparing is not None:
            self._preparing.kill()
            self._preparing.wait()
        requests = self._stop_requests
        for serving in (False, True):
            alive = [c.process for c in everyone if c.process and c.is_alive and c.spec.serves is serving]
            for process in alive:
                process.terminate()
            deadline = time.monotonic() + STOP_S
            while any(process.poll() is None for process in alive):
                if time.monotonic() > deadline or self._stop_requests > requests:
                    for process in alive:
                        process.kill()
                self._read(TICK_S)
        self._read(0)


def _has_terminal() -> bool:
    """Whether this process has a terminal to which someone could still type."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
