"""Ray as a kind of backend: its settings and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop
from pydantic import AfterValidator, Field, SecretStr, model_validator

from dstackweb.backends.contract import SourceFailed, SourceFailure
from dstackweb.backends.kinds import ConnectionReport, Kind, ReportLine, ReportPart
from dstackweb.backends.ray.dashboard import CallFailed, Dashboard
from dstackweb.backends.ray.driver import OWN_USER, RayBackend, amounts, gpu_memory, shares_servers_user
from dstackweb.lib.network import is_exposed
from dstackweb.spec.fields import Keys, Text, key


def _address(text: str) -> str:
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ValueError(_("it contains a user name or a password"))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(_("%(text)s is not an http(s) URL") % {"text": repr(text[:80])})
    return text.rstrip("/")


def _sizes(lines: tuple[str, ...]) -> tuple[str, ...]:
    gpu_memory(lines)
    return lines


def _resources(lines: tuple[str, ...]) -> tuple[str, ...]:
    if {"CPU", "GPU", "memory"} & set(amounts(lines)):
        raise ValueError(_("CPUs, GPUs and memory are what the run asks for"))
    return lines


class RaySettings(Keys):
    """What an admin sets."""

    projects: Annotated[tuple[Text, ...], Field(min_length=1, max_length=100)] = key(
        gettext_noop("a list of projects, such as team-a"),
        gettext_noop(
            "Projects that may use it. Their jobs have one user: they can read each other's files and secrets"
        ),
    )
    address: Annotated[str, AfterValidator(_address)] = key(
        gettext_noop("a URL, such as https://ray.example:8265"), gettext_noop("Address of the cluster's dashboard")
    )
    token: SecretStr | None = key(
        gettext_noop("text"), gettext_noop("Token, where the dashboard wants one"), default=None
    )
    ca_file: Text | None = key(
        gettext_noop("a path"),
        gettext_noop("Certificates to trust, a file of the server; empty: the system's"),
        default=None,
        title=gettext_noop("CA file"),
    )
    insecure: bool = key(
        gettext_noop("true or false"),
        gettext_noop("Allow plain HTTP to another machine"),
        default=False,
        title=gettext_noop("Plain HTTP over a network"),
    )
    resources: Annotated[tuple[Text, ...], AfterValidator(_resources)] = key(
        gettext_noop("a list such as batch=1"),
        gettext_noop("Custom resources that each job takes, which keep runs on nodes that have them"),
        default=(),
    )  # fmt: skip
    gpu_memory: Annotated[tuple[Text, ...], AfterValidator(_sizes)] = key(
        gettext_noop("a list such as A100=80GB, L4=24GB"),
        gettext_noop("Memory of each model of GPU, which Ray does not know"),
        default=(),
        title=gettext_noop("GPU memory"),
    )

    @model_validator(mode="after")
    def _not_exposed(self) -> Self:
        if is_exposed(self.address) and not self.insecure:
            raise ValueError(_("`address` is plain HTTP to another machine: use HTTPS, or set `insecure`"))
        return self


class RayKind(Kind):
    name = "ray"
    label = "Ray"
    driver_class = RayBackend
    schema = RaySettings
    costs_money = False
    is_machine = False
    can_test = True
    setup_hint = gettext_lazy("Runs become jobs of a Ray cluster, submitted when there is room for them.")

    def projects(self, config: Mapping[str, Any]) -> Sequence[str]:
        return tuple(config.get("projects") or ())

    def location(self, config: Mapping[str, Any]) -> str:
        return urlsplit(str(config["address"])).netloc

    def source_failure(self, error: Mapping[str, Any]) -> str:
        match error.get("code"):
            case SourceFailure.ACCESS_DENIED:
                return _("The cluster refuses the token.")
            case SourceFailure.THROTTLED:
                return _("The cluster refuses calls for a while.")
            case SourceFailure.UNREACHABLE:
                data = {"endpoint": "", "text": "", **error}
                what = _("%(endpoint)s is unreachable") % data
                return f"{what}: {str(data['text']).rstrip('. ')}."
        return super().source_failure(error)

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        data = {"free": 0, "total": 0, **detail}
        what = (
            _("%(free)d of %(total)d GPUs free")
            if detail.get("what") == "gpu"
            else _("%(free)d of %(total)d CPUs free")
        )
        match detail.get("code"):
            case "cluster_free" | "cluster_busy":
                return what % data
            case "cluster_uncounted":
                return _("Ray does not say how much is used.")
            case "image_not_supported":
                return _("Runs with an image need hosts with Docker or Podman.")
        return super().offer_detail(detail)

    def test_connection(self, config: Mapping[str, Any], secret: str) -> ConnectionReport:
        """Ask for the version and the jobs. Changes nothing."""
        if shares_servers_user(config["address"]):
            return _report([ReportLine(_("Jobs' user"), "failed", "✗", OWN_USER)])
        dashboard = Dashboard(
            config["address"].rstrip("/"), self.secrets_of(secret).get("token", ""), config.get("ca_file") or ""
        )
        try:
            version = dict(dashboard.call("GET", "api/version").value or {})
            jobs = dashboard.call("GET", "api/jobs/").value
        except SourceFailed as error:
            return _report([ReportLine("Ray", "failed", "✗", self.source_failure({"code": error.code, **error.data}))])
        except CallFailed as error:
            return _report([ReportLine("Ray", "failed", "✗", error.text)])
        lines = [ReportLine("Ray", "ok", "✓", str(version.get("ray_version", "?")))]
        if not isinstance(jobs, list):
            lines.append(ReportLine(_("Jobs"), "failed", "✗", _("no Jobs API"), _("Install ray[default] there.")))
        return _report(lines)


def _report(lines: Sequence[ReportLine]) -> ConnectionReport:
    state = "failed" if any(line.state == "failed" for line in lines) else "ok"
    summary = _("Ray answers.") if state == "ok" else _("This cannot be used as it is.")
    return ConnectionReport(state, summary, (ReportPart(_("Dashboard"), tuple(lines), state),))
