"""Whether a job goes on, and how it ended. Pure: time is an argument, in seconds of one monotonic clock."""

from __future__ import annotations

import signal
from typing import NamedTuple

LEFTOVERS_WAIT_S, LEFTOVERS_GRACE_S = 1.0, 5.0
"""What the commands left behind may take to end by itself, as `tee` at the end of its input does; then, after TERM."""
KILL_EVERY_S = 0.1

DONE = "done_by_runner"
FAILED = "container_exited_with_error"
NO_CONTAINER = "creating_container_error"
RUNNER_ERROR = "executor_error"
LOST = "instance_unreachable"
TOO_LONG = "max_duration_exceeded"
UNWANTED = "terminated_by_server"


class End(NamedTuple):
    """How a job ended, in the API's words. `log_size` is the whole length of its stream in bytes."""

    exit_code: int | None
    reason: str
    message: str = ""
    log_size: int = 0


class Course:
    """Follows one job from its start at `now`: what limits it, who wants it stopped, which signal is due.

    `heard` is when the API was last heard before.
    """

    def __init__(
        self,
        now: float,
        *,
        heard: float,
        max_duration_s: float | None,
        stop_duration_s: float,
        lost_after_s: float | None,
    ) -> None:
        self._max_duration_s, self._lost_after_s = max_duration_s, lost_after_s
        self._stop_duration_s = stop_duration_s
        self._began, self._heard = now, heard
        self._asked: tuple[str, str] | None = None
        self._end: End | None = None
        self._term_at: float | None = None
        self._kill_at = now
        self._told = False
        self._next_kill = now

    @property
    def ended(self) -> End | None:
        """How the commands ended; None while they run."""
        return self._end

    @property
    def stopping(self) -> bool:
        """Whether the job was asked to end, rather than ending by itself."""
        return self._asked is not None

    def heard(self, now: float) -> None:
        """The API answered a heartbeat that was sent at `now`."""
        self._heard = max(self._heard, now)

    def stop(self, now: float, grace_s: float | None, reason: str, message: str = "") -> None:
        """Have it end: SIGTERM now, SIGKILL after the grace (None: the job's own). A later stop only hastens it."""
        self._end_by(now, now + (self._stop_duration_s if grace_s is None else grace_s))
        if self._asked is None:
            self._asked = (reason, message)

    def shell_ended(self, now: float, status: int) -> None:
        """The commands are over, with this wait status: what they left behind is to go too."""
        code = exit_code(status)
        self._end = natural_end(code) if self._asked is None else End(code, *self._asked)
        term_at = now + LEFTOVERS_WAIT_S
        if self._term_at is None:
            self._end_by(term_at, term_at + min(self._stop_duration_s, LEFTOVERS_GRACE_S))

    def signal_due(self, now: float) -> int | None:
        """The signal that the whole tree must get now, if any."""
        if self._asked is None and self._end is None:
            self._keep_limits(now)
        if self._term_at is None or now < self._term_at:
            return None
        if now >= self._kill_at:
            if now < self._next_kill:
                return None
            self._next_kill = now + KILL_EVERY_S
            return signal.SIGKILL
        if not self._told:
            self._told = True
            return signal.SIGTERM
        return None

    def _end_by(self, term_at: float, kill_at: float) -> None:
        if self._term_at is None:
            self._term_at, self._kill_at = term_at, kill_at
        self._term_at, self._kill_at = min(self._term_at, term_at), min(self._kill_at, kill_at)

    def _keep_limits(self, now: float) -> None:
        if self._max_duration_s is not None and now - self._began >= self._max_duration_s:
            self.stop(now, None, TOO_LONG, f"it ran for its max_duration of {self._max_duration_s:g} s")
        elif self._lost_after_s is not None and now - self._heard >= self._lost_after_s:
            self.stop(now, None, LOST, f"stopped after {self._lost_after_s:g} s without contact to the server")


def exit_code(status: int) -> int:
    """A wait status as shells tell it: 128 and the signal's number for a death by signal."""
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8


def natural_end(code: int) -> End:
    """The end of commands that nobody stopped."""
    return End(code, DONE) if code == 0 else End(code, FAILED, _worded(code))


def _worded(code: int) -> str:
    if code == 127:
        return "command not found (exit code 127): see the log's last lines"
    if code == 126:
        return "a command can't be executed (exit code 126): see the log's last lines"
    if code > 128:
        try:
            name = signal.Signals(code - 128).name
        except ValueError:
            pass
        else:
            hint = ", often for want of memory" if name == "SIGKILL" else ""
            return f"killed by {name} (exit code {code}){hint}"
    return f"a command failed with exit code {code}"
