"""What passes between one job's runner and the API: the claim, heartbeats, and calls repeated until answered."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from dstackweb.runner import relay
from dstackweb.runner.client import TIMEOUT_S, Client, Refused, Unreachable, backoff
from dstackweb.runner.state import StateDir, say

RELAY_AGAIN_S = 60.0
"""A relay that gave no answer is not asked again for this long."""


class Rejected(Exception):
    """The API no longer accepts this job, or not from this runner."""


class Link:
    """`spec` is the job as the API describes it, from the claim on. Signals end a pause."""

    def __init__(self, orders: dict[str, Any], state: StateDir) -> None:
        self.orders, self.state = orders, state
        self.job_id: str = orders["job"]
        self.client = self.new_client()
        self.spec: dict[str, Any] = {}
        self.heartbeats = 0
        self.heartbeat_s = 5.0
        self.relay_again = 0.0
        self.contact = time.monotonic()
        """When a heartbeat was last answered: only heartbeats show the API that the job has a runner."""
        self._nudged = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def new_client(self, timeout_s: float = TIMEOUT_S) -> Client:
        """A client for one thread."""
        return Client(
            self.orders["api"],
            f"jobs/{self.job_id}",
            self.orders["token"],
            self.state.nonce(),
            insecure=bool(self.orders.get("insecure")),
            timeout_s=timeout_s,
        )

    def listen(self) -> None:
        """Let signals end pauses from now on."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, self._on_nudge)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def claim(self) -> None:
        """Claim the job for this runner, and get its spec. Raises Rejected."""
        body = {"nonce": self.state.nonce(), "pid": os.getpid(), "host": socket.gethostname()}
        answer = self.retry(lambda: self.client.post("claim", body))
        self.heartbeat_s = float(answer["heartbeat_s"])
        self.spec = answer.get("spec") or self.retry(lambda: self.client.get("spec"))  # an older server's has none

    def heartbeat(self, phase: str) -> dict[str, Any]:
        self.heartbeats += 1
        answer = None if phase == "waiting" else self._by_relay()
        if answer is None:
            answer = self.client.post("heartbeat", {"beat": self.heartbeats, "phase": phase})
        return self._note(answer)

    def report_start(self, image_digest: str | None) -> dict[str, Any]:
        """Report that the commands were started, which is a heartbeat as well."""
        answer = self.client.post("started", {"image_digest": image_digest} if image_digest else {})
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

    def retry(self, call: Callable[[], Any]) -> Any:
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
