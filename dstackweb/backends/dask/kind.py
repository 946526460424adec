"""Dask as a kind of backend: its settings and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from typing_extensions import TypedDict

from dstackweb.backends.contract import SourceFailed
from dstackweb.backends.dask.driver import OWN_USER, DaskBackend, shares_servers_user
from dstackweb.backends.dask.scheduler import Scheduler
from dstackweb.backends.dask.settings import DaskSettings, tls
from dstackweb.backends.kinds import ConnectionReport, Kind, ReportLine, ReportPart


class About(TypedDict):
    """`other` are versions of workers, by address, that differ from the scheduler's."""

    distributed: str
    workers: int
    other: dict[str, str]


class DaskKind(Kind):
    name = "dask"
    label = "Dask"
    driver_class = DaskBackend
    schema = DaskSettings
    costs_money = False
    is_machine = False
    can_test = True
    setup_hint = gettext_lazy("Runs become tasks of a Dask cluster, submitted when a worker has room for them.")

    def projects(self, config: Mapping[str, Any]) -> Sequence[str]:
        return tuple(config.get("projects") or ())

    def settle(self, config: Mapping[str, Any], stored: str = "") -> tuple[dict[str, Any], str]:
        plain, secret = super().settle(config, stored)
        tls(plain, self.secrets_of(secret))
        return plain, secret

    def location(self, config: Mapping[str, Any]) -> str:
        return str(config["scheduler"])

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        data = {"free": 0, "total": 0, **detail}
        match detail.get("code"):
            case "cluster_free" | "cluster_busy" if detail.get("what") == "gpu":
                return _("%(free)d of %(total)d GPUs free") % data
            case "cluster_free" | "cluster_busy":
                return _("%(free)d of %(total)d CPUs free") % data
            case "image_not_supported":
                return _("Runs with an image need hosts with Docker or Podman.")
        return super().offer_detail(detail)

    def test_connection(self, config: Mapping[str, Any], secret: str) -> ConnectionReport:
        """Ask for versions. Changes nothing, but that the scheduler knows our questions then."""
        if shares_servers_user(config["scheduler"]):
            return _report(ReportLine(_("Jobs' user"), "failed", "✗", OWN_USER))
        try:
            scheduler = Scheduler(config["scheduler"], tls(config, self.secrets_of(secret)))
            about = scheduler.ask("about", About)
        except SourceFailed as error:
            said = self.source_failure({"code": error.code, **error.data})
            return _report(ReportLine(_("Scheduler"), "failed", "✗", said))
        lines = [ReportLine(_("Scheduler"), "ok", "✓", f"distributed {about['distributed']}")]
        if about["workers"]:
            lines.append(ReportLine(_("Workers"), "ok", "✓", str(about["workers"])))
        else:
            lines.append(ReportLine(_("Workers"), "warning", "!", _("none"), _("Start workers, or scale the cluster.")))
        for address, version in sorted(about["other"].items())[:10]:
            found = _("distributed %(worker)s, the scheduler has %(scheduler)s") % {
                "worker": version, "scheduler": about["distributed"],
            }  # fmt: skip
            lines.append(ReportLine(address, "warning", "!", found, _("Install the same version on all machines.")))
        return _report(*lines)


def _report(*lines: ReportLine) -> ConnectionReport:
    states = {line.state for line in lines}
    state = "failed" if "failed" in states else "warning" if "warning" in states else "ok"
    summary = _("This cannot be used as it is.") if state == "failed" else _("The scheduler answers.")
    return ConnectionReport(state, summary, (ReportPart(_("Cluster"), lines, state),))
