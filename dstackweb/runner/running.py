"""A job's commands while they run: their limits, what is sent meanwhile, and their end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dstackweb.runner import output, spool, tree
from dstackweb.runner.client import BACKOFF_CAP_S, Refused, Unreachable, backoff
from dstackweb.runner.disk import DiskWatch
from dstackweb.runner.link import Link
from dstackweb.runner.output import Shipper
from dstackweb.runner.samples import Samples
from dstackweb.runner.state import say

if TYPE_CHECKING:
    from dstackweb.runner.child import Job, Processes
    from dstackweb.runner.contained import Contained
    from dstackweb.runner.tunnel import Tunnel

POLL_S = 0.2
OUT_OF_MEMORY, OUT_OF_DISK = "out_of_memory", "out_of_disk"
LEFTOVER_GRACE_S = 2.0
"""Time for background processes between TERM and KILL once the commands have ended."""


class CommandsRun:
    """The commands from start to end; `reason` is then why they were stopped, None if they ended by themselves."""

    def __init__(
        self,
        link: Link,
        commands: Processes | Contained,
        shipper: Shipper,
        disk: DiskWatch,
        samples: Samples | None,
        image_digest: str | None,
        job: Job,
    ) -> None:
        self.link, self.commands, self.shipper, self.disk, self.samples = link, commands, shipper, disk, samples
        self.image_digest = image_digest
        self.tunnel = self._open_tunnel(job)
        self.began = time.monotonic()
        self.reported_start = False
        self.kill_at: float | None = None
        """When to kill the processes, once signalled to end."""
        self.reason: str | None = None
        self.next_heartbeat = 0.0
        self.next_ship = 0.0
        self.failures = 0
        self.wanted = True
        """Whether the API still accepts this job."""
        self.may_wait = True
        """Whether output that a full disk has no room for is waited for; not once the job is to stop."""

    def until_it_ends(self) -> int:
        """Every POLL_S, check limits, communicate, and see whether the last process of the tree has ended.

        Then its output may still wait for a full disk. Returns the commands' wait status.
        """
        status: int | None = None
        while status is None or self.commands.processes() or self._output_waits():
            self._keep_limits()
            self._communicate()
            self.link.pause(min(POLL_S, max(0.0, self.next_heartbeat - time.monotonic())))
            ended = tree.reap()
            if ended and self.tunnel is not None:
                self.tunnel.note_ended(ended)
            if status is None and (status := self.commands.status(ended)) is not None and self.kill_at is None:
                self._stop(None, LEFTOVER_GRACE_S)
        if self.tunnel is not None:
            self.tunnel.stop()
        return status

    def _open_tunnel(self, job: Job) -> Tunnel | None:
        """The connection by which people reach the job, if it is for that."""
        if not self.link.spec.get("gateway"):
            return None
        from dstackweb.runner.exec_target import ExecTarget  # with asyncio, which other jobs do without
        from dstackweb.runner.tunnel import open_tunnel

        return open_tunnel(self.link, ExecTarget(job, self.commands.first, self.link.state.folder))

    def _output_waits(self) -> bool:
        path = self.shipper.spool
        return self.may_wait and not output.is_done(path) and not spool.has_room(path)

    def _keep_limits(self) -> None:
        spec, now = self.link.spec, time.monotonic()
        if spec["max_duration_s"] is not None and now - self.began > spec["max_duration_s"]:
            self._stop("max_duration_exceeded", spec["stop_duration_s"])
        if spec["lost_after_s"] is not None and now - self.link.contact > spec["lost_after_s"]:
            self._stop("instance_unreachable", spec["stop_duration_s"])
        if self.commands.ran_out_of_memory():
            # The kernel may have killed one process of many.
            self._stop(OUT_OF_MEMORY, 0)
        if self.disk.over is not None:
            self._stop(OUT_OF_DISK, 0)
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.commands.kill()

    def _stop(self, reason: str | None, grace_s: float) -> None:
        """Send TERM to the whole tree now, KILL after the grace. The first reason and the shortest grace apply."""
        kill_at = time.monotonic() + grace_s
        self.may_wait = self.may_wait and reason is None
        if self.kill_at is None:
            self.kill_at, self.reason = kill_at, reason
            tree.terminate(self.commands.processes() - self.commands.spared())
        self.kill_at = min(self.kill_at, kill_at)

    def _communicate(self) -> None:
        """Send what is due, unless the API was unreachable a moment ago."""
        now = time.monotonic()
        if self.link.nudged():
            self.next_heartbeat = self.next_ship = 0.0
        try:
            # The heartbeat comes first: failing to send output must not stop heartbeats.
            if now >= self.next_heartbeat:
                self._heartbeat()
            if now >= self.next_ship:
                while self.shipper.ship() and time.monotonic() - now < POLL_S:
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
        if self.samples is not None and self.failures == 0:
            self.samples.send()

    def _heartbeat(self) -> None:
        if self.reported_start:
            answer = self.link.heartbeat("running" if self.kill_at is None else "stopping")
        else:
            answer = self.link.report_start(self.image_digest)
            self.reported_start = True
        self.next_heartbeat = self.link.next_heartbeat()
        if answer["action"] == "stop":
            self._stop(answer["reason"], float(answer["grace_s"]))
