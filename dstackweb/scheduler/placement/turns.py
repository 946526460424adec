"""Which runs have a reservation, and whose turn it is to get one.

Pure. Reservations are few and share no host. A run gets one only if none of the hosts that it could use is reserved for
another run, so there is one for each disjoint set of hosts. Rationale: docs/decisions/0005-one-reservation.md.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

from dstackweb.backends.hosts.fit import HostView, could_ever_fit
from dstackweb.runs.codes import ReservationEnd
from dstackweb.scheduler.placement.hosts import WaitingRun, may_use_host
from dstackweb.scheduler.placement.reservation import HostReservation

MOST = 4
"""Reservations at a time."""


@dataclass
class Turns:
    """The reservations by run id. Those in `lapsed` have ended and are kept as a memory: it is another run's turn."""

    kept: dict[int, HostReservation] = field(default_factory=dict)
    lapsed: dict[int, HostReservation] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)
    """Why reservations have ended since they were read, by run id."""
    _wanted: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, rows: Iterable[HostReservation]) -> Turns:
        """The turns after these reservations were made or have lapsed."""
        found = sorted(rows, key=lambda row: (row.made_at, row.run.id))
        return cls(
            kept={row.run.id: row for row in found if row.lapsed_at is None},
            lapsed={row.run.id: row for row in found if row.lapsed_at is not None},
        )

    @property
    def rows(self) -> dict[int, HostReservation]:
        """All that must be remembered, by run id."""
        return self.kept | self.lapsed

    def keep(self, reserved: HostReservation) -> None:
        """Begin or renew a reservation."""
        self.lapsed.pop(reserved.run.id, None)
        self.kept[reserved.run.id] = reserved

    def end(self, run_id: int, why: str, hosts: Sequence[HostView], now: dt.datetime) -> None:
        """End a reservation: the turn of those that have lapsed comes again, if they could have used its hosts."""
        ended = self.kept.pop(run_id, None)
        if ended is None:
            return
        self.why[run_id] = why
        self.turn_is_over(run_id, ended.host_ids, hosts)
        if why == ReservationEnd.EXPIRED:
            self.lapsed[run_id] = replace(ended, lapsed_at=now)

    def turn_is_over(self, run_id: int, host_ids: frozenset[int], hosts: Sequence[HostView]) -> None:
        """Forget that other runs' holds have lapsed, if they could use one of these hosts, which `run_id` had."""
        for other in list(self.lapsed.values()):
            if other.run.id != run_id and host_ids & (other.host_ids | usable_hosts(other.run, hosts)):
                del self.lapsed[other.run.id]

    def outranked_by(
        self, run: WaitingRun, hosts: Sequence[HostView], also: Set[int] = frozenset()
    ) -> list[HostReservation] | None:
        """The reservations that end if the run gets one; None if it is another's turn. `also`: runs of other queues
        that it goes before.

        What was taken back for a run is left to it, also by those ahead of it: they borrow, or take back themselves.
        Without its turn, the run still goes before those that are decided after it in this pass: see `want`.
        """
        usable = usable_hosts(run, hosts)
        others = [reserved for reserved in self.kept.values() if reserved.run.id != run.id]
        in_the_way = [reserved for reserved in others if reserved.host_ids & usable]
        outranked = (one.run.id in also or (is_ahead(run, one.run) and not one.reclaims) for one in in_the_way)
        if usable & self._wanted or not all(outranked):
            return None
        return in_the_way if len(others) - len(in_the_way) < MOST else None

    def is_left_to(self, run: WaitingRun, hosts: Sequence[HostView]) -> bool:
        """Whether the run could use hosts that no run before it in this pass waits for."""
        if len(self._wanted) >= sum(host.takes_jobs for host in hosts):
            return False  # the usual case in a long queue, and cheaper
        return not usable_hosts(run, hosts) <= self._wanted

    def want(self, run: WaitingRun, hosts: Sequence[HostView]) -> None:
        """Keep the hosts that the run could use from runs that are decided later in this pass and want a turn."""
        self._wanted |= {host.id for host in hosts} if len(self.kept) >= MOST else usable_hosts(run, hosts)


def usable_hosts(run: WaitingRun, hosts: Sequence[HostView]) -> frozenset[int]:
    """Ids of the hosts that could hold a node of the run if they were empty."""
    spec = run.spec
    return frozenset(
        host.id
        for host in hosts
        if host.takes_jobs and may_use_host(spec, host) and could_ever_fit(host, spec.requirements)
    )


def is_ahead(run: WaitingRun, other: WaitingRun) -> bool:
    """Whether it is ahead of the other run in the same queue."""
    return run.queue_id == other.queue_id and run.place < other.place
