"""One job from claim to exit. The API may be unreachable at any time: reports are repeated until they arrive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any, Union

from dstackweb.runner import (
    artifacts,
    cgroups,
    contained,
    container,
    images,
    isolation,
    output,
    samples,
    sandbox,
    spool,
    tree,
)
from dstackweb.runner.archive import BadArchive, unpack
from dstackweb.runner.child import CannotStart, HostFault, Job, Processes, among_files_of, spawn
from dstackweb.runner.client import Refused, Unreachable
from dstackweb.runner.disk import DiskWatch
from dstackweb.runner.engine import EngineError, note_failed
from dstackweb.runner.link import Link, Rejected
from dstackweb.runner.machine import Metadata
from dstackweb.runner.masking import Masker
from dstackweb.runner.running import OUT_OF_DISK, OUT_OF_MEMORY, POLL_S, CommandsRun
from dstackweb.runner.state import StateDir, job_uid, say
from dstackweb.runner.task_lines import TaskLines

Commands = Union[Processes, contained.Contained]  # noqa: UP007  # Python 3.9 evaluates it

SPEC_S = 1.0
"""So long after the spec a job of one node starts without asking once more whether it is still wanted."""

PULL_SHOWN_S = 2.0
"""How often the log shows how a pull goes on."""

ENGINE_AGAIN_S = 2.0
"""How long until an engine that can't say what is left of a job is asked again."""

NOT_STARTED = "not_claimed"
"""Reason of a job that its host could not start: its run goes back to its place."""

LAST_OUTPUT_S = 5.0
"""How long to wait for output after the last process is gone; later output is of a process that escaped."""


