"""When a run with a schedule enters its queue. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from croniter import croniter


def next_time(crons: Sequence[str], after: dt.datetime) -> dt.datetime:
    """The earliest time strictly after `after` (UTC) at which one of the cron expressions comes round."""
    found: list[dt.datetime] = [croniter(cron, after).get_next(dt.datetime) for cron in crons]
    return min(found)
