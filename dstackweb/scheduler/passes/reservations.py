"""The stored reservation: read and written by passes, shown by pages."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dstackweb.runs.codes import ReservationEnd, RunEventKind
from dstackweb.runs.models import Run
from dstackweb.runs.states import RunStatus
from dstackweb.runs.transitions import record
from dstackweb.scheduler.models import Reservation
from dstackweb.scheduler.passes.loading import waiting_run
from dstackweb.scheduler.placement.reservation import HostReservation, ReservedNode
from dstackweb.spec.effective import EffectiveSpec


@dataclass(frozen=True)
class StoredReservation:
    """The row as a pass found it. If its run can no longer start, `reserved` is None and `lapsed` says why."""

    run_id: int
    queue_id: int
    reserved: HostReservation | None
    lapsed: str = ""


@dataclass(frozen=True)
class ReservationChange:
    """A pass's change of the reservation. `why`: the code of why the previous one ends, if it does."""

    before: StoredReservation | None
    after: HostReservation | None
    why: str = ""

    @property
    def is_needed(self) -> bool:
        """Whether the row must be written."""
        return self.after != self.before.reserved if self.before and self.after else bool(self.before or self.after)

    @property
    def is_of_another_run(self) -> bool:
        """Whether a reservation ends or another begins."""
        after = self.after.run.id if self.after else None
        return after != (self.before.run_id if self.before else None)

    @property
    def is_made_anew(self) -> bool:
        """Whether it isn't the one before, with other times: also one of the same run may have expired.

        It is then made when it is written, after what its pass placed before it, which it takes to end as well.
        """
        known = self.before.reserved if self.before else None
        return self.after is not None and (known is None or self.after.made_at != known.made_at)


@dataclass(frozen=True)
class VisibleReservation:
    """A reservation for a reader: `run` is None if they may not see it."""

    run: Run | None
    project_id: int
    made_at: dt.datetime
    starts_at: dt.datetime | None
    expires_at: dt.datetime | None
    nodes: tuple[ReservedNode, ...]


def visible_reservation(projects: Collection[int]) -> VisibleReservation | None:
    """The reservation for a reader of these projects."""
    row = Reservation.objects.select_related("run__project").first()
    if row is None:
        return None
    run = row.run if row.run.project_id in projects else None
    nodes = tuple(ReservedNode.from_row(node) for node in row.nodes)
    return VisibleReservation(run, row.run.project_id, row.made_at, row.starts_at, row.expires_at, nodes)


def load_reservation() -> StoredReservation | None:
    """The stored reservation; None without one."""
    row = Reservation.objects.select_related("run__queue__project").first()
    if row is None:
        return None
    run = row.run
    if run.status != RunStatus.SUBMITTED:
        return StoredReservation(run.pk, run.queue_id, None, ReservationEnd.LEFT)
    if run.queue.paused:
        return StoredReservation(run.pk, run.queue_id, None, ReservationEnd.QUEUE_PAUSED)
    try:
        spec = EffectiveSpec.model_validate(run.spec)
        nodes = tuple(ReservedNode.from_row(node) for node in row.nodes)
    except (ValidationError, TypeError, KeyError):
        return StoredReservation(run.pk, run.queue_id, None, ReservationEnd.UNREADABLE)
    of = waiting_run(run, run.queue, spec)
    return StoredReservation(
        run.pk, run.queue_id, HostReservation(of, nodes, row.made_at, row.starts_at, row.expires_at)
    )


def write_reservation(change: ReservationChange, now: dt.datetime) -> set[int]:
    """Write the row and the runs' events. Returns the queues whose lists show it.

    Locks rows of runs: call in the pass's transaction, before queue counters and hosts.
    """
    queues: set[int] = set()
    if change.before is not None and change.is_of_another_run:
        Reservation.objects.filter(pk=1, run=change.before.run_id).delete()
        _record(change.before.run_id, RunEventKind.RESERVATION_ENDED, {"reason": change.why}, now)
        queues.add(change.before.queue_id)
    if change.after is not None:
        _store(change.after, now if change.is_made_anew else change.after.made_at)
        if change.is_of_another_run:
            _record(change.after.run.id, RunEventKind.RESERVED, _event_data(change.after), now)
        queues.add(change.after.run.queue_id)
    return queues


def _record(run_id: int, kind: RunEventKind, data: dict[str, Any], now: dt.datetime) -> None:
    """Record an event, unless the run was deleted meanwhile."""
    run = Run.objects.filter(pk=run_id).first()
    if run is not None:
        record(run, kind, data, at=now)


def _store(reserved: HostReservation, made_at: dt.datetime) -> None:
    Reservation.objects.update_or_create(
        pk=1,
        defaults={
            "run_id": reserved.run.id,
            "made_at": made_at,
            "starts_at": reserved.starts_at,
            "expires_at": reserved.expires_at,
            "nodes": [node.as_row() for node in reserved.nodes],
        },
    )


def _event_data(reserved: HostReservation) -> dict[str, Any]:
    """Event data: hosts, number of GPUs, start or expiry."""
    return {
        "hosts": sorted({node.host for node in reserved.nodes}),
        "gpus": sum(len(node.gpus) for node in reserved.nodes),
        "starts_at": reserved.starts_at.isoformat() if reserved.starts_at else None,
        "expires_at": reserved.expires_at.isoformat() if reserved.expires_at else None,
    }
