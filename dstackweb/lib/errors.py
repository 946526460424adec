"""The errors that services raise and that the API, the web pages and the CLI word for people.

Each carries the HTTP status it is answered with, so a handler renders any of them in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NotRequired, TypedDict


class FieldError(TypedDict):
    """One thing wrong in the input: where it is (`loc`, and the line of the file if known) and what was expected.

    `col` is the column (from 1) where the text can't even be read.
    """

    loc: list[str | int]
    line: int | None
    col: NotRequired[int]
    msg: str


class DomainError(Exception):
    """A request that can't be done, told in one sentence (`detail`).

    `extra` holds further members of the JSON answer, next to `detail`.
    """

    status: ClassVar[int] = 400

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra: dict[str, Any] = extra


class NotFound(DomainError):
    """It isn't there, or the caller may not know that it is."""

    status = 404


class Forbidden(DomainError):
    """The caller may see it, but their role doesn't allow this."""

    status = 403


class Conflict(DomainError):
    """The current state doesn't allow this: a name is taken, a run has already ended."""

    status = 409


class Stale(DomainError):
    """Somebody else changed it since the caller read it (`If-Match`)."""

    status = 412


class TooLarge(DomainError):
    """The input is over a size limit."""

    status = 413


class Invalid(DomainError):
    """The input doesn't validate. `errors` is never empty, and is what the form, the API and the CLI show."""

    status = 422

    def __init__(self, detail: str, errors: Sequence[FieldError] = (), **extra: Any) -> None:
        self.errors: list[FieldError] = list(errors) or [{"loc": [], "line": None, "msg": detail}]
        super().__init__(detail, errors=self.errors, **extra)

    @classmethod
    def at(cls, *loc: str | int, msg: str, line: int | None = None) -> Invalid:
        """One error at one place: `Invalid.at("profile", msg="no profile is called nightly")`."""
        return cls(msg, [{"loc": list(loc), "line": line, "msg": msg}])


class TooEarly(DomainError):
    """It will be allowed soon: something that has to come first is under way."""

    status = 425


class TooMany(DomainError):
    """Asked too often; `retry_after` seconds from now it may work."""

    status = 429

    def __init__(self, detail: str, retry_after: float, **extra: Any) -> None:
        super().__init__(detail, **extra)
        self.retry_after = retry_after
