"""The errors that services raise, each with an HTTP status, so that one handler renders all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NotRequired, TypedDict


class FieldError(TypedDict):
    """An error in the input: its place (`loc`, and the line of the file if known) and what was expected.

    `col` is the column (from 1) of a syntax error.
    """

    loc: list[str | int]
    line: int | None
    col: NotRequired[int]
    msg: str


class DomainError(Exception):
    """A request that can't be done; `detail` says why.

    `extra` has more members for the JSON answer.
    """

    status: ClassVar[int] = 400

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra: dict[str, Any] = extra


class NotFound(DomainError):
    """It does not exist, or the user may not know that it does."""

    status = 404


class Forbidden(DomainError):
    """The user may see it, but their role doesn't allow this."""

    status = 403


class Conflict(DomainError):
    """The current state doesn't allow this: a name is taken, a run has ended."""

    status = 409


class Gone(DomainError):
    """It was there, and no longer is: it was removed, or its bytes are lost."""

    status = 410


class Stale(DomainError):
    """It was changed since the caller read it (`If-Match`)."""

    status = 412


class TooLarge(DomainError):
    """The input exceeds a size limit."""

    status = 413


class Invalid(DomainError):
    """The input is invalid. `errors` is never empty; forms, the API and the CLI show it."""

    status = 422

    def __init__(self, detail: str, errors: Sequence[FieldError] = (), **extra: Any) -> None:
        self.errors: list[FieldError] = list(errors) or [{"loc": [], "line": None, "msg": detail}]
        super().__init__(detail, errors=self.errors, **extra)

    @classmethod
    def at(cls, *loc: str | int, msg: str, line: int | None = None) -> Invalid:
        """One error at one place: `Invalid.at("profile", msg="there is no profile nightly")`."""
        return cls(msg, [{"loc": list(loc), "line": line, "msg": msg}])


class TooEarly(DomainError):
    """It will be possible soon: another step is still in progress."""

    status = 425


class TooMany(DomainError):
    """Too many requests; try again after `retry_after` seconds."""

    status = 429

    def __init__(self, detail: str, retry_after: float, **extra: Any) -> None:
        super().__init__(detail, **extra)
        self.retry_after = retry_after
