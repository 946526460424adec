"""Whether and where a run fits on the team's hosts: pure decisions on plain data (docs/design.md#scheduling)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dstackweb.backends.contract import PlaceCode
from dstackweb.backends.hosts.fit import HOSTS, Fit, HostView, could_ever_fit, fit_now, shortfall, taken
from dstackweb.runner.isolation import CONTAINER, isolates
from dstackweb.runs.codes import Impossible, Unavailable, WaitReason, permanence
from dstackweb.spec import labels
from dstackweb.spec.containers import is_listed
from dstackweb.spec.effective import EffectiveSpec


@dataclass(frozen=True)
class WaitingRun:
    """A waiting run as decisions see it. Its queue is ordered by (`rank`, `id`)."""

    id: int
    name: str
    project_id: int
    project: str
    queue_id: int
    user_id: int
    rank: int
    queued_at: dt.datetime
    spec: EffectiveSpec

    @property
    def place(self) -> tuple[int, int]:
        """Its sort key in the queue."""
        return self.rank, self.id


@dataclass(frozen=True)
class PlacedRun:
    """A run of a queue that holds something: it is starting, running or stopping."""

    id: int
    name: str
    user_id: int
    user: str
    attempt: int
    rank: int
    priority: int
    since: dt.datetime
    """When it was placed."""
    stop_s: int
    """Its `stop_duration`: the longest that it takes to end."""
    queue_id: int
    queue: str = ""
    gpus: int = 0
    """Those that it requests, on all its nodes."""
    preemptible: bool = True
    stopping: bool = False

    @property
    def counted(self) -> tuple[int, int, int]:
        """Queue, member and GPUs, as its queue's limits count it."""
        return self.queue_id, self.user_id, self.gpus

    @property
    def may_stop(self) -> bool:
        """Whether it may be displaced at all: marked so, and not stopping yet."""
        return self.preemptible and not self.stopping

    @property
    def place(self) -> tuple[int, int]:
        """Its sort key among the runs of its queue."""
        return self.rank, self.id

    @property
    def protection(self) -> tuple[int, float, int]:
        """Sort key of who is displaced first: the lowest priority, then the latest start."""
        return self.priority, -self.since.timestamp(), -self.id


Displaced = tuple[dt.datetime, int]
"""When runs were displaced, and the GPU-milliseconds that they had held."""


@dataclass(frozen=True)
class HostPlacement:
    """A host for every node, in node order. `hosts` is the capacity left."""

    fits: tuple[Fit, ...]
    hosts: tuple[HostView, ...]

    def __len__(self) -> int:
        return len(self.fits)


@dataclass(frozen=True)
class Wait:
    """Why a run can't be placed now, with the numbers of that reason (`runs.codes`)."""

    reason: WaitReason
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        WaitReason(self.reason)  # a code outside the catalogue has no place in its order and no words


def by_permanence(found: Iterable[Wait]) -> list[Wait]:
    """Reasons that all must be resolved, the most permanent first."""
    return sorted(found, key=lambda waits: permanence(waits.reason, waits.data))


def place_on_hosts(spec: EffectiveSpec, hosts: Sequence[HostView]) -> HostPlacement | Wait:
    """Hosts for all nodes of a run at once, or the most permanent reason why there are none."""
    if spec.spot_policy == "spot":
        return Wait(WaitReason.IMPOSSIBLE, {"code": Impossible.NO_SPOT_ON_HOSTS})
    if spec.image and hosts and not any(host.has_engine for host in hosts):
        return Wait(WaitReason.IMPOSSIBLE, {"code": Impossible.IMAGE_NOT_SUPPORTED, "image": spec.image})
    allowed = [host for host in hosts if may_use_host(spec, host)]
    if hosts and not allowed:
        return Wait(WaitReason.IMPOSSIBLE, _no_such_place(spec, hosts))
    capable = [host for host in allowed if could_ever_fit(host, spec.requirements)]
    fits, left = _fit_nodes(spec, [host for host in capable if host.takes_jobs])
    if len(fits) < spec.nodes:
        return _reason_to_wait(spec, capable, allowed, placed=len(fits))
    return HostPlacement(tuple(fits), tuple(left.get(host.id, host) for host in hosts))


def fit_nodes(spec: EffectiveSpec, hosts: Iterable[HostView]) -> list[Fit]:
    """Hosts for as many nodes as fit at once, up to `spec.nodes`."""
    return _fit_nodes(spec, hosts)[0]


def may_use_hosts(spec: EffectiveSpec) -> bool:
    """Whether the run may use the team's own hosts."""
    return spec.backends is None or HOSTS in spec.backends


def may_use_host(spec: EffectiveSpec, host: HostView) -> bool:
    """Whether the run may use this host, once it has room."""
    return host_refusal(spec, host) is None


