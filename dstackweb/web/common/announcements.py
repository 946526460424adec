"""Announcements for screen readers: what happened to the reader's own runs since the page last polled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dstackweb.runs.codes import RunEventKind
from dstackweb.runs.models import RunEvent
from dstackweb.runs.states import RunStatus
from dstackweb.web.common.pages import PageRequest
from dstackweb.wording import events as event_words

HEADER = "DW-Announced"
AT_MOST = 5
LOOK_BACK = 5000
"""Events searched at most; after a long absence only the newest are announced."""
KINDS = (
    *(status.value for status in RunStatus if status != RunStatus.SUBMITTED),
    RunEventKind.RETRY,
    RunEventKind.REQUEUED,
    RunEventKind.UTILIZATION_NOTICE,
)


class Announcements(NamedTuple):
    """`last` is the newest event there is; `lines` those that the reader does not know yet."""

    last: int
    lines: Sequence[str]


def announcements(request: PageRequest) -> Announcements:
    """What others or the scheduler did to the reader's runs in this project, and policy warnings."""
    last = RunEvent.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    since = request.headers.get(HEADER, "")
    if not request.htmx or not since.isdigit() or int(since) >= last:
        return Announcements(last, [])
    events = (
        RunEvent.objects.filter(pk__gt=max(int(since), last - LOOK_BACK), pk__lte=last, kind__in=KINDS)
        .filter(run__user=request.user, run__project=request.project)
        .exclude(actor=request.user)
        .select_related("run")
        .only("pk", "kind", "data", "node", "run__name", "run__spec")
        .order_by("-pk")[:AT_MOST]
    )
    lines = [f"{event.run.name}: " + event_words.told(event, event.run.spec.get("nodes", 1)) for event in events]
    return Announcements(last, lines[::-1])
