"""Hosts and GPUs reserved for runs that have waited long, whose turn it is, and what other runs may still use of them.

Pure. End times are upper bounds: `max_duration` and `stop_duration` count in full, plus a margin. Reservations are few
and share no host. A run gets one only if none of the hosts that it could use is reserved for another run, so there is
one for each disjoint set of hosts. Rationale: docs/decisions/0005-one-reservation.md.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from dstackweb.backends.hosts.fit import Fit, HostView, could_ever_fit
from dstackweb.runs.codes import ReservationEnd, ReservedData
from dstackweb.scheduler.placement.hosts import WaitingRun, fit_nodes, may_use_host
from dstackweb.spec.effective import EffectiveSpec

T = TypeVar("T", "JobUsage", "ReservedNode")

MARGIN_S = 60
"""Time for a job's start and clean-up on top of its own limits."""
MOST_RESERVATIONS = 4
"""At a time."""


@dataclass(frozen=True)
class JobUsage:
    """What one active job holds of a host, since when, and when it is free at the latest; None if unknown."""

    job: tuple[int, int]
    """Run id and node; a run has one active attempt."""
    host_id: int
    cpus: int
    memory_mib: int
    gpus: frozenset[str]
    since: dt.datetime
    ends_at: dt.datetime | None
    stopping: bool = False
    """Whether it is being stopped."""


@dataclass(frozen=True)
class ReservedNode:
    """What is reserved for one node. `gpus` are UUIDs."""

    host_id: int
    host: str
    cpus: int
    memory_mib: int
    gpus: tuple[str, ...]

    @classmethod
    def from_row(cls, stored: dict[str, Any]) -> ReservedNode:
        return cls(**{**stored, "gpus": tuple(stored["gpus"])})


@dataclass(frozen=True)
class HostReservation:
    """Nodes reserved for a run. All are free by `starts_at`; None if unknown. `expires_at` is set once, when the start
    is unknown, and kept for the case that it is lost again."""

    run: WaitingRun
    nodes: tuple[ReservedNode, ...]
    made_at: dt.datetime
    starts_at: dt.datetime | None
    expires_at: dt.datetime | None
    lapsed_at: dt.datetime | None = None
    """When it expired: since then nothing is reserved, and it is another run's turn."""
    reclaims: bool = False
    """Whether runs of other queues of its cohort were displaced for it: its queue's share is kept for it as well."""

    @property
    def host_ids(self) -> frozenset[int]:
        return frozenset(node.host_id for node in self.nodes)

    @property
    def until(self) -> dt.datetime | None:
        """Other runs may use what is reserved if they are gone by then."""
        return self.starts_at or self.expires_at

    def has_expired(self, now: dt.datetime) -> bool:
        """Whether its time is over and the start is still unknown."""
        return self.starts_at is None and self.expires_at is not None and self.expires_at <= now


def latest_end(began: dt.datetime, limit_s: int | None, stop_s: int, now: dt.datetime) -> dt.datetime | None:
    """When a job that may run `limit_s` seconds from `began` is gone at the latest; soon, if it is overdue."""
    if limit_s is None:
        return None
    end = began + dt.timedelta(seconds=limit_s + stop_s + MARGIN_S)
    return end if end > now else now + dt.timedelta(seconds=MARGIN_S)


def plan_reservation(
    run: WaitingRun,
    hosts: Sequence[HostView],
    holders: Sequence[JobUsage],
    now: dt.datetime,
    hold_s: float,
) -> HostReservation | None:
    """Reserve where all nodes fit first if jobs end as late as they may; None if they never fit."""
    usable = [host for host in hosts if may_use_host(run.spec, host)]

    def found(gone: Sequence[JobUsage]) -> list[Fit]:
        return fit_nodes(run.spec, hosts_after(usable, holders, gone))

    ended = _first_enough(holders, lambda gone: len(found(gone)) == run.spec.nodes)
    if ended is None:
        return None
    nodes = tuple(
        ReservedNode(fit.host_id, fit.host_name, fit.cpus, fit.memory_mib, fit.gpu_uuids) for fit in found(ended)
    )
    return _with_start(HostReservation(run, nodes, now, None, None), ended, now, hold_s)


