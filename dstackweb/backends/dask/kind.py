"""Dask as a kind of backend: its settings and words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from typing_extensions import TypedDict

from dstackweb.backends.clusters import ClusterKind
from dstackweb.backends.dask.driver import DaskBackend
from dstackweb.backends.dask.scheduler import Scheduler
from dstackweb.backends.dask.settings import DaskSettings, tls
from dstackweb.backends.kinds import ReportLine
from dstackweb.lib.network import is_local


class About(TypedDict):
    """`other` are versions of workers, by address, that differ from the scheduler's."""

    distributed: str
    workers: int
    other: dict[str, str]


class DaskKind(ClusterKind):
    name = "dask"
    label = "Dask"
    driver_class = DaskBackend
    schema = DaskSettings
    part, engine, answers = gettext_lazy("Cluster"), gettext_lazy("Scheduler"), gettext_lazy("The scheduler answers.")
    setup_hint = gettext_lazy("Runs become tasks of a Dask cluster, submitted when a worker has room for them.")

    def settle(self, config: Mapping[str, Any], stored: str = "") -> tuple[dict[str, Any], str]:
        plain, secret = super().settle(config, stored)
        tls(plain, self.secrets_of(secret))
        return plain, secret

    def location(self, config: Mapping[str, Any]) -> str:
        return str(config["scheduler"])

    def is_here(self, config: Mapping[str, Any]) -> bool:
        return is_local(config["scheduler"])

    def check(self, config: Mapping[str, Any], secret: str) -> Iterator[ReportLine]:
        """Ask for versions. The scheduler knows our questions then."""
        about = Scheduler(config["scheduler"], tls(config, self.secrets_of(secret))).ask("about", About)
        yield ReportLine(_("Scheduler"), "ok", "✓", f"distributed {about['distributed']}")
        if about["workers"]:
            yield ReportLine(_("Workers"), "ok", "✓", str(about["workers"]))
        else:
            yield ReportLine(_("Workers"), "warning", "!", _("none"), _("Start workers, or scale the cluster."))
        for address, version in sorted(about["other"].items())[:10]:
            found = _("distributed %(worker)s, the scheduler has %(scheduler)s") % {
                "worker": version, "scheduler": about["distributed"],
            }  # fmt: skip
            yield ReportLine(address, "warning", "!", found, _("Install the same version on all machines."))
