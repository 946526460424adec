"""Whether and how a job fits on a host: pure decisions on plain data (docs/design.md, rule 3). A job gets the minimum
of each range it requires, so that the most runs fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dstackweb.backends.contract import Availability, Offer, PlaceCode
from dstackweb.backends.matching import gpu_matches, is_part
from dstackweb.spec.effective import Requirements

HOSTS = "hosts"
"""The name, and the kind, of the backend of the team's own hosts."""


@dataclass(frozen=True)
class GpuView:
    """A present GPU. `held`: by a job. `stranger`: {"pid", "user"} of a process on it that belongs to no run."""

    uuid: str
    index: int
    name: str
    memory_mib: int
    held: bool = False
    stranger: dict[str, Any] | None = None

    @property
    def free(self) -> bool:
        """Whether a job may get it now."""
        return not self.held and self.stranger is None


@dataclass(frozen=True)
class HostView:
    """A host as decisions see it. Free amounts are never below zero."""

    id: int
    name: str
    online: bool
    draining: bool
    isolation: str
    cpus: int
    cpus_free: int
    memory_mib: int
    memory_free_mib: int
    gpus: tuple[GpuView, ...] = ()
    labels: Mapping[str, Any] = field(default_factory=dict)
    held_back: bool = False
    has_engine: bool = False
    """Whether it runs jobs in containers, for which `isolation` does not count."""
    volumes: tuple[str, ...] = ()
    """Folders that containers may mount."""

    @property
    def takes_jobs(self) -> bool:
        """Whether new jobs may be placed on it, as far as they fit."""
        return self.online and not self.draining and not self.held_back

    @cached_property
    def emptied(self) -> HostView:
        """The same host at its best: taking jobs, all resources free, and isolated."""
        gpus = tuple(replace(gpu, held=False, stranger=None) for gpu in self.gpus)
        return replace(
            self, online=True, draining=False, held_back=False, isolation="user",
            cpus_free=self.cpus, memory_free_mib=self.memory_mib, gpus=gpus,
        )  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """The resources that a job gets on a host, and what stays free there."""

    host_id: int
    host_name: str
    cpus: int
    memory_mib: int
    gpu_uuids: tuple[str, ...]
    gpus_left: int
    cpus_left: int


@dataclass(frozen=True)
class Miss:
    """Why a job doesn't fit on a host now: a code with its numbers."""

    code: PlaceCode
    data: dict[str, Any] = field(default_factory=dict)


def fit(host: HostView, needs: Requirements) -> Fit | Miss:
    """The resources that a job with these needs would get on the host now, or why it doesn't fit."""
    found = fit_now(host, needs)
    return _miss(host, needs) if found is None else found


def fit_now(host: HostView, needs: Requirements) -> Fit | None:
    """The same without the reason, which takes longer to find than a place."""
    if not host.takes_jobs or host.isolation == "none":
        return None
    if host.cpus_free < needs.cpu_min or host.memory_free_mib < needs.memory_min_mib:
        return None
    free = [gpu for gpu in host.gpus if gpu.free]
    if len(free) < needs.gpu_count_min:
        return None
    gpus = _choose(_matching(free, needs), needs.gpu_count_min)
    if gpus is None:
        return None
    return Fit(
        host_id=host.id,
        host_name=host.name,
        cpus=needs.cpu_min,
        memory_mib=needs.memory_min_mib,
        gpu_uuids=tuple(gpu.uuid for gpu in gpus),
        gpus_left=len(free) - len(gpus),
        cpus_left=host.cpus_free - needs.cpu_min,
    )


def _miss(host: HostView, needs: Requirements) -> Miss:
    if not could_ever_fit(host, needs):
        return Miss(PlaceCode.TOO_SMALL, _numbers(host.emptied, needs))
    if host.isolation == "none":
        return Miss(PlaceCode.NO_ISOLATION)
    if not host.online:
        return Miss(PlaceCode.OFFLINE)
    if host.draining:
        return Miss(PlaceCode.DRAINING)
    if host.held_back:
        return Miss(PlaceCode.HELD_BACK)
    return Miss(PlaceCode.BUSY, _numbers(host, needs))


def could_ever_fit(host: HostView, needs: Requirements) -> bool:
    """Whether the host, online and empty, would be large enough."""
    return (
        host.cpus >= needs.cpu_min
        and host.memory_mib >= needs.memory_min_mib
        and len(gpus_matching(host, needs)) >= needs.gpu_count_min
    )


def taken(host: HostView, fit: Fit) -> HostView:
    """The host after a job got `fit`."""
    gpus = tuple(replace(gpu, held=True) if gpu.uuid in fit.gpu_uuids else gpu for gpu in host.gpus)
    return replace(
        host, cpus_free=host.cpus_free - fit.cpus, memory_free_mib=host.memory_free_mib - fit.memory_mib, gpus=gpus
    )


def shortfall(hosts: Sequence[HostView], needs: Requirements) -> dict[str, Any]:
    """The numbers of the host that comes closest to one job's needs; empty without hosts.

    `host` is its name, `short` lists what it lacks: "gpus", "cpus", "memory_mib". For each of these: the need under its
    name, `<name>_free`, `<name>_total`; for matching GPUs also `gpus_held` and `gpus_outside`, used by strangers.
    """
    if not hosts:
        return {}
    closest = min(hosts, key=lambda host: _distance(host, needs))
    return {"host": closest.name, **_numbers(closest, needs)}


