"""One job from claim to exit. The API may be away at any moment: what could not be told is told later."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dstackweb.runner import child, relay, tree
from dstackweb.runner.client import Backoff, Client, Refused, Unreachable
from dstackweb.runner.course import LOST, NO_CONTAINER, RUNNER_ERROR, UNWANTED, Course, End
from dstackweb.runner.orders import Orders, Spec, parse_spec
from dstackweb.runner.shipper import Shipper, Stuck
from dstackweb.runner.state import State, note
from dstackweb.runner.wake import ASKED_TO_END, Wake

LOOK_S = 0.2
"""How often the spool is looked at."""
CLAIM_FOR_S = 600.0
"""For how long a runner that has not claimed its job asks an API that doesn't answer; the host starts another."""
LAST_OUTPUT_S = 5.0
"""How long the output is waited for once every process of the job is gone."""

T = TypeVar("T")


class ToldToStop(Exception):
    """The API wants the job ended, before its commands were started."""


class Runner:
    """Orders are what the host said on standard input; `state` is what this or an earlier runner left."""

    def __init__(self, orders: Orders, state: State, wake: Wake, clock: Callable[[], float] = time.monotonic) -> None:
        self.orders, self.state, self.wake, self.clock = orders, state, wake, clock
        self.client = Client(orders.api, orders.job, orders.token, state.nonce())
        self.backoff = Backoff()
        self.shipper: Shipper | None = None
        self.shell: tree.Shell | None = None
        self._phase: str | None = None
        self._started_told = True
        self._beat = 0
        self._beat_every_s = 5.0
        self._beat_at = self._quiet_until = 0.0

    def run(self) -> None:
        """Do whatever is left to do for the job."""
        try:
            if self.state.has("exit"):
                end = End(**self.state.read_json("exit"))
            elif self.state.has("started"):
                end = self._salvage()
            else:
                end = self._from_the_beginning()
            self._phase = "exited"
            self._deliver(end)
        except Refused as refused:
            note(f"the API wants this job no more: {refused}")

    def _from_the_beginning(self) -> End:
        """Claim the job and execute it. Raises Refused when it is not this runner's: nothing was executed then."""
        body = {"nonce": self.state.nonce(), "pid": os.getpid(), "host": socket.gethostname()}
        answer = self._insist(lambda: self.client.post("claim", body), until=self.clock() + CLAIM_FOR_S)
        self._beat_every_s = float(answer.get("heartbeat_s", self._beat_every_s))
        self._beat_at = self.clock() + self._beat_every_s
        self._phase = "waiting"
        try:
            spec = self._fetch_spec(shipped=0)
            if spec.image:
                return self._saved(End(None, NO_CONTAINER, f"image {spec.image}: this host runs no containers"))
            course = self._start(spec)
        except ToldToStop as told:
            return self._saved(End(None, str(told), "stopped before its commands were started"))
        except (child.CannotStart, OSError) as error:
            note(f"the commands could not be started: {error}")
            return self._saved(End(None, RUNNER_ERROR, str(error)))
        return self._saved(self._attend(course))

    def _start(self, spec: Spec) -> Course:
        """Prepare, wait for the other nodes, start the commands."""
        who = child.account(self.orders)
        was_there = child.make_run_dir(self.orders.run_dir, who)
        if spec.archive:
            self._put_code(who, spec.archive["sha256"], was_there)
        script = child.script(self.orders, spec)
        heard = self._barrier()
        output = relay.start(self.state.path("spool"), spec.log_limit, who.owner)
        try:
            # From here on nobody may start the commands again, whatever happens to this process.
            self.state.write("started", "")
            tree.adopt_orphans()
            process = child.spawn(self.orders, spec, who, output)
        finally:
            os.close(output)
        self.shell = tree.identify(process.pid)
        with contextlib.suppress(OSError):
            self.state.write("shell", json.dumps(self.shell), synced=False)
        child.send(process, script)
        self._phase = "running"
        self._started_told = False
        return Course(
            self.clock(),
            heard=heard,
            max_duration_s=spec.max_duration_s,
            stop_duration_s=spec.stop_duration_s,
            lost_after_s=spec.lost_after_s,
        )

    def _put_code(self, who: child.Account, sha256: str, was_there: bool) -> None:
        """Fetch and unpack the archive, unless an earlier attempt did: what it changed since is not undone."""
        mark = self.orders.run_dir.rstrip("/") + ".code"
        if was_there and _content(mark) == sha256:
            return
        from dstackweb.runner import archive  # tarfile and all it brings would delay every other start

        with open(self.state.path("archive.tar.gz"), "w+b") as file:
            os.unlink(file.name)
            self._insist(lambda: self.client.download("archive", file))
            archive.check(file, sha256)
            archive.unpack_as(who, file, self.orders.run_dir)
        with open(mark, "w", encoding="ascii") as file_:
            file_.write(sha256)

    def _barrier(self) -> float:
        """Wait until every node of the attempt has its runner. Returns when the API was last heard."""
        while True:
            sent = self.clock()
            answer = self._insist(self._heartbeat, beating=False)
            if answer["action"] != "wait":
                return sent
            self._pause(self._beat_every_s)

    def _attend(self, course: Course) -> End:
        """Until the last process of the job is gone: limits, contact, output, signals."""
        wanted = True
        while True:
            reaped = tree.reap()
            if course.ended is None and self.shell is not None and self.shell.pid in reaped.statuses:
                course.shell_ended(self.clock(), reaped.statuses[self.shell.pid])
            if course.ended is not None and reaped.childless and not self._members():
                return course.ended
            if number := course.signal_due(self.clock()):
                tree.send(self._members(), number)
                self._phase = "stopping"
            more = False
            if wanted and self.clock() >= self._quiet_until:
                try:
                    more = self._talk(course)
                except Refused as refused:
                    note(f"the API wants this job no more: {refused}")
                    wanted = False
                    course.stop(self.clock(), 0, UNWANTED)
                    continue
            if signal.SIGUSR1 in self.wake.wait(0 if more else LOOK_S):
                self._beat_at = self._quiet_until = 0.0

    def _talk(self, course: Course) -> bool:
        """Tell the API what there is to tell, and do what it says; True when more output waits."""
        try:
            if not self._started_told:
                self.client.post("started", {})
                self._started_told = True
            if self.clock() >= self._beat_at:
                sent = self.clock()
                answer = self._heartbeat()
                course.heard(sent)
                if answer["action"] == "stop":
                    course.stop(self.clock(), answer.get("grace_s"), answer.get("reason") or UNWANTED)
            more = self.shipper is not None and self.shipper.ship()
        except (Unreachable, Stuck) as error:
            self._quiet_until = self.clock() + self._failed(error)
            return False
        self._worked()
        return more

    def _salvage(self) -> End:
        """An earlier runner died after the start: end what it left, and say so."""
        note("an earlier runner was killed; ending what is left of the job")
        saved = self.state.read_json("shell")
        self.shell = tree.Shell(*saved) if saved else None
        empty_looks = 0
        while empty_looks < 2:  # a process may fork and end while it is looked for
            left = self._members()
            empty_looks = 0 if left else empty_looks + 1
            tree.send(left, signal.SIGKILL)
            self.wake.wait(0.02)
        return self._saved(End(None, LOST, "its runner was killed, and what was left of the job has been ended"))

    def _saved(self, end: End) -> End:
        """The end with the length of the output, once that is complete; remembered before it is told."""
        spool = self.state.path("spool")
        until = self.clock() + LAST_OUTPUT_S
        while not relay.finished(spool) and self.clock() < until:
            self.wake.wait(0.01)
        end = end._replace(log_size=self.state.size("spool"))
        try:
            self.state.write("exit", json.dumps(end._asdict()))
        except OSError as error:
            note(f"the end can't be remembered, only told: {error}")
        return end

    def _deliver(self, end: End) -> None:
        """Ship the rest of the output, then the end; until the API has heard it."""
        if self.shipper is None:
            self._fetch_spec(shipped=None)
        assert self.shipper is not None
        if not self._started_told:
            self._insist(lambda: self.client.post("started", {}))
        self.shipper.end = end.log_size
        while self._insist(self.shipper.ship):
            pass
        self._insist(lambda: self.client.post("exit", end._asdict()))

    def _fetch_spec(self, shipped: int | None) -> Spec:
        """What to execute, and what to mask in the log, of which so much has been shipped (None: ask)."""
        spec = parse_spec(self._insist(lambda: self.client.get("spec")))
        self.shipper = Shipper(self.state.path("spool"), spec.redact, self.client.log, shipped)
        return spec

    def _heartbeat(self) -> dict[str, Any]:
        """Say that the job is looked after; the answer says what to do. Raises ToldToStop before the start."""
        self._beat = max(self._beat + 1, int(time.monotonic() * 1000))
        answer = self.client.post("heartbeat", {"beat": self._beat, "phase": self._phase})
        self._beat_every_s = float(answer.get("heartbeat_s", self._beat_every_s))
        self._beat_at = self.clock() + self._beat_every_s
        if self._phase == "waiting" and answer["action"] == "stop":
            raise ToldToStop(answer.get("reason") or UNWANTED)
        return answer

    def _insist(self, call: Callable[[], T], *, until: float | None = None, beating: bool = True) -> T:
        """Repeat a call until it is answered, with heartbeats meanwhile. For when there is no child to look after."""
        while True:
            try:
                if beating and self._phase is not None and self.clock() >= self._beat_at:
                    self._heartbeat()
                result = call()
            except (Unreachable, Stuck) as error:
                if until is not None and self.clock() >= until:
                    raise SystemExit from error
                self._pause(self._failed(error))
            else:
                self._worked()
                return result

    def _pause(self, seconds: float) -> None:
        """Wait, or until somebody nudges. Without a child a runner may be asked to end: its files tell the next one."""
        if ASKED_TO_END & self.wake.wait(seconds):
            raise SystemExit

    def _members(self) -> set[int]:
        return tree.members(self.orders.job, self.shell)

    def _failed(self, error: Exception) -> float:
        wait = self.backoff.failed()
        if self.backoff.failures in (1, 10, 100):
            note(f"the API can't be reached, trying on: {error}")
        return wait

    def _worked(self) -> None:
        if self.backoff.failures:
            note("the API answers again")
        self.backoff.worked()


def _content(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except FileNotFoundError:
        return ""
