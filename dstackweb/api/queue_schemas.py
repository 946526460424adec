"""Schemas of queues: settings, moves and undo."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ninja import Field, Schema

from dstackweb.runs.models import MAX_LIMIT, Queue
from dstackweb.runs.queue import reorder
from dstackweb.runs.states import ACTIVE

Limit = Annotated[int, Field(ge=0, le=MAX_LIMIT, strict=True)]


class PatchQueueIn(Schema):
    """Changes by managers; missing fields stay. A limit of null is no limit; 0 starts nothing."""

    model_config = {"extra": "forbid"}

    paused: bool = Field(False, description="No run starts; running runs continue", strict=True)
    draining: bool = Field(False, description="New runs are refused; waiting runs still start", strict=True)
    ageing_minutes: int | None = Field(
        None, strict=True, description="Minutes of waiting for +1 priority; null: strict"
    )
    max_running: Limit | None = None
    max_gpus: Limit | None = None
    max_running_per_user: Limit | None = None
    max_gpus_per_user: Limit | None = None


class NewQueueIn(PatchQueueIn):
    """A new queue, with optional settings."""

    name: str


class QueueSettings(Schema):
    """The settings of a queue. A limit of null is no limit."""

    name: str
    paused: bool
    draining: bool
    ageing_minutes: int | None
    max_running: int | None
    max_gpus: int | None
    max_running_per_user: int | None
    max_gpus_per_user: int | None

    @staticmethod
    def values(queue: Queue) -> dict[str, Any]:
        """The settings of a queue."""
        return {name: getattr(queue, name) for name in QueueSettings.model_fields}


class QueueSummary(QueueSettings):
    """A queue in a list: its settings, and the number of its runs in each active status."""

    pending: int
    submitted: int
    provisioning: int
    running: int
    terminating: int

    @classmethod
    def of(cls, queue: Queue) -> QueueSummary:
        counts = {status.value: getattr(queue.count, status.value) for status in ACTIVE}
        return cls(**cls.values(queue), **counts)


class QueuesOut(Schema):
    items: list[QueueSummary]
    next: str | None = None


class MoveIn(Schema):
    """The runs (`run` or `runs`, names or ids), and one of `before`, `after`, `top` or `bottom`."""

    model_config = {"extra": "forbid"}

    run: str | None = None
    runs: list[str] | None = Field(None, description="They keep their order", max_length=1000)
    before: str | None = Field(None, description="Move directly before this run")
    after: str | None = Field(None, description="Move directly after this run")
    top: Literal[True] | None = None
    bottom: Literal[True] | None = None
    dry_run: bool = Field(False, description="Return the effect without changing anything")


class RunChangeOut(Schema):
    """The effect on a run. Positions start at 1; null without a position.

    Positions after the first thousand may be null after a move; a `dry_run` counts all.
    """

    run: str
    id: str
    user: str
    priority_before: int
    priority_after: int
    position_before: int | None
    position_after: int | None

    @classmethod
    def of(cls, change: reorder.RunChange) -> RunChangeOut:
        own = {name: getattr(change, name) for name in cls.model_fields if name.startswith(("priority", "position"))}
        return cls(run=change.run.name, id=str(change.run.uid), user=change.run.user.get_username(), **own)


class MoveOut(Schema):
    """`changes`: the runs moved; `slips`: the nearest of the `slips_total` other runs that change position (or null).

    `exact` is false if a member's run moved to their nearest own position instead. `move` is what `undo` takes,
    for `undo_s` seconds; null for a preview, and where nothing changed.
    """

    changes: list[RunChangeOut]
    slips: list[RunChangeOut]
    slips_total: int | None
    exact: bool
    move: int | None
    undo_s: int

    @classmethod
    def of(cls, moved: reorder.MovePreview) -> MoveOut:
        return cls(
            changes=[RunChangeOut.of(change) for change in moved.changes],
            slips=[RunChangeOut.of(change) for change in moved.slips],
            slips_total=moved.slips_total,
            exact=moved.exact,
            move=moved.move_id if isinstance(moved, reorder.MoveResult) else None,
            undo_s=reorder.UNDO_S,
        )


class UndoIn(Schema):
    """`move`: the number in the answer to the move. Default: your latest move in this queue."""

    model_config = {"extra": "forbid"}

    move: int | None = None
