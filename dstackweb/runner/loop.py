"""One job from claim to exit. The API may be unreachable at any time: reports are repeated until they arrive."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from dstackweb.runner import (
    cgroups,
    contained,
    container,
    images,
    isolation,
    output,
    relay,
    samples,
    sandbox,
    spool,
    tree,
)
from dstackweb.runner.archive import BadArchive, unpack
from dstackweb.runner.child import CannotStart, Job, acting_as, spawn
from dstackweb.runner.client import BACKOFF_CAP_S, Client, Refused, Unreachable, backoff
from dstackweb.runner.commands import Commands, Processes
from dstackweb.runner.disk import DiskWatch
from dstackweb.runner.engine import Engine, EngineError
from dstackweb.runner.machine import Metadata
from dstackweb.runner.masking import Masker
from dstackweb.runner.state import StateDir, job_uid, say
from dstackweb.runner.task_lines import TaskLines

POLL_S = 0.2
OUT_OF_MEMORY, OUT_OF_DISK = "out_of_memory", "out_of_disk"
LEFTOVER_GRACE_S = 2.0
"""Time for background processes between TERM and KILL once the commands have ended."""

SPEC_S = 1.0
"""So long after the spec a job of one node starts without asking once more whether it is still wanted."""

RELAY_AGAIN_S = 60.0
"""A relay that gave no answer is not asked again for this long."""

PULL_SHOWN_S = 2.0
"""How often the log shows how a pull goes on."""

ENGINE_AGAIN_S = 2.0
"""How long until an engine that can't say what is left of a job is asked again."""

LAST_OUTPUT_S = 5.0
"""How long to wait for output after the last process is gone; later output is of a process that escaped."""


class Rejected(Exception):
    """The API no longer accepts this job, or not from this runner."""


