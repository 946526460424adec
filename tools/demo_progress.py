"""`make demo-progress`: the server with a run whose tasks are reported but not executed.

The run reserves a core and sleeps. Like a scheduler, this program reports half a million generated tasks in 48,000
groups of 23 prefixes over the API: each second, the counts of the groups that changed. Some tasks fail with a message,
some have no worker. Counters, pages and the command line are real. After about 16 minutes all tasks are finished, and
the demo starts again. The server's files are in `var/demo-progress`, apart from those of `make run`.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from served import ask, relay, told

ROOT = Path(__file__).resolve().parent.parent
RUN = "demo-sweep"
REPORTER = "demo"
AT_ONCE = 4000
"""Groups in a request."""
STOP_S = 15
SPEED = 6
"""So many times faster than their seconds say, so that after a few minutes there is something of everything."""
MESSAGES = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB (a demo: nothing ran)",
    "ValueError: loss is NaN at step 1200 (a demo: nothing ran)",
    "FileNotFoundError: shard-0417.parquet (a demo: nothing ran)",
)


@dataclass(frozen=True)
class Stage:
    """One prefix: so many groups of so many tasks, `at_once` of them worked on, each for so many seconds.

    They wait until `begins_s`; where `stuck`, no worker takes them.
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
        """How many tasks are over, so long after the first could begin."""
        return 0 if self.stuck else min(self.total, max(0, int(elapsed_s * self.at_once / self.seconds)))

    def failed(self, task: int) -> bool:
        """Whether this one ends so."""
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
    """Of each stage how many tasks are over, and whether the others may begin."""
    return [(stage.done_by(elapsed_s - stage.begins_s), elapsed_s >= stage.begins_s) for stage in STAGES]


def counts(stage: Stage, done: int, begun: bool, group: int) -> dict[str, int]:
    """How many tasks of a group are in which state: tasks go in order, group by group."""
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
    """Counts of the groups that differ; of all groups where there was nothing before."""
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
    """Those that have failed since, with what they say; of each stage the last hundred."""
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


class Teller:
    """Tells the server of one run after another, until the program ends."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._over = threading.Event()

    def run(self) -> None:
        """Goes on through whatever the server answers."""
        while not self._over.is_set():
            try:
                self._tell_of(self._submitted())
            except OSError as error:
                print(f"the demo can't go on: {told(error)}; it tries again", file=sys.stderr, flush=True)
                self._over.wait(5)

    def stop(self) -> None:
        """End what it has submitted, as far as the server can be asked."""
        self._over.set()
        ends = time.monotonic() + STOP_S
        try:
            while time.monotonic() < ends and self._status(RUN) not in ("done", "failed", "terminated", ""):
                self._ask("POST", f"runs/{RUN}/stop", {"abort": True})
                time.sleep(0.5)
        except OSError as error:
            print(f"the demo's run can't be stopped: {told(error)}", file=sys.stderr, flush=True)

    def _submitted(self) -> str:
        """The id of the run, which may be there from before."""
        if self._status(RUN) in ("done", "failed", "terminated", ""):
            commands = ["echo 'a demo: nothing is computed here'", "sleep 12h"]
            config = {"type": "task", "name": RUN, "commands": commands, "resources": {"cpu": 1, "memory": "64MB.."}}
            return str(self._ask("POST", "runs", {"config": config})["id"])
        return str(self._ask("GET", f"runs/{RUN}")["id"])

    def _tell_of(self, run: str) -> None:
        """From its start to the end of its last task. Raises OSError when the server takes no more of it."""
        while not self._over.wait(0.5) and self._status(run) != "running":
            pass
        began, before = time.monotonic(), None
        while not self._over.is_set():
            tick = time.monotonic()
            after = done_after(SPEED * (tick - began))
            self._send(run, list(changes(before, after)), list(failures(before, after)))
            if all(stage.stuck or done == stage.total for stage, (done, _) in zip(STAGES, after, strict=True)):
                self._ask("POST", f"runs/{run}/tasks", {"reporter": REPORTER, "seq": _seq(), "ended": True})
                self._ask("POST", f"runs/{run}/stop", {})
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
                    self._ask("POST", f"runs/{run}/tasks", body)
                    break
                except urllib.error.HTTPError as error:
                    if error.code != 429:
                        raise
                    self._over.wait(float(error.headers.get("Retry-After", 1)))

    def _status(self, run: str) -> str:
        """How it does; nothing where there is none."""
        try:
            return str(self._ask("GET", f"runs/{run}")["status"])
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return ask(self._url, self._token, method, f"/api/v1/projects/main/{path}", body)


def _seq() -> int:
    return time.time_ns() // 1000


def main() -> int:
    """Runs until Ctrl-C; returns the server's exit status."""
    home = Path(os.environ.get("DSTACKWEB_HOME") or ROOT / "var" / "demo-progress")
    home.mkdir(parents=True, exist_ok=True)
    port = os.environ.get("DSTACKWEB_PORT", "8000")
    token = os.environ.get("DSTACKWEB_ADMIN_TOKEN") or secrets.token_urlsafe(24)
    url = f"http://127.0.0.1:{port}"
    teller = Teller(url, token)
    own = {"DSTACKWEB_HOME": str(home), "DSTACKWEB_ADMIN_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    # In a session of its own Ctrl-C doesn't reach it: the demo's run ends before it does, since others outlive it.
    server = subprocess.Popen(
        [sys.executable, "manage.py", "up"], cwd=ROOT, env=os.environ | own, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip

    def end(signum: int, _frame: object) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, lambda signum, _frame: server.send_signal(signum))
        teller.stop()
        server.send_signal(signum)

    def set_up(url: str, _token: str) -> None:
        threading.Thread(target=teller.run, daemon=True).start()
        groups, tasks = sum(stage.groups for stage in STAGES), sum(stage.total for stage in STAGES)
        print(
            f"  Demo tasks {tasks:,} in {groups:,} groups of {len(STAGES)} prefixes, none of them real\n"
            f"             their bars: {url}/p/main/runs/{RUN}/progress/\n"
            f"             for a wall: {url}/p/main/runs/{RUN}/progress/wall/\n",
            flush=True,
        )

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    threading.Thread(target=relay, args=(server, url, token, set_up), daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