class Runner:
    """`orders` come from the host on standard input; `state` holds the files of this and earlier runners."""

    def __init__(self, orders: dict[str, Any], state: StateDir) -> None:
        self.orders, self.state = orders, state
        self.job_id: str = orders["job"]
        self.link = Link(orders, state)
        self.spool = state.path("spool")
        self.group, self.uid = cgroups.read(state.folder), job_uid(state.folder)
        self.end: dict[str, Any] = {}
        self.has_child = False
        self.signalled = False
        """Whether this runner got SIGTERM while commands were running, as when its machine is shut down."""
        self.pipe: output.Sinks | None = None
        """Where the commands' output goes, while this runner may write to it as well."""
        self.image: images.Image | None = None
        self.samples: samples.Samples | None = None
        self.task_lines: TaskLines | None = None

    def run(self) -> None:
        if cause := self.orders.get("request_id"):
            say(f"started because of request {cause}")
        tree.protect_memory()
        self.link.listen()
        signal.signal(signal.SIGTERM, self._on_term)
        try:
            self._go()
        except Rejected as rejected:
            say(f"the API rejected this runner: {rejected}")
            # Without a start of its own, the processes belong to the runner that has the job.
            if self.state.has("started"):
                self._end_everything()
                self.group.remove()

    def _go(self) -> None:
        self.link.claim()
        self.spec_at = time.monotonic()
        masker = Masker.of(self.link.spec["redact"])
        with_marks = bool(self.link.spec.get("log_marks"))  # an older server can't take them
        self.shipper = output.Shipper(self.link.client, self.spool, masker, with_marks=with_marks)
        if self.link.spec.get("tasks"):
            self.task_lines = TaskLines(self.link.new_client(), self.spool, masker)
        if self.state.has("exit"):
            self.end = json.loads(self.state.read("exit"))
        elif self.state.has("started"):
            self._salvage()
        else:
            if not self.link.spec.get("image"):
                self.shipper.offset = 0  # nothing was started before, so nothing was sent
            self._begin()
        self._report_end()
        sandbox.remove_tmp(self.orders["run_dir"])

    def _begin(self) -> None:
        """Fetch the code, wait for the other nodes, start the commands and wait for their end."""
        job = Job(self.link.spec, self.orders)
        try:
            self._prepare(job)
            if self.link.spec.get("image") and not self._pull(job):
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
        except contained.EngineFailed as failed:
            # A container that it may have made was never started: the host removes that once the engine is back.
            note_failed(self.state.home, str(failed))
            tree.end(self.job_id, self.group, self.uid)
            self._finish(None, NOT_STARTED, str(failed), by_engine=True)
        except CannotStart as error:
            self._end_everything()
            self._finish(None, "executor_error", str(error))
        except (HostFault, OSError) as error:
            # Nothing of the run was executed, and another host may start it.
            self._end_everything()
            self._finish(None, NOT_STARTED, str(error))
        else:
            if self.task_lines is not None:
                self.task_lines.start()
            self._run(job, commands)
        finally:
            self.has_child = False
            self._close_pipe()

    def _pull(self, job: Job) -> bool:
        """Have the image on this machine; False if the job is to stop instead. Raises PullFailed, CannotContain,
        EngineFailed."""
        engine, image, policy = contained.engine_of(job), self.link.spec["image"], self.link.spec["pull_policy"]
        self.pipe = output.start_relay(self.spool, self.link.spec["log_limit"], job.account)
        images.forget_credentials(self.state.folder)  # of an earlier runner
        auth, project = self.link.spec["registry_auth"], int(self.link.spec.get("project", 0))
        access = images.ImageAccess(self.state.home)
        try:
            there = images.find(engine, image)
            is_free = there is not None and access.allows(image, there.id, project)
            self.image = there if is_free and policy != "always" else None
            if self.image is None and policy == "never":
                raise images.PullFailed(images.ImageFault.NOT_PRESENT, image, "it is not on this host")
            if self.image is None:
                self._write_line(f"pulling {image}")
                if not self._pulled(images.Pull(engine, image, auth, self.state.folder)):
                    return False
                if pulled := images.find(engine, image):
                    access.note(image, pulled.id, project, with_credentials=bool(auth), was_there=pulled == there)
                self.image = pulled
        except EngineError as error:
            raise contained.blame(engine, error) from error
        except images.PullFailed as failed:
            if failed.fault in images.MAYBE_OF_ENGINE:
                fault = contained.blame(engine, EngineError(str(failed)))
                if isinstance(fault, contained.EngineFailed):
                    raise fault from failed
            raise
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
                if time.monotonic() >= next_call or self.link.nudged():
                    try:
                        answer = self.link.heartbeat("pulling")
                        self.shipper.ship()
                    except Unreachable as error:
                        say(f"the API can't be reached, pulling goes on: {error}")
                    except Refused as refused:
                        raise Rejected(str(refused)) from None
                    else:
                        if answer["action"] == "stop":
                            self._finish(None, answer["reason"], "stopped before its commands were started")
                            return False
                    next_call = time.monotonic() + min(self.link.heartbeat_s, PULL_SHOWN_S)
                self.link.pause(POLL_S)
        finally:
            pull.close()
        return True

    def _write_line(self, text: str) -> None:
        """A line of the runner's own in the job's output."""
        assert self.pipe is not None
        os.write(self.pipe.out, f"[dstackweb: {text}]\n".encode(errors="replace"))

    def _close_pipe(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def _start(self, job: Job) -> Commands:
        if self.pipe is None:
            self.pipe = output.start_relay(self.spool, self.link.spec["log_limit"], job.account)
        if every_s := self.link.spec.get("sample_every_s"):
            self.samples = samples.Samples(self.link.client, samples.start(self.link.spec["gpus"], float(every_s)))
        try:
            if self.image is None:
                job.group = self.group = self._make_group()
            else:
                container.store(self.state, container.Container(contained.engine_of(job), self.job_id))
            tree.adopt_orphans()
            # From here on the commands must not be started again, whatever happens to this process.
            self.uid = job.uid
            if ticket := self.link.spec.get("ticket"):  # an older server gives none
                with open(self.state.path("ticket"), "w", encoding="ascii") as file:
                    file.write(ticket)
            self.state.write("started", "" if self.uid is None else str(self.uid))
            if self.image is not None:
                return contained.spawn(job, self.image, self.state, self.pipe.out)
            return spawn(job, self.pipe)
        finally:
            self._close_pipe()

    def _run(self, job: Job, commands: Commands) -> None:
        """From the start of the commands to their end. Raises Rejected."""
        own = [job.run_dir, sandbox.tmp_of(job.run_dir)]
        disk = DiskWatch(
            lambda: [*own, *commands.folders()], commands.processes,
            limit=self.link.spec.get("disk_limit"), reserve=self.link.spec.get("disk_reserve"),
            inode_reserve=self.link.spec.get("inode_reserve"),
        )  # fmt: skip
        running = CommandsRun(
            self.link, commands, self.shipper, disk, self.samples, self.image.digest if self.image else None, job
        )
        disk.start()
        try:
            status = running.until_it_ends()
            self._finish_commands(commands, status, running.reason, disk)
        finally:
            disk.stop()
        if not running.wanted:
            raise Rejected("the API ended this job")

    def _make_group(self) -> cgroups.Group:
        """The job's cgroup, stored before anything enters it; one without folders where none can be made."""
        self.group.remove()  # of a runner that ended before it started anything, perhaps elsewhere
        spec = self.link.spec
        names = ("memory_max_mib", "cpu_max", "cpus", "process_limit")
        try:
            group = cgroups.make(self.job_id, *map(spec.get, names))
        except cgroups.CannotMake as cannot:
            say(f"the job has no cgroup: {cannot}")
            return cgroups.NO_GROUP
        self.state.write("cgroup", group.stored())
        return group

    def _prepare(self, job: Job) -> None:
        """Make the job's directory, owned by its user, and unpack the code with that user's rights.

        The host may have lost its sandbox since it got the job. Raises CannotStart, HostFault, BadArchive, OSError.
        """
        has = isolation.CONTAINER if self.link.spec.get("image") else isolation.of_job(job.user, job.writable)
        least = self.link.spec.get("least_isolation", "")
        if not isolation.isolates(has, least):
            raise HostFault(f"the project requires the isolation {least!r}, and this host has {has!r} now")
        os.makedirs(job.run_dir, exist_ok=True)
        if job.switches_user:
            os.chown(job.run_dir, job.account.pw_uid, job.account.pw_gid, follow_symlinks=False)
            os.chmod(job.run_dir, 0o700)
        if job.writable is not None and not self.link.spec.get("image"):
            sandbox.make_tmp(job.run_dir)
        if self.link.spec["archive"]:
            self._unpack(job, self.link.spec["archive"]["sha256"])
        if self.link.spec.get("artifacts"):
            artifacts.make_folder(job.run_dir, self.link.spec["attempt"], job.account)

    def _unpack(self, job: Job, sha256: str) -> None:
        path = self.state.path("archive.tar.gz")
        try:
            self.link.retry(lambda: self.link.client.download("archive", path))
            with open(path, "rb") as file, among_files_of(job.account):
                unpack(file, sha256, job.run_dir)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _barrier(self) -> bool:
        """Wait until every node of the attempt has a runner, and its image; False if the job is to stop instead."""
        if self.link.spec.get("alone") and time.monotonic() - self.spec_at < SPEC_S and not self.link.nudged():
            return True
        while True:
            answer = self.link.retry(lambda: self.link.heartbeat("waiting"))
            if answer["action"] == "stop":
                self._finish(None, answer["reason"], "stopped before its commands were started")
                return False
            if answer["action"] == "go":
                # The other nodes' addresses may have been unknown before they started.
                self.link.spec.update(answer.get("nodes", {}))
                return True
            self.link.pause(float(answer["heartbeat_s"]))

    def _end_everything(self) -> None:
        """End what is left of the job, until it is confirmed gone. An engine that is away is waited for."""
        tree.end(self.job_id, self.group, self.uid)
        while not container.end(self.state.folder):
            with contextlib.suppress(Unreachable, Refused):
                self.link.heartbeat("stopping")
            self.link.pause(ENGINE_AGAIN_S)
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

    def _finish_commands(self, commands: Commands, status: int, reason: str | None, disk: DiskWatch) -> None:
        """The commands ended with this wait status; `reason` is why they were stopped, if they were."""
        code = os.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 else code
        ran_out = commands.ran_out_of_memory()
        if ran_out and reason in (None, OUT_OF_MEMORY):
            self._finish(code, OUT_OF_MEMORY, "", memory_mib=commands.memory_mib if ran_out == "limit" else None)
        elif reason == OUT_OF_DISK:
            self._finish(code, OUT_OF_DISK, "", disk=disk.over)
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
            self.link.pause(0.01)
        spool.close(self.spool)
        while self.link.retry(lambda: self.shipper.ship(final=True)):
            pass
        if self.samples is not None:
            self.samples.send_last()
        if self.task_lines is not None:
            self.task_lines.finish()
        more = self._send_artifacts()
        container.end(self.state.folder)  # it has ended; where the engine gives no answer, the host removes it later
        log = {"log_size": self.shipper.size(), "log_missing": self.shipper.missing()}
        self.link.retry(lambda: self.link.client.post("exit", self.end | log | more))
        self.group.remove()

    def _send_artifacts(self) -> dict[str, Any]:
        """Send what the commands left; what of it was left out is reported with the end."""
        if not (limits := self.link.spec.get("artifacts")) or not self.state.has("started"):
            return {}
        try:
            job = Job(self.link.spec, self.orders)
            account = job.account
        except (CannotStart, HostFault) as error:
            say(f"artifacts can't be sent: {error}")
            return {}
        left = artifacts.Artifacts(self.link, job.run_dir, account, limits).send()
        return {"artifacts": left} if left["number"] else {}

    def _on_term(self, *_: Any) -> None:
        """Running commands are ended only by the API; without them this runner may exit and be replaced."""
        if not self.has_child:
            os._exit(0)
        self.signalled = True
