"""When users are warned before a policy stops a run. Pure. Moments and spans are milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dstackweb.gpus.policy.window import PolicyVerdict, VerdictKind

MINUTE = 60_000
NO_NOTICE_BELOW = 4 * MINUTE
"""Shorter windows leave no time to act on a notice: they only get the badge."""
NOTICE_LEAST, NOTICE_MOST = 2 * MINUTE, 10 * MINUTE


@dataclass(frozen=True, slots=True)
class StopWarning:
    """`stops_ms` is when the run will be stopped if it stays low: the verdict's time, or the end of its exemption. All
    unset while the job isn't low or that is unknown."""

    badge: bool = False
    notice: bool = False
    stops_ms: int | None = None


def notice_before(window_ms: int) -> int | None:
    """How long before the stop the notice is due; None for windows without a notice."""
    if window_ms < NO_NOTICE_BELOW:
        return None
    return min(max(window_ms // 4, NOTICE_LEAST), NOTICE_MOST)


def stop_warning(verdict: PolicyVerdict, window_ms: int, paused_until_ms: int | None, now_ms: int) -> StopWarning:
    """Whether badge and notice are due: the badge from half the window on, the notice when little time remains."""
    if verdict.stops_ms is None:
        return StopWarning()
    stops_ms = max(verdict.stops_ms, paused_until_ms or 0)
    before = notice_before(window_ms)
    return StopWarning(
        badge=now_ms >= verdict.stops_ms - window_ms // 2,
        notice=before is not None and now_ms >= stops_ms - before,
        stops_ms=stops_ms,
    )


class PolicyAction(StrEnum):
    """What to do about a job now."""

    NOTHING = "nothing"
    NOTICE = "notice"
    STOP = "stop"
    WOULD_STOP = "would_stop"


@dataclass(frozen=True, slots=True)
class Enforcement:
    """What decides on the next action besides the verdict.

    `noticed_ms` and `acted_ms` are the starts of the low stretches that were last noticed, and last stopped or reported
    as one that would have stopped the run. With `reports_only` nothing is stopped.
    """

    window_ms: int
    reports_only: bool
    noticed_ms: int | None
    acted_ms: int | None
    paused_until_ms: int | None


def next_action(enforcement: Enforcement, verdict: PolicyVerdict, now_ms: int) -> PolicyAction:
    """What follows from a verdict: each notice and each "would have" once per low stretch, and no stop while the run is
    exempt."""
    if verdict.low_since_ms is None:
        return PolicyAction.NOTHING
    paused = enforcement.paused_until_ms is not None and now_ms < enforcement.paused_until_ms
    if verdict.kind == VerdictKind.STOP and not paused:
        if not enforcement.reports_only:
            return PolicyAction.STOP
        return PolicyAction.NOTHING if enforcement.acted_ms == verdict.low_since_ms else PolicyAction.WOULD_STOP
    if enforcement.reports_only or enforcement.noticed_ms == verdict.low_since_ms:
        return PolicyAction.NOTHING
    warning = stop_warning(verdict, enforcement.window_ms, enforcement.paused_until_ms, now_ms)
    return PolicyAction.NOTICE if warning.notice else PolicyAction.NOTHING