def may_be_planned(run: WaitingRun, hosts: Sequence[HostView], holders: Sequence[JobUsage]) -> bool:
    """Whether `plan_reservation` would find nodes, in one step instead of a search."""
    usable = [host for host in hosts if may_use_host(run.spec, host)]
    return len(fit_nodes(run.spec, hosts_after(usable, holders, holders))) == run.spec.nodes


def renew_reservation(
    reserved: HostReservation, hosts: Sequence[HostView], holders: Sequence[JobUsage], now: dt.datetime, hold_s: float
) -> HostReservation | None:
    """The same nodes with a new start time; None when they are no longer available."""
    kept = {node.host_id for node in reserved.nodes}
    there = [host for host in hosts if host.id in kept]
    holding = [holder for holder in holders if holder.host_id in kept]
    ended = _first_enough(holding, lambda gone: _are_free(reserved.nodes, hosts_after(there, holding, gone)))
    return None if ended is None else _with_start(reserved, ended, now, hold_s)


def may_finish_before(spec: EffectiveSpec, reserved: HostReservation, now: dt.datetime) -> bool:
    """Whether a run that starts now is certainly gone when the reservation starts, or ends if its start is unknown."""
    end = latest_end(now, spec.max_duration_s, spec.stop_duration_s, now)
    return end is not None and reserved.until is not None and end <= reserved.until


def reserved_data(run: WaitingRun, reserved: HostReservation) -> ReservedData:
    """Who it is reserved for, from when, and the time a run needs on top. No names for other projects."""
    other, starts, expires = reserved.run, reserved.starts_at, reserved.expires_at
    data: ReservedData = {
        "starts_at": starts.isoformat() if starts else None,
        "expires_at": expires.isoformat() if expires and not starts else None,
        "spare_s": run.spec.stop_duration_s + MARGIN_S,
    }
    if run.project_id == other.project_id:
        data |= {"run": other.name, "project": other.project}
    return data


def hosts_without(reserved: HostReservation, hosts: Sequence[HostView], holders: Sequence[JobUsage]) -> list[HostView]:
    """The hosts without what a run could take only by delaying the reservation."""
    nodes = _by_host(reserved.nodes)
    gone = [holder for holder in holders if holder.host_id in nodes and _gone_by_start(holder, reserved)]
    at_start = {host.id: host for host in hosts_after([h for h in hosts if h.id in nodes], holders, gone)}
    return [_host_without(host, at_start[host.id], nodes[host.id]) if host.id in nodes else host for host in hosts]


def hosts_after(hosts: Sequence[HostView], holders: Iterable[JobUsage], gone: Sequence[JobUsage]) -> list[HostView]:
    """The hosts once the jobs in `gone` have ended and the others have not."""
    left, given = _by_host(set(holders) - set(gone)), _by_host(gone)
    return [_host_after(host, left[host.id], given[host.id]) if host.id in given else host for host in hosts]


def _by_host(items: Iterable[T]) -> defaultdict[int, list[T]]:
    found: defaultdict[int, list[T]] = defaultdict(list)
    for item in items:
        found[item.host_id].append(item)
    return found


def _host_after(host: HostView, left: Sequence[JobUsage], gone: Sequence[JobUsage]) -> HostView:
    given = frozenset().union(*(holder.gpus for holder in gone))
    # A host that came back smaller may be overcommitted: then not all that is freed is available.
    cpus = min(host.cpus_free + sum(h.cpus for h in gone), host.cpus - sum(h.cpus for h in left))
    memory = min(
        host.memory_free_mib + sum(h.memory_mib for h in gone), host.memory_mib - sum(h.memory_mib for h in left)
    )
    return replace(
        host,
        cpus_free=max(0, cpus),
        memory_free_mib=max(0, memory),
        gpus=tuple(replace(gpu, held=False) if gpu.uuid in given else gpu for gpu in host.gpus),
    )


