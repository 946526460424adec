"""Whether a host fails whatever it executes: a missing shared folder, a broken library. Pure."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

NOT_EXECUTED = (126, 127)
"""Exit codes of shells and containers for a command that can't be executed, or is not found."""
AT_ONCE = dt.timedelta(seconds=5)
WINDOW = dt.timedelta(minutes=1)
RUNS = 3


@dataclass(frozen=True)
class Execution:
    """One node's commands on a host (None: a cloud instance or a cluster), from their start to their end, if any."""

    run: int
    user: int
    host: int | None
    started_at: dt.datetime
    ended_at: dt.datetime | None = None
    exit_code: int | None = None

    @property
    def failed_at_once(self) -> bool:
        if self.ended_at is None or self.exit_code not in NOT_EXECUTED:
            return False
        return self.ended_at - self.started_at <= AT_ONCE


def executes_nothing(host: int, executions: Iterable[Execution], now: dt.datetime) -> bool:
    """Decide whether a host, and not what people run there, makes commands fail at once.

    So it is where in the last minute that happened to three runs of two members, or to three of one member whose runs
    work elsewhere in that minute.
    """
    lately = [execution for execution in executions if execution.started_at > now - WINDOW]
    failed: defaultdict[int, set[int]] = defaultdict(set)
    for execution in lately:
        if execution.host == host and execution.failed_at_once:
            failed[execution.user].add(execution.run)
    if sum(map(len, failed.values())) < RUNS:
        return False
    works_elsewhere = {one.user for one in lately if one.host != host and not one.failed_at_once}
    return len(failed) > 1 or not works_elsewhere.isdisjoint(failed)
