"""`make demo-progress`: the server with a run whose tasks are reported but not executed.

The run reserves a core and sleeps. Like a scheduler, this program reports half a million generated tasks in 48,000
groups of 23 prefixes over the API: each second, the counts of the groups that changed. Some tasks fail with a message,
some have no worker. Counters, pages and the command line are real. After about 16 minutes all tasks are finished, and
the demo starts again. The server's files are in `var/demo-progress`, apart from those of `make run`.
"""

from __future__ import annotations

import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.served import Demo, complain, run_demo

RUN = "demo-sweep"
REPORTER = "demo"
AT_ONCE = 4000
"""Groups in a request."""
SPEED = 6
"""How much faster than the stages' seconds, so that a few minutes show every state."""
MESSAGES = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB (a demo: nothing ran)",
    "ValueError: loss is NaN at step 1200 (a demo: nothing ran)",
    "FileNotFoundError: shard-0417.parquet (a demo: nothing ran)",
)


@dataclass(frozen=True)
class Stage:
    """One prefix: groups of tasks, of which `at_once` run at a time, each for some seconds, from `begins_s` on.

    No worker takes those of a `stuck` stage.
    """

    prefix: str
    begins_s: float
    groups: int
    tasks: int
    at_once: int
    seconds: float
    fails: int = 0
    stuck: bool = False

    @property
    def total(self) -> int:
        """Tasks in all."""
        return self.groups * self.tasks

    def done_by(self, elapsed_s: float) -> int:
        """How many tasks have ended, `elapsed_s` after the first could start."""
        return 0 if self.stuck else min(self.total, max(0, int(elapsed_s * self.at_once / self.seconds)))

    def failed(self, task: int) -> bool:
        """Whether this task fails."""
        return self.fails > 0 and task % self.fails == self.fails // 2


STAGES = (
    Stage("list-shards", 0, 40, 25, 8, 1.2),
    Stage("download-shard", 20, 4000, 8, 96, 5.0, fails=2903),
    Stage("decode", 60, 4000, 8, 128, 6.0),
    Stage("deduplicate", 300, 2000, 10, 64, 6.0),
    Stage("tokenize", 200, 4000, 12, 256, 11.0),
    Stage("pack-sequences", 600, 2000, 8, 48, 5.5),
    Stage("shuffle-split", 400, 6000, 10, 320, 13.0),
    Stage("shuffle-transfer", 450, 6000, 10, 300, 13.0),
    Stage("shuffle-combine", 900, 3000, 10, 180, 15.0),
    Stage("train-baseline", 300, 1200, 10, 40, 9.0, fails=97),
    Stage("train-sweep-lr", 350, 3200, 10, 120, 10.0, fails=211),
    Stage("train-sweep-width", 700, 2400, 10, 96, 11.0, fails=307),
    Stage("train-ablation", 1000, 1600, 10, 64, 11.0, fails=173),
    Stage("train-distilled", 1300, 800, 10, 32, 12.0),
    Stage("train-large-8xh100", 200, 24, 8, 0, 60.0, stuck=True),
    Stage("evaluate-loss", 500, 3000, 10, 90, 9.0),
    Stage("evaluate-accuracy", 800, 2400, 10, 80, 10.0, fails=1999),
    Stage("evaluate-robustness", 1500, 1200, 10, 48, 12.0),
    Stage("compare-checkpoints", 1800, 600, 10, 24, 11.0),
    Stage("calibrate", 1100, 240, 10, 12, 15.0),
    Stage("summarize", 2000, 200, 10, 8, 12.0),
    Stage("plot", 2600, 80, 10, 4, 15.0),
    Stage("publish-report", 3300, 16, 1, 1, 30.0),
)


def done_after(elapsed_s: float) -> list[tuple[int, bool]]:
    """For each stage, how many tasks have ended, and whether the others may start."""
    return [(stage.done_by(elapsed_s - stage.begins_s), elapsed_s >= stage.begins_s) for stage in STAGES]


def counts(stage: Stage, done: int, begun: bool, group: int) -> dict[str, int]:
    """A group's tasks by state: tasks run in order, group by group."""
    first, last = group * stage.tasks, (group + 1) * stage.tasks
    running = min(stage.total, done + stage.at_once) if begun else done
    queued = min(stage.total, running + 4 * stage.at_once + (stage.total if stage.stuck else 0)) if begun else running

    def within(begin: int, end: int) -> int:
        return max(0, min(last, end) - max(first, begin))

    failed = sum(1 for task in range(first, min(last, done)) if stage.failed(task))
    found = {
        "memory": within(0, done) - failed,
        "erred": failed,
        "processing": within(done, running),
        "no_worker" if stage.stuck else "queued": within(running, queued),
        "waiting": within(queued, stage.total),
    }
    return {state: number for state, number in found.items() if number}


