"""Ray as a kind of backend: its settings and words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop
from pydantic import AfterValidator, Field, SecretStr, model_validator

from dstackweb.backends.clusters import PROJECTS, ClusterKind, GpuSizes
from dstackweb.backends.contract import SourceFailure
from dstackweb.backends.kinds import ReportLine
from dstackweb.backends.ray.dashboard import Dashboard
from dstackweb.backends.ray.driver import RayBackend, amounts
from dstackweb.lib.network import is_exposed, is_local
from dstackweb.spec.fields import Keys, Text, key


def _address(text: str) -> str:
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ValueError(_("it contains a user name or a password"))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(_("%(text)s is not an http(s) URL") % {"text": repr(text[:80])})
    return text.rstrip("/")


def _resources(lines: tuple[str, ...]) -> tuple[str, ...]:
    if {"CPU", "GPU", "memory"} & set(amounts(lines)):
        raise ValueError(_("CPUs, GPUs and memory are what the run asks for"))
    return lines


class RaySettings(Keys):
    """What an admin sets."""

    projects: Annotated[tuple[Text, ...], Field(min_length=1, max_length=100)] = key(*PROJECTS)
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
    gpu_memory: GpuSizes = key(
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


class RayKind(ClusterKind):
    name = "ray"
    label = "Ray"
    driver_class = RayBackend
    schema = RaySettings
    part, engine, answers = gettext_lazy("Dashboard"), "Ray", gettext_lazy("Ray answers.")
    secrets_are_for = "address"
    setup_hint = gettext_lazy("Runs become jobs of a Ray cluster, submitted when there is room for them.")

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
                return what + _(": ") + f"{str(data['text']).rstrip('. ')}."
        return super().source_failure(error)

    def offer_detail(self, detail: Mapping[str, Any]) -> str:
        if detail.get("code") == "cluster_uncounted":
            return _("Ray does not say how much is used.")
        return super().offer_detail(detail)

    def is_here(self, config: Mapping[str, Any]) -> bool:
        return is_local(config["address"])

    def check(self, config: Mapping[str, Any], secret: str) -> Iterator[ReportLine]:
        """Ask for the version and the jobs."""
        token = self.secrets_of(secret).get("token", "")
        dashboard = Dashboard(config["address"].rstrip("/"), token, config.get("ca_file") or "")
        version = dict(dashboard.call("GET", "api/version").value or {})
        jobs = dashboard.call("GET", "api/jobs/").value
        yield ReportLine("Ray", "ok", "✓", str(version.get("ray_version", "?")))
        if not isinstance(jobs, list):
            yield ReportLine(_("Jobs"), "failed", "✗", _("no Jobs API"), _("Install ray[default] there."))
