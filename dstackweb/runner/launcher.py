"""The other side of `python -m dstackweb.runner`: a process that has loaded the runner once, and forks one per start.

Runners detach from it, so neither its death nor its parent's reaches them. A start may happen twice: the runner's lock
and its claim see to that.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_S = 10.0
"""How long a runner may take to detach."""


class NotLaunched(Exception):
    """No runner was started, as far as is known; the message says why."""


class Launcher:
    """Starts runners. Its process ends with this one, which it belongs to: a fork makes one of its own."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._argv, self._env = argv, env
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def launch(self, order: Mapping[str, object]) -> dict[str, Any]:
        """Start a runner with these orders (docs/runner.md); its answer. Raises NotLaunched, OSError."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                try:
                    return self._ask(self._process, order)
                except (NotLaunched, OSError):
                    self._end(self._process)  # it was killed, or hangs: try once with another
            self._process, self._owner = self._start(), os.getpid()
            try:
                return self._ask(self._process, order)
            except (NotLaunched, OSError):
                self._end(self._process)
                self._process = None
                raise

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self._argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=self._env, cwd="/")

    def _ask(self, process: subprocess.Popen[str], order: Mapping[str, object]) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps(dict(order)) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], ANSWER_S)[0]:
            raise NotLaunched(f"the runner gave no answer within {ANSWER_S:.0f} s")
        line = process.stdout.readline()
        if not line:
            process.kill()
            raise NotLaunched(f"the runner failed with {process.wait()}: {process.stderr.read().strip()[-500:]}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise NotLaunched(f"the runner answered {line[:200]!r}") from error
        return answer

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # what a dead process was to read is lost with it
                    stream.close()