def changes(before: list[tuple[int, bool]] | None, after: list[tuple[int, bool]]) -> Iterator[dict[str, Any]]:
    """Counts of the groups that changed; without `before`, of all groups."""
    for index, stage in enumerate(STAGES):
        done, begun = after[index]
        if before is not None and before[index] == after[index]:
            continue
        was, had = before[index] if before is not None else (0, False)
        groups = range(stage.groups)
        if before is not None and had == begun:
            last = min(stage.groups - 1, (done + 5 * stage.at_once) // stage.tasks)
            groups = range(min(stage.groups, was // stage.tasks), last + 1)
        for group in groups:
            ended = max(0, min(stage.tasks, done - group * stage.tasks))
            yield {
                "prefix": stage.prefix, "group": f"{stage.prefix}-{group:04x}",
                "states": counts(stage, done, begun, group),
                "duration_n": ended, "duration_s": ended * stage.seconds / SPEED,
            }  # fmt: skip


def failures(before: list[tuple[int, bool]] | None, after: list[tuple[int, bool]]) -> Iterator[dict[str, Any]]:
    """Tasks that have failed since, with their messages; the last hundred of each stage."""
    for index, stage in enumerate(STAGES):
        was, done = before[index][0] if before is not None else 0, after[index][0]
        found = [task for task in range(was, done) if stage.failed(task)][-100:]
        for task in found:
            group = f"{stage.prefix}-{task // stage.tasks:04x}"
            message = MESSAGES[task // stage.fails % len(MESSAGES)]
            yield {
                "key": f"('{group}', {task % stage.tasks})",
                "prefix": stage.prefix,
                "group": group,
                "message": message,
            }


class Reporter:
    """Reports one run after another, until the program ends."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._over = threading.Event()

    def run(self) -> None:
        """Continue after every error of the server."""
        while not self._over.is_set():
            try:
                self._report(self._submitted())
            except OSError as error:
                complain("the demo failed and tries again", error)
                self._over.wait(5)

    def stop(self) -> None:
        """End the run, if the server answers."""
        self._over.set()
        self._demo.stop_runs([RUN])

    def _submitted(self) -> str:
        """The ID of the run, which may exist already."""
        self._demo.submit(RUN, resources={"cpu": 1, "memory": "64MB.."})
        return str(self._call("GET", f"runs/{RUN}")["id"])

    def _report(self, run: str) -> None:
        """From the run's start to the end of its last task. Raises OSError if the server refuses."""
        while not self._over.wait(0.5) and self._demo.status(run) != "running":
            pass
        began, before = time.monotonic(), None
        while not self._over.is_set():
            tick = time.monotonic()
            after = done_after(SPEED * (tick - began))
            self._send(run, list(changes(before, after)), list(failures(before, after)))
            if all(stage.stuck or done == stage.total for stage, (done, _) in zip(STAGES, after, strict=True)):
                self._call("POST", f"runs/{run}/tasks", {"reporter": REPORTER, "seq": _seq(), "ended": True})
                self._call("POST", f"runs/{run}/stop", {})
                return
            before = after
            self._over.wait(max(0.0, 1 - (time.monotonic() - tick)))

    def _send(self, run: str, changed: list[dict[str, Any]], failed: list[dict[str, Any]]) -> None:
        for first in range(0, len(changed), AT_ONCE):
            body = {"reporter": REPORTER, "seq": _seq(), "counts": changed[first : first + AT_ONCE]}
            if first == 0:
                body["failures"] = failed[:900]
            while not self._over.is_set():
                try:
                    self._call("POST", f"runs/{run}/tasks", body)
                    break
                except urllib.error.HTTPError as error:
                    if error.code != 429:
                        raise
                    self._over.wait(float(error.headers.get("Retry-After", 1)))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._demo.call(method, f"projects/main/{path}", body)


def _seq() -> int:
    return time.time_ns() // 1000


def main(demo: Demo) -> int:
    """Run until Ctrl-C; returns the server's exit status."""
    reporter = Reporter(demo)

    def set_up() -> None:
        threading.Thread(target=reporter.run, daemon=True).start()
        groups, tasks = sum(stage.groups for stage in STAGES), sum(stage.total for stage in STAGES)
        print(
            f"  Demo tasks {tasks:,} in {groups:,} groups of {len(STAGES)} prefixes, all simulated\n"
            f"             their bars: {demo.url}/p/main/runs/{RUN}/progress/\n"
            f"             for a wall: {demo.url}/p/main/runs/{RUN}/progress/wall/\n",
            flush=True,
        )

    return demo.serve(set_up, stop=reporter.stop)


if __name__ == "__main__":
    run_demo("progress", main)