def _host_without(now: HostView, at_start: HostView, nodes: Sequence[ReservedNode]) -> HostView:
    kept = {uuid for node in nodes for uuid in node.gpus}
    cpus = at_start.cpus_free - sum(node.cpus for node in nodes)
    memory = at_start.memory_free_mib - sum(node.memory_mib for node in nodes)
    return replace(
        now,
        cpus_free=max(0, min(now.cpus_free, cpus)),
        memory_free_mib=max(0, min(now.memory_free_mib, memory)),
        gpus=tuple(replace(gpu, held=True) if gpu.uuid in kept else gpu for gpu in now.gpus),
    )


def _gone_by_start(holder: JobUsage, reserved: HostReservation) -> bool:
    """If the start is unknown, jobs older than the reservation are assumed to end before it does."""
    if reserved.starts_at is None and holder.since <= reserved.made_at:
        return True
    return holder.ends_at is not None and reserved.until is not None and holder.ends_at <= reserved.until


def _first_enough(
    holders: Sequence[JobUsage], enough: Callable[[Sequence[JobUsage]], bool]
) -> Sequence[JobUsage] | None:
    """The fewest jobs, in the order of their ends, whose end is enough; None if it never is. Those without a known end
    come last, oldest first. `enough` must be monotonic."""
    order = sorted(holders, key=lambda holder: (holder.ends_at is None, holder.ends_at or holder.since))
    if not enough(order):
        return None
    return order[: bisect_left(range(len(order)), True, key=lambda count: enough(order[:count]))]


def _are_free(nodes: Sequence[ReservedNode], hosts: Sequence[HostView]) -> bool:
    """Whether all reserved nodes are present and free."""
    by_id = {host.id: host for host in hosts if host.takes_jobs and host.isolation != "none"}
    for host_id, kept in _by_host(nodes).items():
        host = by_id.get(host_id)
        if host is None or host.cpus_free < sum(node.cpus for node in kept):
            return False
        if host.memory_free_mib < sum(node.memory_mib for node in kept):
            return False
        if not {uuid for node in kept for uuid in node.gpus} <= {gpu.uuid for gpu in host.gpus if gpu.free}:
            return False
    return True


def _with_start(
    reserved: HostReservation, ended: Sequence[JobUsage], now: dt.datetime, hold_s: float
) -> HostReservation:
    """With the time when all of `ended` are gone, or an expiry if that is unknown."""
    starts_at = ended[-1].ends_at if ended else now
    if starts_at is None:
        expires_at = reserved.expires_at or now + dt.timedelta(seconds=hold_s)
        return replace(reserved, starts_at=None, expires_at=expires_at)
    return replace(reserved, starts_at=stable_start(reserved.starts_at, starts_at, now))


def stable_start(before: dt.datetime | None, after: dt.datetime, now: dt.datetime) -> dt.datetime:
    """The previous start, unless it has passed, moved by more than the margin, or came nearer.

    The end of a job that is starting moves with each pass. If the start followed, runs ending just before it could be
    let in again and again, each a little later.
    """
    if before is not None and now < before <= after <= before + dt.timedelta(seconds=MARGIN_S):
        return before
    return after


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
        return in_the_way if len(others) - len(in_the_way) < MOST_RESERVATIONS else None

    def is_left_to(self, run: WaitingRun, hosts: Sequence[HostView]) -> bool:
        """Whether the run could use hosts that no run before it in this pass waits for."""
        if len(self._wanted) >= sum(host.takes_jobs for host in hosts):
            return False  # the usual case in a long queue, and cheaper
        return not usable_hosts(run, hosts) <= self._wanted

    def want(self, run: WaitingRun, hosts: Sequence[HostView]) -> None:
        """Keep the hosts that the run could use from runs that are decided later in this pass and want a turn."""
        self._wanted |= {host.id for host in hosts} if len(self.kept) >= MOST_RESERVATIONS else usable_hosts(run, hosts)


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
