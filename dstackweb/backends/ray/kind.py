"""Ray as a kind of backend: settings, words, and the driver: free capacity is offers, its API's jobs are instances."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Self
from urllib.parse import quote, urlsplit

from django.utils import timezone
from django.utils.translation import gettext as _, gettext_lazy, gettext_noop
from pydantic import AfterValidator, Field, SecretStr, model_validator

from dstackweb.backends.clusters import FRESH_S, PROJECTS, REGION, ClusterBackend, ClusterKind, GpuSizes, gpu_of
from dstackweb.backends.contract import (
    Allocation,
    CloudInstance,
    InstanceOrder,
    InstanceState,
    LaunchFailed,
    LaunchFailure,
    Offer,
    SourceFailed,
    SourceFailure,
    SourceKey,
    SourceSpec,
    nonsense,
)
from dstackweb.backends.kinds import Kind, ReportLine
from dstackweb.backends.models import Backend
from dstackweb.backends.ray import dashboard
from dstackweb.backends.ray.dashboard import CallFailed, Cluster, Dashboard, Job
from dstackweb.lib.network import is_exposed, is_local
from dstackweb.spec.effective import Requirements
from dstackweb.spec.fields import Keys, Text, key, optional, readable

KEPT_S, DELETED_AT_ONCE = 3600.0, 20
"""Ray keeps ended jobs for ever, and its list takes longer with each: ours are deleted after this."""
INVALID = 400
ENTRYPOINT = (
    'script=$(python3 -c "import json, os; '
    "print(json.loads(os.environ['RAY_JOB_CONFIG_JSON_ENV_VAR'])['metadata']['" + dashboard.SCRIPT + "'])\") "
    '&& unset RAY_JOB_CONFIG_JSON_ENV_VAR && eval "$script"'
)
"""A job's command is in process lists and logs, and its `runtime_env` in logs: the script comes in the metadata."""


def amounts(lines: Sequence[str]) -> dict[str, float]:
    """Amounts by resource, from lines such as `batch=1`. Raises ValueError."""
    found = {}
    for line in lines:
        name, _, amount = line.partition("=")
        found[name.strip()] = float(amount)
        if not name.strip() or not 0 < found[name.strip()] < 1e6:
            raise ValueError(f"{line[:80]!r} is not a name and an amount")
    return found


def _address(text: str) -> str:
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ValueError(_("it contains a user name or a password"))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(_("%(text)s is not an http(s) URL") % {"text": repr(text[:80])})
    return text.rstrip("/")


def _resources(lines: tuple[str, ...]) -> None:
    if {"CPU", "GPU", "memory"} & set(amounts(lines)):
        raise ValueError(_("CPUs, GPUs and memory are what the run asks for"))


class RaySettings(Keys):
    """What an admin sets."""

    projects: Annotated[tuple[Text, ...], Field(min_length=1, max_length=100)] = key(*PROJECTS)
    address: Annotated[str, AfterValidator(_address)] = key(
        gettext_noop("a URL, such as https://ray.example:8265"), gettext_noop("Address of the cluster's dashboard")
    )
    token: SecretStr | None = optional(gettext_noop("text"), gettext_noop("Token, where the dashboard wants one"))
    ca_file: Text | None = optional(
        gettext_noop("a path"),
        gettext_noop("Certificates to trust, a file of the server; empty: the system's"),
        title="CA file",
    )
    insecure: bool = key(
        gettext_noop("true or false"),
        gettext_noop("Allow plain HTTP to another machine"),
        default=False,
        title="Plain HTTP over a network",
    )
    resources: Annotated[tuple[Text, ...], readable(_resources)] = key(
        gettext_noop("a list such as batch=1"),
        gettext_noop("Custom resources that each job takes, which keep runs on nodes that have them"),
        default=(),
    )  # fmt: skip
    gpu_memory: GpuSizes = key(
        gettext_noop("a list such as A100=80GB, L4=24GB"),
        gettext_noop("Memory of each model of GPU, which Ray does not know"),
        default=(),
        title="GPU memory",
    )

    @model_validator(mode="after")
    def _not_exposed(self) -> Self:
        if is_exposed(self.address) and not self.insecure:
            raise ValueError(_("`address` is plain HTTP to another machine: use HTTPS, or set `insecure`"))
        return self


