"""What kinds of clusters share: their engines allocate parts of machines to jobs, which all have one user there."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from django.conf import settings
from django.utils.functional import Promise
from django.utils.translation import gettext as _, gettext_noop

from dstackweb.backends.contract import (
    Allocation,
    Availability,
    Cloud,
    CloudInstance,
    InstanceOrder,
    LaunchFailed,
    LaunchFailure,
    Offer,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceReading,
    SourceSpec,
)
from dstackweb.backends.kinds import ConnectionReport, Kind, ReportLine, ReportPart
from dstackweb.backends.models import Backend
from dstackweb.spec.effective import Requirements
from dstackweb.spec.fields import Text, readable
from dstackweb.spec.units import parse_memory

REGION = "cluster"
"""Of an engine whose clusters have no parts."""
FRESH_S = 10.0
PROJECTS = (
    gettext_noop("a list of projects, such as team-a"),
    gettext_noop("Projects that may use it. Their jobs have one user: they can read each other's files and secrets"),
)
"""The texts of the setting `projects`."""
AVAILABILITY = {"cluster_free": Availability.AVAILABLE, "cluster_uncounted": Availability.UNKNOWN}
"""By the code of an offer; of others nothing is free now."""


class EngineRefused(SourceFailed):
    """The engine answers that it did not do it: `text` is the last line of what it says.

    For a question that is no answer, as any SourceFailed.
    """

    def __init__(self, text: str) -> None:
        super().__init__(SourceFailure.SERVICE_ERROR, text=text)
        self.text = text


def unreachable(endpoint: str, text: str) -> SourceFailed:
    return SourceFailed(SourceFailure.UNREACHABLE, endpoint=endpoint, text=text[:300])


class ClusterBackend(Cloud):
    """The driver of one cluster (`contract.Counted`), with one source: `found_offers` makes offers of its value."""

    sources: ClassVar[Mapping[str, SourceSpec]]
    own_user: ClassVar[str] = (
        "jobs on the server's own machine may have its user, and reach its secret key: use a cluster on other "
        "machines, or set DSTACKWEB_SHARED_UID=1 where everyone who may submit runs is trusted"
    )
    """Why jobs may not have the server's user."""

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self.gpu_memory = gpu_memory(backend.config.get("gpu_memory") or ())

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """Whether its jobs may run where the server's files are."""

    @property
    def shares_servers_user(self) -> bool:
        """Whether jobs would have the server's own user, and no one has allowed it.

        Where that is root, the agent gives jobs another user.
        """
        return self.is_here and os.getuid() != 0 and not settings.DSTACKWEB_SHARED_UID

    @abstractmethod
    def check(self) -> Iterable[ReportLine]:
        """What the cluster says of itself, for a connection test. Changes nothing. Raises SourceFailed."""

    # Offers: `fetch` asks the cluster, in the background; `join` never does.

    @property
    def key(self) -> SourceKey:
        return SourceKey(next(iter(self.sources)), "")

    def wanted(self) -> Sequence[SourceKey]:
        return [self.key]

    def join(
        self, readings: Mapping[SourceKey, SourceReading], requirements: Requirements, *, image: str | None = None
    ) -> list[Offer]:
        reading = readings[self.key]
        if reading.value is None:
            raise SourceFailed(**{"code": SourceFailure.NOT_READ, **(reading.error or {})})
        offers = self.found_offers(reading.value, requirements, image)
        return sorted(offers, key=lambda offer: -offer.detail.get("fits", 0))

    @abstractmethod
    def take(self, found: Any, order: Allocation) -> Any:
        """The source's value without what an order takes; None where no machine has room for it now.

        It takes the fullest machine that has room, as engines do that pack.
        """

    @abstractmethod
    def found_offers(self, found: Any, needs: Requirements, image: str | None) -> Iterable[Offer]:
        """One offer for each type of GPU, or one without: those that could ever fit on one of its machines."""

    def offer(
        self,
        needs: Requirements,
        image: str | None,
        gpu: str,
        *,
        code: str = "",
        fits: int,
        free: float,
        total: float,
        region: str = REGION,
        gpu_name: str = "",
        gpu_memory_mib: int = 0,
        **more: int,
    ) -> Offer:
        """What a node of the run would get: just what it needs. `gpu` is a type of GPU by the engine's name.

        `fits` jobs of this size may start now; `free` of `total` GPUs, or CPUs, are free.
        """
        count = needs.gpu_count_min
        code = code or ("cluster_free" if fits else "cluster_busy")
        availability = AVAILABILITY.get(code, Availability.BUSY)
        what = "gpu" if count else "cpu"
        detail = {"code": code, "fits": fits, "free": int(free), "total": int(total), "what": what, **more}
        if image is not None:
            availability, detail = Availability.NOT_AVAILABLE, {"code": "image_not_supported"}
        return Offer(
            backend=self.name,
            region=region,
            instance_type=f"gpu:{gpu}" if gpu else "gpu" if count else "cpu",
            cpus=needs.cpu_min,
            memory_mib=needs.memory_min_mib,
            gpu_name=gpu_name or gpu.upper(),
            gpu_count=count,
            gpu_memory_mib=gpu_memory_mib or (self.gpu_memory.get(gpu.lower(), 0) if count else 0),
            availability=availability,
            detail=detail,
        )

    # Instances: each call may be repeated, doubled or lost.

    def regions(self) -> Sequence[str]:
        return [REGION]

    def launch(self, order: InstanceOrder) -> CloudInstance:
        if self.shares_servers_user:
            raise LaunchFailed(LaunchFailure.NOT_ALLOWED, self.own_user)
        return self.submit(order)

    @abstractmethod
    def submit(self, order: InstanceOrder) -> CloudInstance:
        """As `Cloud.launch`."""


