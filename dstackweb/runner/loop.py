"""One job from claim to exit. The API may be away at any moment: what could not be told is told later."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from dstackweb.runner import gpus, relay, tree
from dstackweb.runner.archive import BadArchive, unpack
from dstackweb.runner.backoff import BACKOFF_CAP_S, backoff
from dstackweb.runner.child import CannotStart, Job, spawn
from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.log import say
from dstackweb.runner.samples import Samples
from dstackweb.runner.shipper import Shipper
from dstackweb.runner.state import State
from dstackweb.runner.task_lines import TaskLines
from dstackweb.runner.user import acting_as

LOOK_S = 0.2
LEFTOVER_GRACE_S = 2.0
"""What background processes get between TERM and KILL once the commands have ended."""

LAST_OUTPUT_S = 5.0
"""How long the output is waited for once the last process is gone; more would be that of a process that escaped."""

COMMON_CODES = {
    126: "the command can't be executed (exit code 126)",
    127: "command not found (exit code 127)",
    137: "killed (exit code 137), often for want of memory",
}


class Unwanted(Exception):
    """The API no longer wants this job, or wants it from another runner."""


class Runner:
    """Orders are what the host said on standard input; `state` is what this or an earlier runner left."""

    def __init__(self, orders: dict[str, Any], state: State) -> None:
        self.orders, self.state = orders, state
        self.job_id: str = orders["job"]
        self.client = self._new_client()
        self.spool = state.path("spool")
        self.spec: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.beat = 0
        self.heartbeat_s = 5.0
        self.contact = time.monotonic()
        """When a heartbeat was last answered: only these tell the API that somebody looks after the job."""
        self.has_child = False
        self.samples: Samples | None = None
        self.task_lines: TaskLines | None = None
        self._nudged = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def _new_client(self) -> Client:
        """A connection to the API, for one thread."""
        return Client(
            self.orders["api"],
            f"jobs/{self.job_id}",
            self.orders["token"],
            self.state.nonce(),
            insecure=bool(self.orders.get("insecure")),
        )

    def run(self) -> None:
        """Do whatever is left to do for the job."""
        tree.protect_memory()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, self._on_nudge)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it ends a pause
        try:
            self._go()
        except Unwanted as unwanted:
            say(f"not wanted any more: {unwanted}")
            # Without a start of its own, what runs here is that of the runner who has the job.
            if self.state.has("started"):
                tree.end(self.job_id)

    def _go(self) -> None:
        self._claim()
        self.spec = self._insist(lambda: self.client.get("spec"))
        secrets = [value.encode() for value in self.spec["redact"]]
        self.shipper = Shipper(self.client, self.spool, secrets)
        if self.spec.get("tasks"):
            self.task_lines = TaskLines(self._new_client(), self.spool, secrets)
        if self.state.has("exit"):
            self.end = self.state.read_json("exit")
        elif self.state.has("started"):
            self._salvage()
        else:
            self._begin()
        self._tell_end()

    def _claim(self) -> None:
        """Become the one runner of this job, or end without having done anything."""
        body = {"nonce": self.state.nonce(), "pid": os.getpid(), "host": socket.gethostname()}
        self.heartbeat_s = float(self._insist(lambda: self.client.post("claim", body))["heartbeat_s"])

    def _begin(self) -> None:
        """Fetch the code, wait for the other nodes, start the commands, and see them through."""
        job = Job(self.spec, self.orders["run_dir"], self.orders.get("user"), self.orders["path"], self.orders["api"])
        try:
            self._prepare(job)
            if not self._barrier():
                return
            self.has_child = True
            pid = self._start(job)
        except (BadArchive, CannotStart, OSError) as error:
            tree.end(self.job_id)
            self._finish(None, "executor_error", str(error))
        else:
            if self.task_lines is not None:
                self.task_lines.start()
            Watched(self, pid).until_it_ends()
        finally:
            self.has_child = False

    def _start(self, job: Job) -> int:
        output = relay.start(self.spool, self.spec["log_limit"], job.account)
        if every_s := self.spec.get("sample_every_s"):
            self.samples = Samples(self.client, gpus.start(self.spec["gpus"], float(every_s)))
        try:
            tree.adopt_orphans()
            # From here on nobody may start the commands again, whatever happens to this process.
            self.state.write("started", "")
            return spawn(job, output)
        finally:
            os.close(output)

    def _prepare(self, job: Job) -> None:
        """The job's directory, its user's own, with the code in it. What lies in it is touched as that user only."""
        os.makedirs(job.run_dir, exist_ok=True)
        if job.switches_user:
            os.chown(job.run_dir, job.account.pw_uid, job.account.pw_gid, follow_symlinks=False)
        archive = self.spec["archive"]
        if archive:
            path = self.state.path("archive.tar.gz")
            self._insist(lambda: self.client.download("archive", path))
            with open(path, "rb") as file, acting_as(job.account):
                unpack(file, archive["sha256"], job.run_dir)
            os.unlink(path)

    def _barrier(self) -> bool:
        """Wait until every node of the attempt has its runner; False when told to stop instead."""
        while True:
            answer = self._insist(lambda: self.heartbeat("waiting"))
            if answer["action"] == "stop":
                self._finish(None, answer["reason"], "stopped before its commands were started")
                return False
            if answer["action"] == "go":
                # Where the others are may have been unknown before they came up.
                self.spec.update(answer.get("nodes", {}))
                return True
            self.pause(float(answer["heartbeat_s"]))

    def _salvage(self) -> None:
        """An earlier runner died after the start: end what it left, and say so."""
        tree.end(self.job_id)
        self._finish(None, "instance_unreachable", "its runner was killed; what was left of the job has been ended")

    def _finish(self, exit_code: int | None, reason: str, message: str) -> None:
        """Remember the end before telling it. On a disk that the commands have filled, telling it must do."""
        self.end = {"exit_code": exit_code, "reason": reason, "message": message}
        try:
            self.state.write("exit", json.dumps(self.end))
        except OSError as error:
            say(f"the end can't be kept: {error}")

    def finish(self, status: int, reason: str | None) -> None:
        """The commands have ended with this wait status; `reason` is why they were stopped, if they were."""
        code = os.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 else code
        if reason is not None:
            self._finish(code, reason, "")
        elif code == 0:
            self._finish(0, "done_by_runner", "")
        else:
            self._finish(code, "container_exited_with_error", COMMON_CODES.get(code) or _worded(code))

    def _tell_end(self) -> None:
        """Ship the rest of the output, then the end; until the API has heard it."""
        until = time.monotonic() + LAST_OUTPUT_S
        while not relay.is_done(self.spool) and time.monotonic() < until:
            self.pause(0.01)
        while self._insist(lambda: self.shipper.ship(final=True)):
            pass
        if self.samples is not None:
            self.samples.send_last()
        if self.task_lines is not None:
            self.task_lines.finish()
        self._insist(lambda: self.client.post("exit", self.end | {"log_size": self.shipper.offset}))

    def heartbeat(self, phase: str) -> dict[str, Any]:
        """Say that the job is looked after; the answer says what to do."""
        self.beat += 1
        answer = self.client.post("heartbeat", {"beat": self.beat, "phase": phase})
        self.heartbeat_s = float(answer.get("heartbeat_s", self.heartbeat_s))
        self.contact = time.monotonic()
        # People may have lengthened it; a server that knows no such thing says nothing of it.
        self.spec["max_duration_s"] = answer.get("max_duration_s", self.spec["max_duration_s"])
        return answer

    def _insist(self, call: Callable[[], Any]) -> Any:
        """Repeat a call until it is answered. Raises Unwanted when the answer is no, or nobody waits for one."""
        failures = 0
        while True:
            try:
                answer = call()
            except Unreachable as error:
                if not self.state.has("lock"):
                    raise Unwanted("the runner's folder was removed, and the API is away") from None
                failures += 1
                if failures in (1, 10):
                    say(f"the API can't be reached, trying on: {error}")
                self.pause(backoff(failures))
            except Refused as refused:
                raise Unwanted(str(refused)) from None
            else:
                return answer

    def pause(self, seconds: float) -> None:
        """Wait, or until a signal comes: a nudge, or the end of a child."""
        readable, _, _ = select.select([self._wake_read], [], [], seconds)
        if readable:
            os.read(self._wake_read, 64)

    def nudged(self) -> bool:
        """Whether a nudge ended the last pause."""
        was, self._nudged = self._nudged, False
        return was

    def _on_nudge(self, *_: Any) -> None:
        self._nudged = True

    def _on_term(self, *_: Any) -> None:
        """With commands running only the API ends a job; without any, this runner may go and another may come."""
        if not self.has_child:
            os._exit(0)


class Watched:
    """The time between start and end of the commands."""

    def __init__(self, runner: Runner, pid: int) -> None:
        self.runner, self.pid = runner, pid
        self.began = time.monotonic()
        self.told_start = False
        self.kill_at: float | None = None
        """Set once the processes have been told to end; `reason` is why, None when the commands had ended."""
        self.reason: str | None = None
        self.next_beat = 0.0
        self.next_ship = 0.0
        self.failures = 0
        self.wanted = True

    def until_it_ends(self) -> None:
        """Look every LOOK_S: limits, contact, output, and whether the last process of the tree has ended."""
        status: int | None = None
        while status is None or tree.processes(self.runner.job_id):
            self._keep_limits()
            self._talk()
            self.runner.pause(LOOK_S)
            ended = tree.reap()
            if self.pid in ended:
                status = ended[self.pid]
                if self.kill_at is None:
                    self._stop(None, LEFTOVER_GRACE_S)
        self.runner.finish(status, self.reason)
        if not self.wanted:
            raise Unwanted("the API ended this job")

    def _keep_limits(self) -> None:
        spec, now = self.runner.spec, time.monotonic()
        if spec["max_duration_s"] is not None and now - self.began > spec["max_duration_s"]:
            self._stop("max_duration_exceeded", spec["stop_duration_s"])
        if spec["lost_after_s"] is not None and now - self.runner.contact > spec["lost_after_s"]:
            self._stop("instance_unreachable", spec["stop_duration_s"])
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            tree.kill(tree.processes(self.runner.job_id))

    def _stop(self, reason: str | None, grace_s: float) -> None:
        """TERM to the whole tree now, KILL after the grace. The first reason counts, and the shortest grace."""
        kill_at = time.monotonic() + grace_s
        if self.kill_at is None:
            self.kill_at, self.reason = kill_at, reason
            tree.send(tree.processes(self.runner.job_id), signal.SIGTERM)
        self.kill_at = min(self.kill_at, kill_at)

    def _talk(self) -> None:
        """Tell what there is to tell, unless the API was away a moment ago."""
        now = time.monotonic()
        if self.runner.nudged():
            self.next_beat = self.next_ship = 0.0
        try:
            # The heartbeat comes first, so that trouble with the output alone doesn't silence the job.
            if now >= self.next_beat:
                self._tell_start()
                self._beat()
            if now >= self.next_ship:
                while self.runner.shipper.ship() and time.monotonic() - now < LOOK_S:
                    continue
                self.failures = 0
        except Unreachable as error:
            self.failures += 1
            if self.failures in (1, 10):
                say(f"the API can't be reached; the job goes on: {error}")
            self.next_ship = self.next_beat = now + backoff(self.failures)
        except Refused as refused:
            say(f"the API refuses this job: {refused}")
            self.wanted = False
            self._stop("terminated_by_server", 0)
            self.next_ship = self.next_beat = now + BACKOFF_CAP_S
        # Last, and only while all else arrives.
        if self.runner.samples is not None and self.failures == 0:
            self.runner.samples.send()

    def _tell_start(self) -> None:
        if not self.told_start:
            self.runner.client.post("started", {})
            self.told_start = True

    def _beat(self) -> None:
        answer = self.runner.heartbeat("running" if self.kill_at is None else "stopping")
        self.next_beat = time.monotonic() + self.runner.heartbeat_s
        if answer["action"] == "stop":
            self._stop(answer["reason"], float(answer["grace_s"]))


def _worded(code: int) -> str:
    if code > 128:
        try:
            return f"killed by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"a command failed with exit code {code}"