class RayBackend(ClusterBackend):
    """What a job takes is just what a node of the run needs."""

    sources = {"nodes": SourceSpec(FRESH_S, Cluster, ("address", "ca_file"), moves=True)}

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        config = backend.config
        self.more: Mapping[str, float] = amounts(config.get("resources") or ())
        token = Kind.secrets_of(backend.secret).get("token", "")
        self.dashboard = Dashboard(config["address"].rstrip("/"), token, config.get("ca_file") or "")

    @property
    def is_here(self) -> bool:
        return is_local(self.dashboard.address)

    def check(self) -> Iterator[ReportLine]:
        """Ask for the version and the jobs."""
        version = dict(self.dashboard.call("GET", "api/version").value or {})
        jobs = self.dashboard.call("GET", "api/jobs/").value
        yield ReportLine("Ray", "ok", "✓", str(version.get("ray_version", "?")))
        if not isinstance(jobs, list):
            yield ReportLine(_("Jobs"), "failed", "✗", _("no Jobs API"), _("Install ray[default] there."))

    def fetch(self, key: SourceKey) -> Cluster:
        nodes = self.dashboard.call("GET", "api/v0/nodes?limit=10000")
        status = self.dashboard.call("GET", "api/cluster_status")
        listed = self.dashboard.call("GET", "api/jobs/")
        with _read():
            return dashboard.cluster(nodes.value, status.value, dashboard.jobs(listed.value))

    def take(self, found: Cluster, order: Allocation) -> Cluster | None:
        """Take it from the fullest node that has room; Ray keeps jobs without GPUs off nodes that have some."""
        size = self._size(order)
        room = {id: count for id, node in found.nodes.items() if (count := node.fits(size))}
        if not room:
            return None
        fullest = min(room, key=lambda id: (not order.gpu_count and bool(found.nodes[id].total.get("GPU")), room[id]))
        return replace(found, nodes={**found.nodes, fullest: found.nodes[fullest].take(size)})

    def _size(self, order: Allocation) -> dict[str, float]:
        return dashboard.size(order.cpus, order.memory_mib, gpu_of(order), order.gpu_count, self.more)

    def found_offers(self, found: Cluster, needs: Requirements, image: str | None) -> Iterator[Offer]:
        count = needs.gpu_count_min
        what = "GPU" if count else "CPU"
        for model in dashboard.models(found.nodes.values()) if count else [""]:
            size = dashboard.size(needs.cpu_min, needs.memory_min_mib, model, count, self.more)
            nodes = [node for node in found.nodes.values() if not count or node.gpu == model]
            if any(node.fits(size, empty=True) for node in nodes):
                fits = sum(node.fits(size) for node in nodes)
                yield self.offer(
                    needs,
                    image,
                    model,
                    code="cluster_uncounted" if fits and not found.is_counted else "",
                    fits=fits,
                    free=sum(node.free.get(what, 0.0) for node in nodes),
                    total=sum(node.total.get(what, 0.0) for node in nodes),
                )

    def submit(self, order: InstanceOrder) -> CloudInstance:
        """Ray takes one job of a name. It would keep what doesn't fit, in a queue that no one sees: that is refused."""
        return self._find(order) or self._submit(order)

    def _find(self, order: InstanceOrder) -> CloudInstance | None:
        answer = self.dashboard.call("GET", f"api/jobs/{quote(order.instance, safe='')}")
        with _read():
            return None if answer.value is None else dashboard.instance(dashboard.job(answer.value), REGION, answer.at)

    def _submit(self, order: InstanceOrder) -> CloudInstance:
        size, nodes = self._size(order), self.fetch(self.key).nodes.values()
        if not any(node.fits(size) for node in nodes):
            full = any(node.fits(size, empty=True) for node in nodes)
            code = LaunchFailure.NO_ROOM if full else LaunchFailure.NO_CAPACITY
            raise LaunchFailed(code, "no node of the cluster has room for it")
        try:
            if self.dashboard.call("POST", "api/jobs/", _request(order, size)).value is None:
                raise SourceFailed(SourceFailure.SERVICE_ERROR, text="no Jobs API")
        except CallFailed as error:
            if found := self._find(order):
                return found  # the same order came twice
            if error.status == INVALID:
                raise LaunchFailed(LaunchFailure.REFUSED, error.text) from error
            raise
        name = order.instance
        return CloudInstance(name, name, REGION, InstanceState.STARTING, launched_at=timezone.now())

    def instances(self, region: str, deployment: str) -> list[CloudInstance]:
        answer = self.dashboard.call("GET", "api/jobs/")
        with _read():
            ours = list(dashboard.jobs(answer.value, deployment))
            found = [(job, dashboard.instance(job, region, answer.at)) for job in ours]
        self._forget(job.name for job in ours if job.is_over and answer.at - (job.ended or answer.at) > KEPT_S)
        return [replace(one, state=InstanceState.ENDING) if self._is_left(job) else one for job, one in found]

    def _is_left(self, job: Job) -> bool:
        """Whether a job is there whose supervisor Ray could not reach, and called failed; it is stopped then."""
        if not (job.is_over and job.error == dashboard.LOST):
            return False
        try:
            answer = self.dashboard.call("POST", f"api/jobs/{quote(job.name, safe='')}/stop").value
        except CallFailed:
            return True
        return isinstance(answer, dict) and bool(answer.get("stopped"))

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        """Ray sends SIGTERM to all processes of a job, and SIGKILL after its `RAY_JOB_STOP_WAIT_TIME_S`."""
        failed: CallFailed | None = None
        for cloud_id in cloud_ids:
            try:
                self.dashboard.call("POST", f"api/jobs/{quote(cloud_id, safe='')}/stop")
            except CallFailed as error:
                failed = error
        if failed:
            raise failed

    def _forget(self, names: Iterator[str]) -> None:
        """Delete some ended jobs; whatever fails is tried again at the next look."""
        for name in islice(names, DELETED_AT_ONCE):
            with suppress(SourceFailed):
                self.dashboard.call("DELETE", f"api/jobs/{quote(name, safe='')}")


def _request(order: InstanceOrder, size: Mapping[str, float]) -> dict[str, Any]:
    """Ray's own names: the command's CPUs, GPUs and memory are fields, other resources a mapping."""
    known = ("CPU", "GPU", "memory")
    return {
        "submission_id": order.instance,
        "entrypoint": ENTRYPOINT,
        "entrypoint_num_cpus": size.get("CPU", 0),
        "entrypoint_num_gpus": size.get("GPU", 0),
        "entrypoint_memory": int(size.get("memory", 0)),
        "entrypoint_resources": {name: amount for name, amount in size.items() if name not in known},
        "metadata": {
            dashboard.DEPLOYMENT: order.deployment,
            dashboard.SIZE: json.dumps(size),
            dashboard.SCRIPT: order.user_data,
            "job_name": f"{order.project}/{order.run}",
        },
    }


@contextmanager
def _read() -> Iterator[None]:
    """Reads an answer, which may be of any kind."""
    try:
        yield
    except dashboard.ODD as error:
        raise nonsense("Ray", text=f"{type(error).__name__}: {error}"[:200]) from error


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
