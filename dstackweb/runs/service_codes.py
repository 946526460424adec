"""Codes of services: their states, why a check failed, and why the gateway answers in their place."""

from __future__ import annotations

from enum import StrEnum


class ServiceState(StrEnum):
    """How a running service is."""

    STARTING = "starting"
    """No check has succeeded yet."""
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"
    """It is not checked now, since its runner or the gateway is away. Never stored."""


class CheckFailure(StrEnum):
    """Why a check of a service failed."""

    REFUSED = "refused"
    """Nothing listens on its port."""
    FOREIGN = "foreign"
    """What listens there is a process of another user of the machine."""
    TIMEOUT = "timeout"
    """No answer within `timeout_s`."""
    STATUS = "status"
    """An answer with this `status`."""
    NO_HTTP = "no_http"
    """The connection was closed before an answer, or the answer is not HTTP."""
    UNREACHABLE = "unreachable"
    """Its runner could not connect to it."""


class GatewayProblem(StrEnum):
    """Why the gateway answers a request itself, instead of the job that it is for."""

    NO_RUN = "no_run"
    """The host name leads to no run of theirs."""
    SIGN_IN = "sign_in"
    BAD_TOKEN = "bad_token"  # noqa: S105  # a code
    TOO_MANY_FAILURES = "too_many_failures"
    """Wrong tokens from this address."""
    NO_ACCESS = "no_access"
    TOKENS_NOT_TAKEN = "tokens_not_taken"
    """API tokens open services, not the pages of dev environments."""
    OTHER_ORIGIN = "other_origin"
    NOT_STARTED = "not_started"
    ENDING = "ending"
    ENDED = "ended"
    DISCONNECTED = "disconnected"
    """It runs, and its runner is not connected."""
    NOT_LISTENING = "not_listening"
    OTHER_USERS_PORT = "other_users_port"
    UNREACHABLE = "unreachable"
    BUSY = "busy"
    """Too many requests at once."""
    NO_ANSWER = "no_answer"
    """The job closed the connection before it answered."""
