"""Runs of mixed size, and what their commands write about themselves, outside the product.

Each command appends lines to one file: its job, what happens, a number, and the seconds since the machine started.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_S, ENDLESS_S = 5.0, 900.0
KINDS = {"plain": 38, "retried": 24, "nodes": 8, "fails": 16, "fails twice": 4, "fails once": 6, "stopped": 4}
"""Percent of the runs. `fails once`: its second attempt does not. `stopped`: by its user, running or not."""
COMMAND = """\
note() {{ read up rest </proc/uptime; echo "$DSTACK_JOB_ID $1 $2 $up" >>{notes}; }}
note start 0; i=0
while [ $i -lt {lines} ]; do i=$((i+1)); echo "line $i of {lines}"; note tick $i; sleep {pause}; done
code={code}; {once}note end $code; exit $code"""
FAILS_ONCE = '[ ! -e "{flag}" ] || code=0; : >"{flag}"; '


@dataclass(frozen=True)
class Task:
    """A run to submit, and how it must end."""

    name: str
    config: dict[str, Any]
    status: str
    exit_code: int
    lines: int
    nodes: int = 1
    stop_after_s: float | None = None
    """So long after the submit its user stops it."""

    @property
    def log(self) -> list[str]:
        """What each of its nodes prints."""
        return [f"line {number} of {self.lines}" for number in range(1, self.lines + 1)]

    @property
    def is_retried(self) -> bool:
        """Whether the loss of a job brings another attempt."""
        return "interruption" in (self.config.get("retry") or {}).get("on_events", ())


def tasks(count: int, notes: Path, rng: random.Random) -> Iterator[Task]:
    """So many runs. About one in five fails by its own command, for good or at first."""
    for number in range(count):
        name = f"chaos-{number:04}"
        seconds, lines = rng.choice((0.0, rng.uniform(0, LONGEST_S))), rng.randint(1, 12)
        kind = rng.choices(*zip(*KINDS.items(), strict=True))[0]
        if kind == "stopped":
            seconds = ENDLESS_S
        nodes = rng.choice((2, 2, 3)) if kind == "nodes" else 1
        code = rng.randint(3, 9) if kind.startswith("fails") else 0
        retry: dict[str, Any] | None = None
        if kind in ("retried", "fails once"):
            retry = {"on_events": ["no-capacity", "interruption", "error"], "duration": "2h"}
        elif kind == "fails twice":
            retry = {"on_events": ["interruption", "error"], "duration": "2h", "max_attempts": 2}
        once = FAILS_ONCE.format(flag=notes.parent / "flags" / name) if kind == "fails once" else ""
        command = COMMAND.format(notes=notes, lines=lines, pause=f"{seconds / lines:.3f}", code=code, once=once)
        config: dict[str, Any] = {"type": "task", "name": name, "commands": [command], "nodes": nodes}
        config["resources"] = {"cpu": 2 if nodes == 1 and rng.random() < 0.2 else 1}
        config["priority"] = rng.choice((50, 50, 50, 20, 80))
        config["stop_duration"] = 2
        if retry:
            config["retry"] = retry
        status = "failed" if code and kind != "fails once" else "terminated" if kind == "stopped" else "done"
        stop_after_s = rng.uniform(0, 20) if kind == "stopped" else None
        yield Task(name, config, status, code if status == "failed" else 0, lines, nodes, stop_after_s)


@dataclass
class Execution:
    """What one job's commands wrote about themselves. Times are in seconds since the machine started."""

    starts: list[float] = field(default_factory=list)
    last: float = 0.0
    ticks: int = 0
    ended: int | None = None
    """The exit code it was about to end with."""


def now_s() -> float:
    """The time as the commands note it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_notes(notes: Path) -> dict[str, Execution]:
    """Executions by the job's id."""
    found: dict[str, Execution] = {}
    for line in notes.read_text().splitlines():
        job, what, number, at = line.split()
        execution = found.setdefault(job, Execution())
        execution.last = max(execution.last, float(at))
        if what == "start":
            execution.starts.append(float(at))
        elif what == "tick":
            execution.ticks = max(execution.ticks, int(number))
        else:
            execution.ended = int(number)
    return found
