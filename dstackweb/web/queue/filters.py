"""What a reader looks for in a queue, in the address of the page, and the reasons that many of its runs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.http import QueryDict

from dstackweb.runs import selectors
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import Queue
from dstackweb.runs.queue.ordering import PRIORITY_MAX
from dstackweb.runs.queue.search import QueueSearch, ShapeCount, needs_of, shape_counts
from dstackweb.web.common.pages import whole_number
from dstackweb.web.runs.rows import needs
from dstackweb.wording import waiting

MANY = 3
"""Runs that share a reason before it is said once above the list."""
GROUPS = 6
SHAPES = 200
"""Shapes whose needs are read for the groups, the most frequent first."""


class Filters(NamedTuple):
    """The fields of the address; empty says nothing. `reason` is a WaitReason, `needs` as the page words it."""

    text: str = ""
    user: str = ""
    needs: str = ""
    reason: str = ""
    priority: int | None = None

    @classmethod
    def read(cls, query: QueryDict) -> Filters:
        lowest = query.get("priority", "")
        return cls(
            text=query.get("q", "").strip()[:100],
            user=query.get("member", "").strip(),
            needs=query.get("needs", "").strip(),
            reason=query.get("reason", ""),
            priority=min(whole_number(lowest), PRIORITY_MAX) if lowest.strip() else None,
        )

    @property
    def query(self) -> dict[str, str | int]:
        """The address's fields, without the empty ones."""
        fields = {
            "q": self.text,
            "member": self.user,
            "needs": self.needs,
            "reason": self.reason,
            "priority": self.priority,
        }
        return {name: value for name, value in fields.items() if value not in ("", None)}

    def address(self, **more: str | int) -> str:
        """`?…` with these filters and `more`."""
        return "?" + urlencode({**self.query, **more})


class Group(NamedTuple):
    """So many waiting runs share a reason; `text` says it, `address` shows only them, `chosen` if it does now."""

    text: str
    address: str
    chosen: bool


class Front(NamedTuple):
    """The shapes that wait at the front of a queue, with what their runs need and why they wait."""

    counts: Sequence[ShapeCount]
    needs: Mapping[str, str]
    reasons: Mapping[str, tuple[str, dict[str, Any]]]

    @classmethod
    def read(cls, queue: Queue, every: bool) -> Front:
        """`every` also reads what runs of rare shapes need, and those that wait for something else."""
        counts = shape_counts(queue)
        reasons = selectors.wait_reasons(queue, {count.shape for count in counts}) if counts else {}
        about = [count for count in counts if reasons[count.shape][0] in waiting.ABOUT_NEEDS][:SHAPES]
        wanted = {count.run_id: count.shape for count in (counts if every else about)}
        specs = needs_of(wanted) if wanted else {}
        return cls(counts, {wanted[run_id]: needs(spec) for run_id, spec in specs.items()}, reasons)

    def search(self, filters: Filters) -> QueueSearch:
        """The filters as a search of runs."""
        shapes = None
        if filters.needs or filters.reason:
            shapes = frozenset(
                count.shape
                for count in self.counts
                if (not filters.reason or self.reasons[count.shape][0] == filters.reason)
                and (not filters.needs or self.needs.get(count.shape) == filters.needs)
            )
        return QueueSearch(filters.text, filters.user, filters.priority, shapes)

    def groups(self, filters: Filters) -> list[Group]:
        """The reasons that at least MANY runs share, the most frequent first."""
        sums: dict[tuple[str, str], int] = {}
        for shape, runs, _run_id in self.counts:
            reason = self.reasons[shape][0]
            key = reason, self.needs.get(shape, "") if reason in waiting.ABOUT_NEEDS else ""
            if reason not in (WaitReason.STARTING, WaitReason.QUEUE_PAUSED):
                sums[key] = sums.get(key, 0) + runs
        shared = sorted(((runs, *key) for key, runs in sums.items() if runs >= MANY), reverse=True)[:GROUPS]
        return [
            Group(
                waiting.shared(reason, wanted, runs),
                Filters(needs=wanted, reason=reason).address(),
                (filters.reason, filters.needs) == (reason, wanted),
            )
            for runs, reason, wanted in shared
        ]
