"""What kinds of clusters share: their engines allocate parts of machines to jobs, which all have one user there."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from django.conf import settings
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from pydantic import AfterValidator

from dstackweb.backends.contract import (
    Availability,
    Cloud,
    Offer,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceReading,
)
from dstackweb.backends.kinds import ConnectionReport, Kind, ReportLine, ReportPart
from dstackweb.spec.effective import Requirements
from dstackweb.spec.fields import Text
from dstackweb.spec.units import parse_memory

REGION = "cluster"
"""Of an engine whose clusters have no parts."""
FRESH_S = 10.0
OWN_USER = (
    "jobs on the server's own machine may have its user, and reach its secret key: use a cluster on other machines, or "
    "set DSTACKWEB_SHARED_UID=1 where everyone who may submit runs is trusted"
)
PROJECTS = (
    gettext_noop("a list of projects, such as team-a"),
    gettext_noop("Projects that may use it. Their jobs have one user: they can read each other's files and secrets"),
)
"""The texts of the setting `projects`."""
AVAILABILITY = {"cluster_free": Availability.AVAILABLE, "cluster_uncounted": Availability.UNKNOWN}
"""By the code of an offer; of others nothing is free now."""


class EngineRefused(Exception):
    """The engine answers that it did not do it: `text` is the last line of what it says."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class ClusterBackend(Cloud):
    """The driver of one cluster, with one source of offers: `found_offers` makes them of its value."""

    name: str
    key: ClassVar[SourceKey]

    def regions(self) -> Sequence[str]:
        return [REGION]

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
    def found_offers(self, found: Any, needs: Requirements, image: str | None) -> Iterable[Offer]:
        """One offer for each type of GPU, or one without: those that could ever fit on one of its machines."""

    def offer(self, needs: Requirements, image: str | None, detail: dict[str, Any], **what: Any) -> Offer:
        """What a node of the run would get: just what it needs. `what` are the offer's place and GPUs."""
        availability = AVAILABILITY.get(detail["code"], Availability.BUSY)
        if image is not None:
            availability, detail = Availability.NOT_AVAILABLE, {"code": "image_not_supported"}
        return Offer(
            backend=self.name,
            cpus=needs.cpu_min,
            memory_mib=needs.memory_min_mib,
            gpu_count=needs.gpu_count_min,
            availability=availability,
            detail=detail,
            **what,
        )


class ClusterKind(Kind, ABC):
    """A kind of cluster. A connection test asks it by `check`."""

    costs_money = False
    is_machine = False
    can_test = True
    part: ClassVar[str | Promise]
    """The title of a connection test's lines."""
    engine: ClassVar[str | Promise]
    """What answers, as a line of the test."""
    answers: ClassVar[str | Promise]
    """The summary of a test that went well."""
    own_user = OWN_USER
    """Why jobs may not have the server's user."""

    def projects(self, config: Mapping[str, Any]) -> Sequence[str]:
        return tuple(config.get("projects") or ())

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        match detail.get("code"):
            case "cluster_free" | "cluster_busy":
                gpus, cpus = _("%(free)d of %(total)d GPUs free"), _("%(free)d of %(total)d CPUs free")
                return (gpus if detail.get("what") == "gpu" else cpus) % {"free": 0, "total": 0, **detail}
            case "image_not_supported":
                return _("Runs with an image need hosts with Docker or Podman.")
        return super().offer_detail(detail)

    @abstractmethod
    def is_here(self, config: Mapping[str, Any]) -> bool:
        """Whether its jobs may run where the server's files are."""

    @abstractmethod
    def check(self, config: Mapping[str, Any], secret: str) -> Iterable[ReportLine]:
        """What the cluster says of itself. Changes nothing. Raises SourceFailed, EngineRefused."""

    def test_connection(self, config: Mapping[str, Any], secret: str) -> ConnectionReport:
        try:
            if shares_servers_user(self.is_here(config)):
                lines = [ReportLine(_("Jobs' user"), "failed", "✗", self.own_user)]
            else:
                lines = list(self.check(config, secret))
        except SourceFailed as error:
            said = self.source_failure({"code": error.code, **error.data})
            lines = [ReportLine(str(self.engine), "failed", "✗", said)]
        except EngineRefused as error:
            lines = [ReportLine(str(self.engine), "failed", "✗", error.text)]
        states = {line.state for line in lines}
        state = next((one for one in ("failed", "warning") if one in states), "ok")
        summary = _("This cannot be used as it is.") if state == "failed" else str(self.answers)
        return ConnectionReport(state, summary, (ReportPart(str(self.part), tuple(lines), state),))


def shares_servers_user(is_here: bool) -> bool:
    """Whether jobs of a cluster that `is_here` would have the server's own user, and no one has allowed it.

    Where that is root, the agent gives jobs another user.
    """
    return is_here and os.getuid() != 0 and not settings.DSTACKWEB_SHARED_UID


def gpu_memory(lines: Sequence[str]) -> dict[str, int]:
    """MiB by type of GPU, from lines such as `a100=80GB`. Raises ValueError."""
    pairs = (line.partition("=") for line in lines)
    return {name.strip().lower(): parse_memory(size.strip()) for name, _, size in pairs}


def _sizes(lines: tuple[str, ...]) -> tuple[str, ...]:
    gpu_memory(lines)
    return lines


GpuSizes = Annotated[tuple[Text, ...], AfterValidator(_sizes)]
"""A setting of lines for `gpu_memory`."""
