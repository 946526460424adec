"""When more tasks of a prefix fail than before: decided from its counters and a few samples of them. Pure.

A sample has the counts before the first change of its half minute, so what happened since lies in the time since then.
Nothing is decided while nothing is reported, and nothing from a change of which it is not known when it happened.
"""

from __future__ import annotations

import json
from typing import NamedTuple

WINDOW_MS = 5 * 60_000
POINTS = 20
"""Percentage points by which the share of failures rises."""
ENDED_MIN = 50
"""A share of fewer ended tasks says nothing."""
SPACING_MS = 30_000
"""Between samples, of which a window has up to ten."""


class Counts(NamedTuple):
    """Tasks of a prefix that were done or failed, and those that failed."""

    ended: int
    failed: int


class Rise(NamedTuple):
    """A share of failures that rose: percent before, and percent of the `ended` tasks of which `failed` have failed.

    Both shares are of the tasks that ended within a window, or of all of the prefix where these are fewer than
    ENDED_MIN.
    """

    was: int
    now: int
    failed: int
    ended: int


class Watch(NamedTuple):
    """Samples of two windows as (milliseconds, ended, failed), the oldest first, and when a rise was last seen."""

    samples: tuple[tuple[int, int, int], ...] = ()
    risen_ms: int = 0

    @classmethod
    def parse(cls, text: str) -> Watch:
        """Read what `text` wrote; {} is the watch of a new prefix."""
        stored = json.loads(text)
        samples = [(at_ms, ended, failed) for at_ms, ended, failed in stored.get("samples", ())]
        return cls(tuple(samples), stored.get("risen_ms", 0))

    @property
    def text(self) -> str:
        return json.dumps({"samples": self.samples, "risen_ms": self.risen_ms})


def advance(watch: Watch, before: Counts, after: Counts, now_ms: int, *, is_recent: bool) -> tuple[Watch, Rise | None]:
    """Take a change of counts into the watch, and return the rise that is to be told.

    A rise is told once, and again when none was seen for a whole window. `is_recent`: whether the change is known to
    have happened within the window; otherwise the watch starts anew behind it.
    """
    if not is_recent:
        return watch._replace(samples=()), None
    samples = [sample for sample in watch.samples if sample[0] >= now_ms - 2 * WINDOW_MS]
    if not samples or now_ms - samples[-1][0] >= SPACING_MS:
        samples.append((now_ms, *before))
    rises = []
    for at_ms, *then in samples:
        if at_ms >= now_ms - WINDOW_MS:
            earlier = next(counts for since_ms, *counts in samples if since_ms >= at_ms - WINDOW_MS)
            rises.append(_rise(Counts(*earlier), Counts(*then), after))
    found = [rise for rise in rises if rise is not None]
    if not found:
        return watch._replace(samples=tuple(samples)), None
    is_new = now_ms - watch.risen_ms > WINDOW_MS
    return Watch(tuple(samples), now_ms), max(found, key=lambda rise: rise.now - rise.was) if is_new else None


def _rise(earlier: Counts, then: Counts, now: Counts) -> Rise | None:
    """The rise from `then` to now; None for less than POINTS. Before the first ended task the share is 0.

    `earlier` is a window before `then`.
    """
    before, after = then, now
    newest, former = (Counts(b.ended - a.ended, b.failed - a.failed) for a, b in ((then, now), (earlier, then)))
    if newest.ended >= ENDED_MIN:
        before, after = former if former.ended >= ENDED_MIN else then, newest
    ended = max(before.ended, 1)
    points = 100 * (after.failed * ended - before.failed * after.ended)  # of ended × after.ended tasks
    if after.ended < ENDED_MIN or points < POINTS * ended * after.ended:
        return None
    return Rise(round(100 * before.failed / ended), round(100 * after.failed / after.ended), after.failed, after.ended)
