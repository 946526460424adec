"""When a policy would have stopped a job, from the samples of its GPUs. Pure; one pass over the samples.

It reaches the same verdicts as the watcher: judged at the time of each sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from dstackweb.gpus.policy.window import MAX_GAP, Stretch, VerdictKind, Window, judge


@dataclass(frozen=True, slots=True)
class Stop:
    """When the job would have been stopped, when its low stretch began, and its low GPU (None with the scope `all`)."""

    at_ms: int
    low_since_ms: int
    gpu: int | None


def first_stop(
    gpus: Sequence[Sequence[tuple[int, int]]], minimum: int, window: Window, interval_ms: int
) -> Stop | None:
    """The first moment at which the verdict is *stop*; None where it never is.

    `gpus` has for each GPU of the job its `(at_ms, utilization)`, oldest first.
    """
    moments: Iterable[tuple[int, tuple[tuple[int, int, int], ...]]]
    if len(gpus) == 1:
        moments = ((at_ms, ((at_ms, 0, used),)) for at_ms, used in gpus[0])
    else:
        merged = sorted((at_ms, place, used) for place, samples in enumerate(gpus) for at_ms, used in samples)
        moments = ((at_ms, tuple(group)) for at_ms, group in groupby(merged, itemgetter(0)))
    gap_ms, window_ms, from_ms = MAX_GAP * interval_ms, window.window_ms, window.from_ms
    since: list[int | None] = [None] * len(gpus)
    last: list[int | None] = [None] * len(gpus)
    for at_ms, samples in moments:
        for _at_ms, place, used in samples:
            before = last[place]
            if used >= minimum:
                since[place] = None
            elif since[place] is None or before is None or at_ms - before > gap_ms:
                since[place] = at_ms
            last[place] = at_ms
        # Most samples come too early for any GPU: judge only where the verdict can be *stop*.
        began = min((low for low in since if low is not None), default=None)
        if began is None or at_ms < max(began - interval_ms, from_ms) + window_ms:
            continue
        verdict = judge(window, [Stretch(*of_gpu) for of_gpu in zip(since, last, strict=True)], at_ms, interval_ms)
        if verdict.kind is VerdictKind.STOP and verdict.low_since_ms is not None:
            return Stop(at_ms, verdict.low_since_ms, verdict.gpu)
    return None
