"""Whether a job's GPUs stayed below a minimum over a whole window, and what follows. Pure; the same work for each
sample.

A job is stopped when one of its GPUs (with the scope `all`, every one) has an unbroken stretch of samples below the
minimum that covers the window: from the first of them to the newest it is as long as the window, without a gap over
`MAX_GAP` intervals, and the newest is no older than that. Nothing before the first counts: a sample is the mean of the
time before it, in part of which the GPU may have been busy. The window begins after the job's start and warm-up. Equal
to the minimum counts as used.

Times are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dstackweb.spec.codes import UtilizationScope

MAX_GAP = 3
"""Intervals between two samples, or since the newest, beyond which the time between is unknown."""
JITTER = 0.1
"""Intervals by which the newest sample may miss the window's end: other machines' samples are dated on arrival, so two
that were taken an interval apart may be a little nearer, and without this a run would stop one sample later."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A GPU's low stretch: its first sample (None: the newest sample was not low), and the newest sample's time."""

    since_ms: int | None = None
    last_ms: int | None = None


NOTHING = Stretch()


def fold(stretch: Stretch, at_ms: int, utilization: int, minimum: int, interval_ms: int) -> Stretch:
    """The stretch after one more sample. Late or repeated samples count only where they show use."""
    low, last_ms = utilization < minimum, stretch.last_ms
    if last_ms is not None and at_ms <= last_ms:
        if low or stretch.since_ms is None or at_ms < stretch.since_ms:
            return stretch
        # Of the samples after it only the newest is known to be low.
        return Stretch(last_ms if at_ms < last_ms else None, last_ms)
    if not low:
        return Stretch(None, at_ms)
    unbroken = last_ms is not None and at_ms - last_ms <= MAX_GAP * interval_ms
    return Stretch(stretch.since_ms if unbroken and stretch.since_ms is not None else at_ms, at_ms)


def replay(samples: Iterable[tuple[int, int]], minimum: int, interval_ms: int) -> Stretch:
    """The stretch after samples `(at_ms, utilization)` in this order."""
    stretch = NOTHING
    for at_ms, utilization in samples:
        stretch = fold(stretch, at_ms, utilization, minimum, interval_ms)
    return stretch


@dataclass(frozen=True, slots=True)
class Window:
    """For how long which GPUs must be low, and from when the job is judged."""

    window_ms: int
    scope: UtilizationScope
    from_ms: int


class VerdictKind(StrEnum):
    KEEP = "keep"
    UNKNOWN = "unknown"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """`low_since_ms` is the start of the job's low stretch, None while it isn't low or that is unknown. `gpu` is the
    index of the low GPU among the job's, None with the scope `all`. From `stops_ms` on a low sample stops the job."""

    kind: VerdictKind
    low_since_ms: int | None = None
    stops_ms: int | None = None
    gpu: int | None = None


USED, UNKNOWN = PolicyVerdict(VerdictKind.KEEP), PolicyVerdict(VerdictKind.UNKNOWN)


def judge(window: Window, gpus: Sequence[Stretch], now_ms: int, interval_ms: int) -> PolicyVerdict:
    """The verdict on a job with these GPUs at a moment; unknown without any."""
    fresh = [stretch.last_ms is not None and abs(now_ms - stretch.last_ms) <= MAX_GAP * interval_ms for stretch in gpus]
    low = [
        (stretch.since_ms, stretch.last_ms, place)
        for place, stretch in enumerate(gpus)
        if fresh[place] and stretch.since_ms is not None and stretch.last_ms is not None
    ]

    def of_low(since_ms: int, last_ms: int, gpu: int | None) -> PolicyVerdict:
        stops_ms = max(since_ms, window.from_ms) + window.window_ms
        is_over = now_ms >= stops_ms and last_ms >= stops_ms - JITTER * interval_ms
        return PolicyVerdict(VerdictKind.STOP if is_over else VerdictKind.KEEP, since_ms, stops_ms, gpu)

    if window.scope == UtilizationScope.ALL:
        if len(low) < sum(fresh):
            return USED
        if not low or not all(fresh):
            return UNKNOWN
        return of_low(max(since_ms for since_ms, _, _ in low), min(last_ms for _, last_ms, _ in low), None)
    if not low:
        return USED if fresh and all(fresh) else UNKNOWN
    # The longest stretch; but where its GPU failed to answer at the window's end, another may have reached it.
    verdicts = [of_low(*stretch) for stretch in low]
    return min(verdicts, key=lambda verdict: (verdict.kind != VerdictKind.STOP, verdict.low_since_ms))


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
    noticed_ms: int | None = None
    acted_ms: int | None = None
    reports_only: bool = False
    paused_until_ms: int | None = None


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
