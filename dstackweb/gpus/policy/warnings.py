"""How people are warned before a policy stops a run: pure. Moments and spans are milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dstackweb.gpus.policy.window import Kind, Verdict

MINUTE = 60_000
NO_NOTICE_BELOW = 4 * MINUTE
"""Windows shorter than this leave no time to act on a notice: they have the badge only."""
NOTICE_LEAST, NOTICE_MOST = 2 * MINUTE, 10 * MINUTE


@dataclass(frozen=True, slots=True)
class Warned:
    """`stops_ms` is from when on the run is stopped, if it goes on like this: the verdict's, or when it is no longer
    kept. None of it while the job isn't low, or it is unknown whether it is."""

    badge: bool = False
    notice: bool = False
    stops_ms: int | None = None


def notice_before(window_ms: int) -> int | None:
    """How long before the stop people are told; None: not at all."""
    if window_ms < NO_NOTICE_BELOW:
        return None
    return min(max(window_ms // 4, NOTICE_LEAST), NOTICE_MOST)


def warned(verdict: Verdict, window_ms: int, paused_until_ms: int | None, now_ms: int) -> Warned:
    """What is due of badge and notice: the badge from half the window on, the notice when little time remains."""
    if verdict.stops_ms is None:
        return Warned()
    stops_ms = max(verdict.stops_ms, paused_until_ms or 0)
    before = notice_before(window_ms)
    return Warned(
        badge=now_ms >= verdict.stops_ms - window_ms // 2,
        notice=before is not None and now_ms >= stops_ms - before,
        stops_ms=stops_ms,
    )


class Act(StrEnum):
    """What is to be done about a job now."""

    NOTHING = "nothing"
    NOTICE = "notice"
    STOP = "stop"
    WOULD_STOP = "would_stop"


@dataclass(frozen=True, slots=True)
class Case:
    """How a job is judged and treated. `noticed_ms` and `acted_ms` are the beginnings of the low stretches that people
    were told of, and that were told as one that would have stopped it; `only_tells`: nothing is stopped."""

    window_ms: int
    only_tells: bool
    noticed_ms: int | None
    acted_ms: int | None
    paused_until_ms: int | None


def due(case: Case, verdict: Verdict, now_ms: int) -> Act:
    """What follows from a verdict: each notice and each "would have" once in a low stretch, and nothing that stops a
    job while people keep it."""
    if verdict.low_since_ms is None:
        return Act.NOTHING
    paused = case.paused_until_ms is not None and now_ms < case.paused_until_ms
    if verdict.kind == Kind.STOP and not paused:
        if not case.only_tells:
            return Act.STOP
        return Act.NOTHING if case.acted_ms == verdict.low_since_ms else Act.WOULD_STOP
    if case.only_tells or case.noticed_ms == verdict.low_since_ms:
        return Act.NOTHING
    return Act.NOTICE if warned(verdict, case.window_ms, case.paused_until_ms, now_ms).notice else Act.NOTHING
