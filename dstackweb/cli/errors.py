"""Expected errors, shown on stderr in a few lines: what happened, what is safe, what to do."""

from __future__ import annotations

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 1
UNREACHABLE = 3


class ChangeInterrupted(KeyboardInterrupt):
    """Ctrl-C during a request that changes something: the change may have been made."""


class CliError(Exception):
    """An expected error: one sentence, `notes` (what is safe, what to do), and the exit code."""

    code = FAILED

    def __init__(self, message: str, *notes: str) -> None:
        super().__init__(message)
        self.message = message
        self.notes = notes


class UsageError(CliError):
    """The command line, or a setting in the environment, is wrong."""

    code = 2


class Unreachable(CliError):
    """No answer from the server: connection refused, timed out or dropped."""

    code = UNREACHABLE


class ApiError(CliError):
    """The server answered with an error. `status` is the HTTP status, `body` the JSON of the answer."""

    def __init__(self, message: str, *notes: str, status: int, body: dict[str, object] | None = None) -> None:
        super().__init__(message, *notes)
        self.status = status
        self.body = body or {}


class TryLater(ApiError):
    """A 5xx or a 429: the same request may succeed later."""


OUTAGE = (Unreachable, TryLater)
"""What passes by itself: commands that follow something go on through it."""
