"""Schemas of queues: settings, moving runs, shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ninja import Field, Schema

from dstackweb.api.app import Body, Id, Listing, Name, Username
from dstackweb.api.sweeps import SweepCountsOut
from dstackweb.runs.codes import WaitReason
from dstackweb.runs.models import MAX_LIMIT, Sweep
from dstackweb.runs.queue import reorder
from dstackweb.runs.queue.move_preview import MoveEffect
from dstackweb.runs.queue.ordering import PRIORITY_MAX
from dstackweb.runs.queue.transfer import Transfer
from dstackweb.runs.row_fields import QueueRow, Starts
from dstackweb.runs.rows import starts_of
from dstackweb.runs.sweeps.selectors import SweepCounts
from dstackweb.scheduler.passes.decision import foresee_waits
from dstackweb.wording import starts, waiting

ReclaimChoice = Literal["never", "lower_priority", "any"]
Limit = Annotated[int, Field(ge=0, le=MAX_LIMIT, strict=True)]


class PatchQueueIn(Body):
    """Changes by managers; missing fields stay. A limit of null is no limit; 0 starts nothing."""

    paused: bool = Field(False, description="No run starts; running runs continue", strict=True)
    draining: bool = Field(False, description="New runs are refused; waiting runs still start", strict=True)
    ageing_minutes: int | None = Field(
        None, strict=True, description="Minutes of waiting for +1 priority; null: strict"
    )
    fair_share_minutes: int | None = Field(
        None, strict=True, description="Most minutes that a run ranks behind by its member's share; null: off"
    )
    fair_share_half_life_days: int = Field(
        7, strict=True, description="Days after which past usage counts half for the fair share"
    )
    max_running: Limit | None = None
    max_gpus: Limit | None = None
    max_running_per_user: Limit | None = None
    max_gpus_per_user: Limit | None = None
    cohort: str = Field(
        "", description="Queues of the same cohort lend each other unused GPUs; empty: none", strict=True
    )
    borrow_gpus: Limit | None = None
    lend_gpus: Limit | None = None
    reclaim: ReclaimChoice = Field("never", description="Whether its runs displace those that hold its lent GPUs")
    preempt_points: int | None = Field(
        None,
        ge=1,
        le=PRIORITY_MAX,
        strict=True,
        description="How many points of priority less a preemptible run must have to be displaced; null: none is",
    )
    preempt_gpu_hours: int | None = Field(
        None,
        ge=1,
        le=MAX_LIMIT,
        strict=True,
        description="GPU-hours of others' work that a member's runs may displace within 24 hours; null: no limit",
    )


class NewQueueIn(PatchQueueIn):
    """A new queue, with optional settings."""

    name: str


class QueueSettings(Schema):
    """The settings of a queue. A limit of null is no limit."""

    name: str
    paused: bool
    draining: bool
    ageing_minutes: int | None
    fair_share_minutes: int | None
    fair_share_half_life_days: int
    max_running: int | None
    max_gpus: int | None
    max_running_per_user: int | None
    max_gpus_per_user: int | None
    cohort: str
    borrow_gpus: int | None
    lend_gpus: int | None
    reclaim: str
    preempt_points: int | None
    preempt_gpu_hours: int | None


class QueueSummary(QueueSettings):
    """A queue in a list: its settings, and the number of its runs in each active status."""

    pending: int = Field(validation_alias="count.pending")
    submitted: int = Field(validation_alias="count.submitted")
    provisioning: int = Field(validation_alias="count.provisioning")
    running: int = Field(validation_alias="count.running")
    terminating: int = Field(validation_alias="count.terminating")


class QueuesOut(Listing[QueueSummary]): ...


class FoldedOut(Schema):
    """The waiting runs of a sweep that an item stands for. The item itself is the first of them."""

    sweep: str = Field(description="The name of the sweep")
    id: Id
    runs: int
    size: int = Field(description="All runs of the sweep")
    counts: SweepCountsOut

    @classmethod
    def of(cls, sweep: Sweep, runs: int) -> FoldedOut:
        counts = SweepCountsOut.from_orm(SweepCounts.of(sweep))
        return cls(sweep=sweep.name, id=str(sweep.uid), runs=runs, size=sweep.size, counts=counts)


@dataclass(slots=True, kw_only=True)
class QueueItem(QueueRow):
    """A waiting run and its position."""

    reason_detail: str
    folded: Annotated[FoldedOut | None, Field(description="Only with `folded=true`; null for a single run")] = None


class MoveIn(Body):
    """The runs (`run` or `runs`, names or ids, or all waiting ones of a `member`), and one of `before`, `after`, `top`,
    `bottom` or `queue`."""

    run: str | None = None
    runs: list[str] | None = Field(None, description="They keep their order", max_length=1000)
    member: str | None = Field(None, description="All waiting runs of this member, only with `queue`")
    before: str | None = Field(None, description="Move directly before this run")
    after: str | None = Field(None, description="Move directly after this run")
    top: Literal[True] | None = None
    bottom: Literal[True] | None = None
    queue: str | None = Field(None, description="To this queue of the project, at the place of their seniority there")
    dry_run: bool = Field(False, description="Return the effect without changing anything")


class RunChangeOut(Schema):
    """The effect on a run. Positions start at 1; null without a position.

    Positions after the first thousand may be null after a move; a `dry_run` counts all.
    """

    run: Name
    id: Id = Field(validation_alias="run.uid")
    user: Username = Field(validation_alias="run.user")
    priority_before: int
    priority_after: int
    position_before: int | None
    position_after: int | None
    penalty_s: int | None = Field(description="Behind by its member's share in the new queue; null in the same queue")


class WaitThereOut(Schema):
    """Why the first run of each kind would wait in the new queue; `reason` is `starting` if what it needs is free."""

    run: Name
    reason: str
    reason_detail: str


class NewQueueOut(Schema):
    """Where runs go in another queue. `starts`: the estimate of `beside`, which waits there now in the first one's
    place. `reordered`: their order changes."""

    name: str
    reordered: bool
    waits: list[WaitThereOut]
    beside: Name | None
    starts: Starts | None


class MoveOut(Schema):
    """`changes`: the runs moved; `slips`: the nearest of the `slips_total` other runs that change position (or null).

    To another `queue`, `slips_total` counts the runs there that move back, and there is no undo. `exact` is false if a
    member's run moved to their nearest own position instead. `move` is what `undo` takes, for `undo_s` seconds; null
    for a preview, and where nothing changed.
    """

    changes: list[RunChangeOut]
    slips: list[RunChangeOut]
    slips_total: int | None
    exact: bool
    move: int | None
    undo_s: int
    queue: NewQueueOut | None = None

    @staticmethod
    def resolve_queue(moved: MoveEffect) -> NewQueueOut | None:
        return _new_queue(moved) if isinstance(moved, Transfer) else None

    @staticmethod
    def resolve_move(moved: MoveEffect) -> int | None:
        return moved.move_id

    @staticmethod
    def resolve_undo_s(moved: MoveEffect) -> int:
        return reorder.UNDO_S


class UndoIn(Body):
    """`move`: the number in the answer to the move. Default: your latest move in this queue."""

    move: int | None = None


class ShareOut(Schema):
    """A member's load in GPU-hours: what was used, halved for each half-life since, and an hour for each GPU held or
    queued. Their next run ranks behind by about `penalty_s`."""

    user: Username
    gpu_hours: float
    used_gpu_hours: float
    held_gpus: int = Field(validation_alias="load.held_gpus")
    queued_gpus: int = Field(validation_alias="load.queued_gpus")
    penalty_s: int = Field(validation_alias="penalty.seconds")


class QueueOut(QueueSettings):
    """A queue with a page of its runs. `shares` are the members' with fair share, the highest first."""

    borrowed_gpus: int = Field(description="GPUs above its limit that the queue's runs hold, lent by its cohort")
    shares: list[ShareOut]
    items: list[QueueItem]
    next: str | None


def _new_queue(moved: Transfer) -> NewQueueOut | None:
    """Where runs go, with what holds them up there; None if they are there already."""
    if moved.target is None or not moved.entries:
        return None
    estimate, data = starts_of(moved.beside) if moved.beside else (None, {})
    if estimate is not None:
        starts.add_words([(estimate, data)])
    waits = foresee_waits([run for run, _share in moved.entries])
    reasons = [
        (run.name, wait.reason, wait.data) if wait else (run.name, WaitReason.STARTING, {}) for run, wait in waits
    ]
    return NewQueueOut(
        name=moved.target.name,
        reordered=moved.is_reordered,
        waits=[
            WaitThereOut(run=name, reason=reason, reason_detail=str(waiting.reason(reason, data).text))
            for name, reason, data in reasons
        ],
        beside=moved.beside.name if moved.beside else None,
        starts=estimate,
    )
