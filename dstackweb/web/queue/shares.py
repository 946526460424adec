"""The members' shares of a queue with fair share, as bars."""

from __future__ import annotations

from typing import NamedTuple

from dstackweb.runs.models import Queue
from dstackweb.runs.queue import member_shares
from dstackweb.runs.queue.fair_share import HOUR_MS
from dstackweb.wording import fair_share as words
from dstackweb.wording.units import duration


class ShareBar(NamedTuple):
    """A member's load in GPU-hours: what was used, is held and is queued, with where each begins."""

    user: str
    detail: str
    used: float
    held: float
    queued_from: float
    queued: float
    penalty: str


class ShareBars(NamedTuple):
    """The bars of a queue, the longest first, and of how many `more` members none is shown.

    `most` and `median` are in GPU-hours, too.
    """

    bars: list[ShareBar]
    more: int
    most: float
    median: float
    detail: str


def share_bars(queue: Queue, most: int | None = None) -> ShareBars | None:
    """The bars of the members with the highest loads, or of all. None where fair share is off, or no one has a load."""
    shares = member_shares.shares(queue)
    if not shares:
        return None
    bars = []
    for share in shares[:most]:
        used, held, queued = round(share.load.used_ms / HOUR_MS, 2), share.load.held_gpus, share.load.queued_gpus
        behind = duration(share.penalty.seconds) if share.penalty.seconds else ""
        detail = words.load(used, held, queued)
        bars.append(ShareBar(share.user, detail, used, held, used + held, queued, behind))
    median = shares[0].penalty.median_ms / HOUR_MS
    longest = max(shares[0].load.total_ms / HOUR_MS, median)
    return ShareBars(
        bars, len(shares) - len(bars), longest, round(median, 2),
        words.settings(queue.max_penalty_s, queue.fair_share_half_life_days, median),
    )  # fmt: skip