def host_offers(
    hosts: Sequence[HostView], needs: Requirements, *, backend: str = "hosts", image: str | None = None
) -> list[Offer]:
    """Each host as an offer with its total resources, including those where the job doesn't fit now.

    Idle hosts first, those with the least to spare before others, then busy ones, then unavailable ones, by name.
    `detail["code"]` is `idle`, `image_not_supported`, or a Miss's code.
    """
    order = [Availability.IDLE, Availability.BUSY, Availability.NOT_AVAILABLE]
    ranked = []
    for host in hosts:
        outcome = fit(host, needs)
        offer = _offer(host, needs, outcome, backend, image)
        spare = (outcome.gpus_left, outcome.cpus_left) if isinstance(outcome, Fit) else (0, 0)
        ranked.append((order.index(offer.availability), *spare, host.name, offer))
    return [offer for *_, offer in sorted(ranked, key=lambda entry: entry[:-1])]


def _offer(host: HostView, needs: Requirements, outcome: Fit | Miss, backend: str, image: str | None) -> Offer:
    gpus = gpus_matching(host, needs) or host.gpus
    detail: dict[str, Any]
    if image is not None and not host.has_engine:
        availability, detail = Availability.NOT_AVAILABLE, {"code": PlaceCode.IMAGE_NOT_SUPPORTED, "image": image}
    elif isinstance(outcome, Miss):
        availability = Availability.BUSY if outcome.code == PlaceCode.BUSY else Availability.NOT_AVAILABLE
        detail = {"code": outcome.code, **outcome.data}
    else:
        availability = Availability.IDLE
        detail = {
            "code": "idle",
            "gpus_free": sum(gpu.free for gpu in gpus),
            "gpus_total": len(gpus),
            "cpus_free": host.cpus_free,
            "memory_mib_free": host.memory_free_mib,
        }
    return Offer(
        backend=backend,
        region=str(host.labels.get("region", "")),
        instance_type=host.name,
        cpus=host.cpus,
        memory_mib=host.memory_mib,
        gpu_name=gpus[0].name if gpus else "",
        gpu_count=len(gpus),
        gpu_memory_mib=min((gpu.memory_mib for gpu in gpus), default=0),
        availability=availability,
        detail=detail,
    )


def gpus_matching(host: HostView, needs: Requirements) -> list[GpuView]:
    """The host's GPUs of the required kind, free or not; none where no GPU is needed.

    MIG devices are for jobs that need one GPU: no process can use two of them.
    """
    return _matching(host.gpus, needs)


def _matching(gpus: Sequence[GpuView], needs: Requirements) -> list[GpuView]:
    if needs.gpu_count_min == 0:
        return []
    models = {(gpu.name, gpu.memory_mib) for gpu in gpus}
    wanted = {
        (name, memory_mib)
        for name, memory_mib in models
        if gpu_matches(name, memory_mib, needs) and (needs.gpu_count_min == 1 or not is_part(name))
    }
    if wanted == models:
        return list(gpus)
    return [gpu for gpu in gpus if (gpu.name, gpu.memory_mib) in wanted]


def _choose(free: Sequence[GpuView], count: int) -> Sequence[GpuView] | None:
    """`count` GPUs: the smallest ones, all of one model if possible. None if there are too few."""
    if len(free) < count:
        return None
    ordered = sorted(free, key=lambda gpu: (gpu.memory_mib, gpu.name, gpu.index))
    models: dict[tuple[int, str], list[GpuView]] = defaultdict(list)
    for gpu in ordered:
        models[gpu.memory_mib, gpu.name].append(gpu)
    for alike in models.values():
        if len(alike) >= count:
            return alike[:count]
    return ordered[:count]


def _numbers(host: HostView, needs: Requirements) -> dict[str, Any]:
    """The resources that the host lacks, and for each of them what is needed, free and there in total."""
    gpus = gpus_matching(host, needs)
    free = sum(gpu.free for gpu in gpus)
    short: list[str] = []
    numbers: dict[str, Any] = {"short": short}
    if free < needs.gpu_count_min:
        short.append("gpus")
        numbers |= {
            "gpus": needs.gpu_count_min,
            "gpus_free": free,
            "gpus_held": sum(gpu.held for gpu in gpus),
            "gpus_outside": sum(gpu.stranger is not None and not gpu.held for gpu in gpus),
            "gpus_total": len(gpus),
        }
    for name, wanted, left, total in (
        ("cpus", needs.cpu_min, host.cpus_free, host.cpus),
        ("memory_mib", needs.memory_min_mib, host.memory_free_mib, host.memory_mib),
    ):
        if left < wanted:
            short.append(name)
            numbers |= {name: wanted, f"{name}_free": left, f"{name}_total": total}
    return numbers


def _distance(host: HostView, needs: Requirements) -> tuple[int, int, int, int, int]:
    """How much the host lacks for the job: first in total, then now."""
    gpus = gpus_matching(host, needs)
    never = (
        max(0, needs.gpu_count_min - len(gpus)) + max(0, needs.cpu_min - host.cpus),
        max(0, needs.memory_min_mib - host.memory_mib),
    )
    now = (
        max(0, needs.gpu_count_min - sum(gpu.free for gpu in gpus)),
        max(0, needs.cpu_min - host.cpus_free),
        max(0, needs.memory_min_mib - host.memory_free_mib),
    )
    return (*never, *now)