def host_refusal(spec: EffectiveSpec, host: HostView) -> PlaceCode | None:
    """Why the run may not use this host, however much is free; None when it may. `instance_types` are names of
    hosts."""
    if spec.spot_policy == "spot":
        return PlaceCode.IS_ON_DEMAND
    if spec.regions is not None and host.labels.get("region") not in spec.regions:
        return PlaceCode.OTHER_REGION
    if spec.instance_types is not None and host.name not in spec.instance_types:
        return PlaceCode.OTHER_INSTANCE_TYPE
    if not labels.match(spec.labels, host.labels):
        return PlaceCode.HAS_NO_LABELS
    if spec.image and not host.has_engine:
        return PlaceCode.IMAGE_NOT_SUPPORTED
    if not all(is_listed(volume, host.volumes) for volume in spec.volumes or ()):
        return PlaceCode.VOLUME_NOT_LISTED
    if not isolates(CONTAINER if spec.image else host.isolation, spec.least_isolation):
        return PlaceCode.TOO_LITTLE_ISOLATION
    return None


def _no_such_place(spec: EffectiveSpec, hosts: Sequence[HostView]) -> dict[str, Any]:
    """What the run requires, and the number of hosts; `missing` are labels that no host has."""
    alone = {name: {name: values} for name, values in (spec.labels or {}).items()}
    missing = [asked for asked in alone.values() if not any(labels.match(asked, host.labels) for host in hosts)]
    return {
        "code": Impossible.NO_SUCH_PLACE,
        "regions": list(spec.regions or ()),
        "instance_types": list(spec.instance_types or ()),
        "labels": labels.shown(spec.labels),
        "missing": [text for asked in missing for text in labels.shown(asked)],
        "isolation": spec.least_isolation,
        "volumes": _unlisted(spec, hosts),
        "hosts_total": len(hosts),
    }


def _unlisted(spec: EffectiveSpec, hosts: Sequence[HostView]) -> list[str]:
    """The folders that the run mounts and no host lists; all that it mounts, if no host lists them together."""
    asked = spec.volumes or ()
    if any(all(is_listed(volume, host.volumes) for volume in asked) for host in hosts):
        return []
    alone = [volume for volume in asked if not any(is_listed(volume, host.volumes) for host in hosts)]
    return [volume.partition(":")[0] for volume in alone or asked]


def _fit_nodes(spec: EffectiveSpec, hosts: Iterable[HostView]) -> tuple[list[Fit], dict[int, HostView]]:
    """Hosts for as many nodes as fit, and what is left of the hosts. Each node goes to the host with the fewest GPUs,
    then CPUs, left afterwards: as all need the same, this places all of them whenever that is possible."""
    left = {host.id: host for host in hosts}
    open_ = {host.id: made for host in left.values() if (made := fit_now(host, spec.requirements)) is not None}
    fits: list[Fit] = []
    while open_ and len(fits) < spec.nodes:
        best = min(open_.values(), key=lambda made: (made.gpus_left, made.cpus_left, made.host_id))
        fits.append(best)
        left[best.host_id] = taken(left[best.host_id], best)
        again = fit_now(left[best.host_id], spec.requirements)
        if again is None:
            del open_[best.host_id]
        else:
            open_[best.host_id] = again
    return fits, left


def _reason_to_wait(spec: EffectiveSpec, capable: Sequence[HostView], hosts: Sequence[HostView], placed: int) -> Wait:
    """The reason and its numbers when only `placed` nodes fit."""
    needs = spec.requirements
    numbers: dict[str, Any] = {"nodes": spec.nodes, "nodes_placed": placed, "gpus": needs.gpu_count_min,
                               "cpus": needs.cpu_min, "memory_mib": needs.memory_min_mib}  # fmt: skip
    if not hosts:
        return Wait(WaitReason.BACKEND_UNAVAILABLE, {"code": Unavailable.NO_HOSTS, **numbers})
    if not _hold_all_nodes(spec, capable):
        return Wait(WaitReason.IMPOSSIBLE, {"code": Impossible.TOO_LARGE, **numbers, **shortfall(hosts, needs)})
    here = [host for host in capable if host.takes_jobs]
    ready = [host for host in here if host.isolation != "none"]
    if len(ready) < len(capable) and not _hold_all_nodes(spec, ready):
        offline = len(here) < len(capable)
        code, useless = (Unavailable.HOSTS_OFFLINE, here) if offline else (Unavailable.NO_ISOLATION, ready)
        names = [host.name for host in capable if host not in useless]
        return Wait(WaitReason.BACKEND_UNAVAILABLE, {"code": code, "hosts": names, **numbers})
    return Wait(WaitReason.WAITING_FOR_CAPACITY, {**numbers, **shortfall(ready, needs)})


def _hold_all_nodes(spec: EffectiveSpec, hosts: Iterable[HostView]) -> bool:
    """Whether these hosts could hold all nodes if they were empty."""
    return len(fit_nodes(spec, [host.emptied for host in hosts])) == spec.nodes