def gpu_of(order: Allocation) -> str:
    """The type of GPU by the engine's name; empty for any."""
    return order.instance_type.partition(":")[2]


class ClusterKind(Kind):
    """A kind of cluster. A connection test asks its driver's `check`."""

    driver_class: type[ClusterBackend]
    costs_money = False
    is_machine = False
    can_test = True
    part: ClassVar[str | Promise]
    """The title of a connection test's lines."""
    engine: ClassVar[str | Promise]
    """What answers, as a line of the test."""
    answers: ClassVar[str | Promise]
    """The summary of a test that went well."""

    def projects(self, config: Mapping[str, Any]) -> Sequence[str]:
        return tuple(config.get("projects") or ())

    def cluster(self, config: Mapping[str, Any]) -> str:
        return self.location(config)

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        match detail.get("code"):
            case "cluster_free" | "cluster_busy":
                gpus, cpus = _("%(free)d of %(total)d GPUs free"), _("%(free)d of %(total)d CPUs free")
                return (gpus if detail.get("what") == "gpu" else cpus) % {"free": 0, "total": 0, **detail}
            case "image_not_supported":
                return _("Runs with an image need hosts with Docker or Podman.")
        return super().offer_detail(detail)

    def test_connection(self, config: Mapping[str, Any], secret: str) -> ConnectionReport:
        driver = self.driver_class(Backend(config=config, secret=secret))
        try:
            if driver.shares_servers_user:
                lines = [ReportLine(_("Jobs' user"), "failed", "✗", driver.own_user)]
            else:
                lines = list(driver.check())
        except EngineRefused as error:
            lines = [ReportLine(str(self.engine), "failed", "✗", error.text)]
        except SourceFailed as error:
            said = self.source_failure({"code": error.code, **error.data})
            lines = [ReportLine(str(self.engine), "failed", "✗", said)]
        states = {line.state for line in lines}
        state = next((one for one in ("failed", "warning") if one in states), "ok")
        summary = _("This cannot be used as it is.") if state == "failed" else str(self.answers)
        return ConnectionReport(state, summary, (ReportPart(str(self.part), tuple(lines), state),))


def gpu_memory(lines: Sequence[str]) -> dict[str, int]:
    """MiB by type of GPU, from lines such as `a100=80GB`. Raises ValueError."""
    pairs = (line.partition("=") for line in lines)
    return {name.strip().lower(): parse_memory(size.strip()) for name, _, size in pairs}


GpuSizes = Annotated[tuple[Text, ...], readable(gpu_memory)]
"""A setting of lines for `gpu_memory`."""
