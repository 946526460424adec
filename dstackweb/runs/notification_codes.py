"""Codes of notifications: what people are notified of, and why one was not delivered."""

from __future__ import annotations

from enum import StrEnum


class NotificationEvent(StrEnum):
    """What people are notified of, if a rule of theirs says so."""

    RUN_STARTED = "run_started"
    """It has waited for long (`notifications.outbox.LONG_WAIT`)."""
    RUN_ENDED = "run_ended"
    RUN_FAILED = "run_failed"
    """It failed, or the server stopped it. Also a RUN_ENDED."""
    RUN_STOPS_SOON = "run_stops_soon"
    """Its utilization policy is about to stop it, or would have."""
    RUN_DISPLACED = "run_displaced"
    """It is stopped so that another run can start, and queued again."""
    RUN_KEPT = "run_kept"
    """Someone else has kept it from being stopped by its utilization policy."""
    TASKS_FAIL = "tasks_fail"
    """More of the tasks of a run fail than before."""
    BUDGET_SPENT = "budget_spent"
    """A project has spent 80 % of its monthly budget, or all of it."""
    QUEUE_STUCK = "queue_stuck"
    """Runs wait in a queue, and none of them can start before someone does something."""
    BACKEND_FAILS = "backend_fails"
    """A backend can't be asked for its offers."""
    API_LIMIT = "api_limit"
    """A cloud throttles an API, or calls of it come near its rate limit."""
    HOST_HELD_BACK = "host_held_back"
    """A host gets no more jobs, because starts fail there."""
    TEST = "test"
    """Someone tries a channel. No rule is about it."""


class QueueStuck(StrEnum):
    """`code` of QUEUE_STUCK."""

    PAUSED = "paused"
    IMPOSSIBLE = "impossible"
    """Nothing could provide what any of its runs needs, or each alone exceeds a limit."""


class DeliveryProblem(StrEnum):
    """Why a notification was not delivered to where it was sent."""

    PRIVATE_ADDRESS = "private_address"
    UNREACHABLE = "unreachable"
    NO_ANSWER = "no_answer"
    INTERRUPTED = "interrupted"
    """The worker that sent it ended before it could note the answer."""
    ANSWER = "answer"
    """The receiver answered with another status than 2xx."""
    GONE = "gone"
    """It answered 410, which turned the channel off."""
    NO_ACCESS = "no_access"
    """The account has been deactivated, or has left the project."""
    NO_ADDRESS = "no_address"
    MAIL_OFF = "mail_off"
    MAIL_REFUSED = "mail_refused"
    BAD_KEY = "bad_key"