class Runner:
    """`orders` come from the host on standard input; `state` holds the files of this and earlier runners."""

    def __init__(self, orders: dict[str, Any], state: StateDir) -> None:
        self.orders, self.state = orders, state
        self.job_id: str = orders["job"]
        self.client = self._new_client()
        self.spool = state.path("spool")
        self.group, self.uid = cgroups.read(state.folder), job_uid(state.folder)
        self.spec: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.heartbeats = 0
        self.heartbeat_s = 5.0
        self.relay_again = 0.0
        self.contact = time.monotonic()
        """When a heartbeat was last answered: only heartbeats show the API that the job has a runner."""
        self.has_child = False
        self.signalled = False
        """Whether this runner got SIGTERM while commands were running, as when its machine is shut down."""
        self.pipe: int | None = None
        """Where the commands' output goes, while this runner may write to it as well."""
        self.image: images.Image | None = None
        self.samples: samples.Samples | None = None
        self.task_lines: TaskLines | None = None
        self.disk: DiskWatch | None = None
        self._nudged = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def _new_client(self) -> Client:
        """A client for one thread."""
        return Client(
            self.orders["api"],
            f"jobs/{self.job_id}",
            self.orders["token"],
            self.state.nonce(),
            insecure=bool(self.orders.get("insecure")),
        )

    def run(self) -> None:
        """Do what remains to be done for the job."""
        if cause := self.orders.get("request_id"):
            say(f"started because of request {cause}")
        tree.protect_memory()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, self._on_nudge)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # ends a pause
        try:
            self._go()
        except Rejected as rejected:
            say(f"the API rejected this runner: {rejected}")
            # Without a start of its own, the processes belong to the runner that has the job.
            if self.state.has("started"):
                self._end_everything()
                self.group.remove()

    def _go(self) -> None:
        self._claim()
        self.spec_at = time.monotonic()
        masker = Masker.of(self.spec["redact"])
        self.shipper = output.Shipper(self.client, self.spool, masker)
        if self.spec.get("tasks"):
            self.task_lines = TaskLines(self._new_client(), self.spool, masker)
        if self.state.has("exit"):
            self.end = self.state.read_json("exit")
        elif self.state.has("started"):
            self._salvage()
        else:
            if not self.spec.get("image"):
                self.shipper.offset = 0  # nothing was started before, so nothing was sent
            self._begin()
        self._report_end()
        sandbox.remove_tmp(self.orders["run_dir"])

    def _claim(self) -> None:
        """Claim the job for this runner, and get its spec. Raises Rejected."""
        body = {"nonce": self.state.nonce(), "pid": os.getpid(), "host": socket.gethostname()}
        answer = self._retry(lambda: self.client.post("claim", body))
        self.heartbeat_s = float(answer["heartbeat_s"])
        self.spec = answer.get("spec") or self._retry(lambda: self.client.get("spec"))  # an older server's has none

    def _begin(self) -> None:
        """Fetch the code, wait for the other nodes, start the commands and wait for their end."""
        orders = self.orders
        job = Job(
            self.spec, orders["run_dir"], orders.get("user"), orders["path"], orders["api"],
            writable=orders.get("writable"),
            engine=Engine.of(orders["engine"]) if orders.get("engine") else None,
        )  # fmt: skip
        try:
            self._prepare(job)
            if self.spec.get("image") and not self._pull(job):
                return
            if not self._barrier():
                return
            self.has_child = True
            commands = self._start(job)
        except BadArchive as bad:
            refused = {"fault": bad.fault.value, "name": bad.name, "limit": bad.limit}
            self._finish(None, "code_refused", str(bad), code_refused=refused)
        except images.PullFailed as failed:
            fault = {"fault": failed.fault.value, "image": failed.image}
            self._finish(None, "image_pull_failed", str(failed), image_pull_failed=fault)
        except contained.CannotContain as cannot:
            self._end_everything()
            self._finish(None, "creating_container_error", str(cannot))
        except (CannotStart, OSError) as error:
            self._end_everything()
            self._finish(None, "executor_error", str(error))
        else:
            if self.task_lines is not None:
                self.task_lines.start()
            self.disk = self._disk_watch(job, commands)
            self.disk.start()
            try:
                CommandsRun(self, commands).until_it_ends()
            finally:
                self.disk.stop()
        finally:
            self.has_child = False
            self._close_pipe()

    def _pull(self, job: Job) -> bool:
        """Have the image on this machine; False if the job is to stop instead. Raises PullFailed, CannotContain."""
        engine, image, policy = contained.engine_of(job), self.spec["image"], self.spec["pull_policy"]
        self.pipe = output.start_relay(self.spool, self.spec["log_limit"], job.account)
        images.forget_credentials(self.state.folder)  # of an earlier runner
        try:
            self.image = images.find(engine, image) if policy != "always" else None
            if self.image is None and policy == "never":
                raise images.PullFailed(images.ImageFault.NOT_PRESENT, image, "it is not on this host")
            if self.image is None:
                self._write_line(f"pulling {image}")
                if not self._pulled(images.Pull(engine, image, self.spec["registry_auth"], self.state.folder)):
                    return False
                self.image = images.find(engine, image)
        except EngineError as error:
            raise contained.CannotContain(str(error)) from error
        if self.image is None:
            raise images.PullFailed(images.ImageFault.NOT_FOUND, image, "it was removed after it was pulled")
        self._write_line(f"image {image}: {self.image.digest}")
        return True

    def _pulled(self, pull: images.Pull) -> bool:
        """Wait for a pull, with heartbeats; False if the job is to stop instead."""
        next_call = 0.0
        try:
            while not pull.is_done():
                for line in pull.progress():
                    self._write_line(line)
                if time.monotonic() >= next_call or self.nudged():
                    try:
                        answer = self.heartbeat("pulling")
                        self.shipper.ship()
                    except Unreachable as error:
                        say(f"the API can't be reached, pulling goes on: {error}")
                    except Refused as refused:
                        raise Rejected(str(refused)) from None
                    else:
                        if answer["action"] == "stop":
                            self._finish(None, answer["reason"], "stopped before its commands were started")
                            return False
                    next_call = time.monotonic() + min(self.heartbeat_s, PULL_SHOWN_S)
                self.pause(POLL_S)
        finally:
            pull.close()
        return True

    def _write_line(self, text: str) -> None:
        """A line of the runner's own in the job's output."""
        assert self.pipe is not None
        os.write(self.pipe, f"[dstackweb: {text}]\n".encode(errors="replace"))

    def _close_pipe(self) -> None:
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    def _start(self, job: Job) -> Commands:
        if self.pipe is None:
            self.pipe = output.start_relay(self.spool, self.spec["log_limit"], job.account)
        if every_s := self.spec.get("sample_every_s"):
            self.samples = samples.Samples(self.client, samples.start(self.spec["gpus"], float(every_s)))
        try:
            if self.image is None:
                job.group = self.group = self._make_group()
            else:
                container.store(self.state, container.Container(contained.engine_of(job), self.job_id))
            tree.adopt_orphans()
            # From here on the commands must not be started again, whatever happens to this process.
            self.uid = job.account.pw_uid if job.switches_user else None
            self.state.write("started", "" if self.uid is None else str(self.uid))
            if self.image is not None:
                return contained.spawn(job, self.image, self.state, self.pipe)
            pid, fenced = spawn(job, self.pipe), job.writable is not None
            return Processes(self.job_id, self.group, pid, self.uid, fenced=fenced)
        finally:
            self._close_pipe()

    def _disk_watch(self, job: Job, commands: Commands) -> DiskWatch:
        own = [job.run_dir, sandbox.tmp_of(job.run_dir)]
        return DiskWatch(
            lambda: [*own, *commands.folders()], commands.processes,
            limit=self.spec.get("disk_limit"), reserve=self.spec.get("disk_reserve"),
        )  # fmt: skip

    def _make_group(self) -> cgroups.Group:
        """The job's cgroup, stored before anything enters it; one without folders where none can be made."""
        self.group.remove()  # of a runner that ended before it started anything, perhaps elsewhere
        spec = self.spec
        limits = cgroups.Limits(
            spec.get("memory_max_mib"), spec.get("cpu_max"), spec.get("cpus"), spec.get("process_limit")
        )
        try:
            group = cgroups.make(self.job_id, limits)
        except cgroups.CannotMake as cannot:
            say(f"the job has no cgroup: {cannot}")
            return cgroups.NO_GROUP
        self.state.write("cgroup", group.stored())
        return group

    def _prepare(self, job: Job) -> None:
        """Make the job's directory, owned by its user, and unpack the code with that user's rights.

        The host may have lost its sandbox since it got the job. Raises CannotStart, BadArchive, OSError.
        """
        has = isolation.CONTAINER if self.spec.get("image") else isolation.of_job(job.user, job.writable)
        least = self.spec.get("least_isolation", "")
        if not isolation.isolates(has, least):
            raise CannotStart(f"the project requires the isolation {least!r}, and this host has {has!r} now")
        os.makedirs(job.run_dir, exist_ok=True)
        if job.switches_user:
            os.chown(job.run_dir, job.account.pw_uid, job.account.pw_gid, follow_symlinks=False)
            os.chmod(job.run_dir, 0o700)
        if job.writable is not None and not self.spec.get("image"):
            sandbox.make_tmp(job.run_dir, job.account)
        if self.spec["archive"]:
            self._unpack(job, self.spec["archive"]["sha256"])

    def _unpack(self, job: Job, sha256: str) -> None:
        path = self.state.path("archive.tar.gz")
        try:
            self._retry(lambda: self.client.download("archive", path))
            with open(path, "rb") as file, acting_as(job.account):
                unpack(file, sha256, job.run_dir)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _barrier(self) -> bool:
        """Wait until every node of the attempt has a runner, and its image; False if the job is to stop instead."""
        if self.spec.get("alone") and time.monotonic() - self.spec_at < SPEC_S and not self.nudged():
            return True
        while True:
            answer = self._retry(lambda: self.heartbeat("waiting"))
            if answer["action"] == "stop":
                self._finish(None, answer["reason"], "stopped before its commands were started")
                return False
            if answer["action"] == "go":
                # The other nodes' addresses may have been unknown before they started.
                self.spec.update(answer.get("nodes", {}))
                return True
            self.pause(float(answer["heartbeat_s"]))

    def _end_everything(self) -> None:
        """End what is left of the job, until it is confirmed gone. An engine that is away is waited for."""
        tree.end(self.job_id, self.group, self.uid)
        while not container.end(self.state.folder):
            with contextlib.suppress(Unreachable, Refused):
                self.heartbeat("stopping")
            self.pause(ENGINE_AGAIN_S)
        tree.end(self.job_id, self.group, self.uid)

    def _salvage(self) -> None:
        """An earlier runner died after the start: end its processes and report that."""
        self._end_everything()
        self._finish(None, "instance_unreachable", "its runner was killed; the job's remaining processes were ended")

    def _finish(self, exit_code: int | None, reason: str, message: str, **more: Any) -> None:
        """Store the end before reporting it. On a full disk it is only reported."""
        self.end = {"exit_code": exit_code, "reason": reason, "message": message, **more}
        try:
            self.state.write("exit", json.dumps(self.end))
        except OSError as error:
            say(f"the end can't be stored: {error}")

    def finish(self, commands: Commands, status: int, reason: str | None) -> None:
        """The commands ended with this wait status; `reason` is why they were stopped, if they were."""
        code = os.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 else code
        ran_out = commands.ran_out_of_memory()
        if ran_out and reason in (None, OUT_OF_MEMORY):
            self._finish(code, OUT_OF_MEMORY, "", memory_mib=commands.memory_mib() if ran_out == "limit" else None)
        elif reason == OUT_OF_DISK and self.disk is not None:
            self._finish(code, OUT_OF_DISK, "", disk=self.disk.over)
        elif reason is not None:
            self._finish(code, reason, "")
        elif own := commands.own_end():
            self._finish(code, *own)
        elif code == 0:
            self._finish(0, "done_by_runner", "")
        else:
            self._finish(code, "container_exited_with_error", "", **self._machine_end())

    def _machine_end(self) -> dict[str, Any]:
        """What suggests that the machine is ending with the commands: a SIGTERM to this runner, a spot notice."""
        found: dict[str, Any] = {}
        if self.signalled:
            say("the commands ended after this runner got SIGTERM: its machine may be ending")
            found["signalled"] = True
        # The agent may not have seen a short notice.
        if (endpoint := self.orders.get("metadata")) and (at := Metadata(endpoint).interruption()):
            say(f"spot interruption at {at}")
            found["interruption"] = {"at": at}
        return found

    def _report_end(self) -> None:
        """Send the rest of the output and then the end, until the API has it."""
        until = time.monotonic() + LAST_OUTPUT_S
        while not output.is_done(self.spool) and time.monotonic() < until:
            self.pause(0.01)
        spool.close(self.spool)
        while self._retry(lambda: self.shipper.ship(final=True)):
            pass
        if self.samples is not None:
            self.samples.send_last()
        if self.task_lines is not None:
            self.task_lines.finish()
        container.end(self.state.folder)  # it has ended; where the engine gives no answer, the host removes it later
        log = {"log_size": self.shipper.size(), "log_missing": self.shipper.missing()}
        self._retry(lambda: self.client.post("exit", self.end | log))
        self.group.remove()

    def heartbeat(self, phase: str) -> dict[str, Any]:
        """Send a heartbeat; the answer says what to do."""
        self.heartbeats += 1
        answer = None if phase == "waiting" else self._by_relay()
        if answer is None:
            answer = self.client.post("heartbeat", {"beat": self.heartbeats, "phase": phase})
        return self._note(answer)

    def report_start(self) -> dict[str, Any]:
        """Report that the commands were started, which is a heartbeat as well."""
        answer = self.client.post("started", {"image_digest": self.image.digest} if self.image else {})
        return self._note(answer) if "action" in answer else self.heartbeat("running")  # an older server's is empty

    def _note(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.heartbeat_s = float(answer.get("heartbeat_s", self.heartbeat_s))
        self.contact = time.monotonic()
        # It may have been extended; older servers don't send it.
        self.spec["max_duration_s"] = answer.get("max_duration_s", self.spec["max_duration_s"])
        return answer

    def _by_relay(self) -> dict[str, Any] | None:
        """The answer to a heartbeat that went with those of the machine's other runners; None if it could not."""
        if not self.orders.get("relay") or time.monotonic() < self.relay_again:
            return None
        answer = relay.ask(self.orders["relay"], self.job_id, self.orders["token"], self.state.nonce())
        if answer is None:
            self.relay_again = time.monotonic() + RELAY_AGAIN_S
        return answer

    def next_heartbeat(self) -> float:
        """When the next is due: at the same moment for all runners of a machine, if one request takes them all."""
        now = time.monotonic()
        if not self.orders.get("relay"):
            return now + self.heartbeat_s
        return (now // self.heartbeat_s + 1) * self.heartbeat_s

    def _retry(self, call: Callable[[], Any]) -> Any:
        """Repeat a call until it is answered. Raises Rejected if it is refused, or the runner's folder was removed."""
        failures = 0
        while True:
            try:
                answer = call()
            except Unreachable as error:
                if not self.state.has("lock"):
                    raise Rejected("the runner's folder was removed and the API is unreachable") from None
                failures += 1
                if failures in (1, 10):
                    say(f"the API can't be reached, retrying: {error}")
                self.pause(backoff(failures))
            except Refused as refused:
                raise Rejected(str(refused)) from None
            else:
                return answer

    def pause(self, seconds: float) -> None:
        """Wait, or until a signal: a nudge, or the end of a child."""
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
        """Running commands are ended only by the API; without them this runner may exit and be replaced."""
        if not self.has_child:
            os._exit(0)
        self.signalled = True


class CommandsRun:
    """The commands from start to end."""

    def __init__(self, runner: Runner, commands: Commands) -> None:
        self.runner, self.commands = runner, commands
        self.began = time.monotonic()
        self.reported_start = False
        self.kill_at: float | None = None
        """When to kill the processes, once signalled to end; `reason` is why, None if the commands had ended."""
        self.reason: str | None = None
        self.next_heartbeat = 0.0
        self.next_ship = 0.0
        self.failures = 0
        self.wanted = True
        self.may_wait = True
        """Whether output that a full disk has no room for is waited for; not once the job is to stop."""

    def until_it_ends(self) -> None:
        """Every POLL_S, check limits, communicate, and see whether the last process of the tree has ended.

        Then its output may still wait for a full disk.
        """
        status: int | None = None
        while status is None or self.commands.processes() or self._output_waits():
            self._keep_limits()
            self._communicate()
            self.runner.pause(min(POLL_S, max(0.0, self.next_heartbeat - time.monotonic())))
            ended = tree.reap()
            if status is None and (status := self.commands.status(ended)) is not None and self.kill_at is None:
                self._stop(None, LEFTOVER_GRACE_S)
        self.runner.finish(self.commands, status, self.reason)
        if not self.wanted:
            raise Rejected("the API ended this job")

    def _output_waits(self) -> bool:
        path = self.runner.spool
        return self.may_wait and not output.is_done(path) and not spool.has_room(path)

    def _keep_limits(self) -> None:
        spec, now = self.runner.spec, time.monotonic()
        if spec["max_duration_s"] is not None and now - self.began > spec["max_duration_s"]:
            self._stop("max_duration_exceeded", spec["stop_duration_s"])
        if spec["lost_after_s"] is not None and now - self.runner.contact > spec["lost_after_s"]:
            self._stop("instance_unreachable", spec["stop_duration_s"])
        if self.commands.ran_out_of_memory():
            # The kernel may have killed one process of many.
            self._stop(OUT_OF_MEMORY, 0)
        if self.runner.disk is not None and self.runner.disk.over is not None:
            self._stop(OUT_OF_DISK, 0)
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.commands.kill()

    def _stop(self, reason: str | None, grace_s: float) -> None:
        """Send TERM to the whole tree now, KILL after the grace. The first reason and the shortest grace apply."""
        kill_at = time.monotonic() + grace_s
        self.may_wait = self.may_wait and reason is None
        if self.kill_at is None:
            self.kill_at, self.reason = kill_at, reason
            tree.send(self.commands.processes() - self.commands.spared(), signal.SIGTERM)
        self.kill_at = min(self.kill_at, kill_at)

    def _communicate(self) -> None:
        """Send what is due, unless the API was unreachable a moment ago."""
        now = time.monotonic()
        if self.runner.nudged():
            self.next_heartbeat = self.next_ship = 0.0
        try:
            # The heartbeat comes first: failing to send output must not stop heartbeats.
            if now >= self.next_heartbeat:
                self._heartbeat()
            if now >= self.next_ship:
                while self.runner.shipper.ship() and time.monotonic() - now < POLL_S:
                    continue
                self.failures = 0
        except Unreachable as error:
            self.failures += 1
            if self.failures in (1, 10):
                say(f"the API can't be reached; the job continues: {error}")
            self.next_ship = self.next_heartbeat = now + backoff(self.failures)
        except Refused as refused:
            say(f"the API refuses this job: {refused}")
            self.wanted = False
            self._stop("terminated_by_server", 0)
            self.next_ship = self.next_heartbeat = now + BACKOFF_CAP_S
        # Last, and only while everything else arrives.
        if self.runner.samples is not None and self.failures == 0:
            self.runner.samples.send()

    def _heartbeat(self) -> None:
        if self.reported_start:
            answer = self.runner.heartbeat("running" if self.kill_at is None else "stopping")
        else:
            answer = self.runner.report_start()
            self.reported_start = True
        self.next_heartbeat = self.runner.next_heartbeat()
        if answer["action"] == "stop":
            self._stop(answer["reason"], float(answer["grace_s"]))
