"""Expected faults, told on stderr in a few lines: what happened, what is safe, what to do."""

from __future__ import annotations

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

FAILED = 1
UNREACHABLE = 3


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while the server was asked for a change, which may have been made."""


class CliError(Exception):
    """An expected fault: one sentence, then `notes` (what is safe, what to do), and the exit code."""

    code = FAILED

    def __init__(self, message: str, *notes: str) -> None:
        super().__init__(message)
        self.message = message
        self.notes = notes


class UsageError(CliError):
    """The command line, or the settings in the environment, can't be used as they are."""

    code = 2


class Unreachable(CliError):
    """The server could not be asked: refused, timed out, or the answer was lost."""

    code = UNREACHABLE


class Refused(CliError):
    """The server answered, with an error. `status` is the HTTP status, `body` the JSON of the answer."""

    def __init__(self, message: str, *notes: str, status: int, body: dict[str, object] | None = None) -> None:
        super().__init__(message, *notes)
        self.status = status
        self.body = body or {}


class TryLater(Refused):
    """A 5xx or a 429: the request was in order, the server was not ready for it. It may work later."""
