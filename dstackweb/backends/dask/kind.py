"""Dask as a kind of backend: settings, words, and the driver: free workers are offers, tasks are instances."""

from __future__ import annotations

import datetime as dt
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Annotated, Any, cast, final

from django.utils.translation import gettext as _, gettext_lazy, gettext_noop
from pydantic import AfterValidator, Field, SecretStr
from typing_extensions import TypedDict

from dstackweb.backends.clusters import FRESH_S, PROJECTS, REGION, ClusterBackend, ClusterKind, gpu_of
from dstackweb.backends.contract import (
    Allocation,
    CloudInstance,
    InstanceOrder,
    InstanceState,
    LaunchFailed,
    LaunchFailure,
    Offer,
    SourceKey,
    SourceSpec,
)
from dstackweb.backends.dask.fit import CPU, fits, taken
from dstackweb.backends.dask.scheduler import NOT_INSTALLED, Scheduler, Tls, is_installed
from dstackweb.backends.kinds import Kind, ReportLine
from dstackweb.backends.models import Backend
from dstackweb.lib.errors import Invalid
from dstackweb.lib.network import is_local
from dstackweb.spec.effective import Requirements
from dstackweb.spec.fields import Keys, Text, key, optional, readable
from dstackweb.spec.units import parse_memory

GRACE_S = 30.0
"""From SIGTERM to SIGKILL, for an instance whose worker is lost or whose task is cancelled (`agent.TERM_NOTICE_S`)."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
_PEM = re.compile(r"-----BEGIN ([A-Z ]+)-----(.*?)-----END \1-----", re.DOTALL)


@dataclass(frozen=True)
class Gpu:
    """A resource of workers that counts GPUs; 0 MiB if their memory is not known."""

    resource: str
    name: str
    memory_mib: int = 0


def gpus(lines: Sequence[str]) -> list[Gpu]:
    """GPUs of lines such as `GPU`, `GPU=A100` and `GPU=A100:80GB`. Raises ValueError."""
    found = []
    for line in lines:
        resource, _sep, about = line.partition("=")
        name, _sep, memory = about.partition(":")
        if not resource.strip():
            raise ValueError(_("`%(line)s` names no resource") % {"line": line})
        found.append(
            Gpu(resource.strip(), (name or resource).strip().upper(), parse_memory(memory.strip()) if memory else 0)
        )
    return found


GpuLines = Annotated[tuple[Text, ...], readable(gpus)]
"""Apart from the settings, where `gpus` is one of them."""


def pem(text: str) -> str:
    """PEM with its line breaks, which fields of one line lose. Raises ValueError."""
    parts = _PEM.findall(text)
    if not parts:
        raise ValueError(_("no PEM: it begins with -----BEGIN"))
    return "".join(
        f"-----BEGIN {name}-----\n{fill(''.join(body.split()), 64)}\n-----END {name}-----\n" for name, body in parts
    )


class DaskSettings(Keys):
    """Flat, as the form and the API show them."""

    projects: Annotated[tuple[Name, ...], Field(min_length=1, max_length=100)] = key(*PROJECTS)
    scheduler: Annotated[str, Field(pattern=r"^(tcp|tls)://([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}$")] = key(
        gettext_noop("an address such as tcp://dask.example:8786"),
        gettext_noop("Address of the scheduler; tls:// needs the certificates below"),
    )
    gpus: GpuLines = key(
        gettext_noop("a list such as GPU=A100:80GB"),
        gettext_noop("Resources of workers that count GPUs, with model and memory, which Dask does not know"),
        default=("GPU",),
        title="GPUs",
    )
    tls_ca: Annotated[str, AfterValidator(pem)] | None = optional(
        gettext_noop("a certificate in PEM"), gettext_noop("Certificate of the cluster's CA"), title="TLS CA"
    )
    tls_cert: Annotated[str, AfterValidator(pem)] | None = optional(
        gettext_noop("a certificate in PEM"), gettext_noop("Certificate of this client"), title="TLS certificate"
    )
    tls_key: SecretStr | None = optional(
        gettext_noop("a key in PEM"), gettext_noop("Private key of this client"), title="TLS key"
    )


def tls(config: Mapping[str, Any], secrets: Mapping[str, str]) -> Tls | None:
    """The certificates, where the address is tls://. Raises Invalid unless they are complete and fit together."""
    if not str(config.get("scheduler", "")).startswith("tls://"):
        return None
    texts = {**config, **secrets}
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if not texts.get(name):
            raise Invalid.at(name, msg=_("`%(name)s` is needed for tls://") % {"name": name})
    try:
        found = Tls(pem(texts["tls_ca"]), pem(texts["tls_cert"]), pem(texts["tls_key"]))
        found.context()
    except (ssl.SSLError, ValueError, OSError) as error:
        raise Invalid.at(
            "tls_key", msg=_("`tls_key` and the certificates do not fit together: %(error)s") % {"error": error}
        ) from error
    return found


Amount = Annotated[float, Field(gt=-1e18, lt=1e18)]
Moment = Annotated[float, Field(ge=0, lt=2**35)]
"""Seconds since 1970. Of neither is NaN or infinite, which msgpack has."""


class Worker(TypedDict):
    """A worker's resources and what is used of them: `cpus_used` by threads, `tasks` is how many threads are taken."""

    name: str
    threads: int
    tasks: int
    cpus_used: int
    memory_mib: int
    memory_used_mib: int
    resources: dict[str, Amount]
    resources_used: dict[str, Amount]
    running: bool


@final
class Row(TypedDict):
    """An instance as the scheduler remembers it."""

    key: str
    instance: str
    host: str
    at: Moment
    why: str
    text: str
    state: InstanceState


class About(TypedDict):
    """`other` are versions of workers, by address, that differ from the scheduler's."""

    distributed: str
    workers: int
    other: dict[str, str]


@final
class Refused(TypedDict):
    """Why an order gets no row; `full`: it would where nothing else were."""

    refused: str
    full: bool


LAUNCHED: Any = Row | Refused


class DaskBackend(ClusterBackend):
    """Each instance is a task that holds a thread and resources of one worker."""

    sources = {"workers": SourceSpec(FRESH_S, list[Worker], ("scheduler",), moves=True)}

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        config = backend.config
        self.gpus = gpus(config.get("gpus", ("GPU",)))
        self.scheduler = Scheduler(config["scheduler"], tls(config, Kind.secrets_of(backend.secret)))

    @property
    def is_here(self) -> bool:
        return is_local(self.scheduler.address)

    def check(self) -> Iterator[ReportLine]:
        """Ask for versions. The scheduler knows our questions then."""
        about = self.scheduler.ask("about", About)
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

    def fetch(self, key: SourceKey) -> list[Worker]:
        return self.scheduler.ask_each("workers", Worker)

    def take(self, found: list[Worker], order: Allocation) -> list[Worker] | None:
        """Take it from the fullest worker that has room, as the scheduler does."""
        size = (order.cpus, order.memory_mib, gpu_of(order), order.gpu_count)
        room = {place: count for place, worker in enumerate(found) if (count := fits(worker, *size))}
        if not room:
            return None
        fullest = min(room, key=room.__getitem__)
        filled = cast(Worker, taken(found[fullest], *size))
        return [*found[:fullest], filled, *found[fullest + 1 :]]

    def found_offers(self, found: Sequence[Worker], needs: Requirements, image: str | None) -> Iterator[Offer]:
        count = needs.gpu_count_min
        usable = [worker for worker in found if worker["running"]]
        for gpu in self.gpus if count else [Gpu("", "")]:
            size = (needs.cpu_min, needs.memory_min_mib, gpu.resource, count)
            if any(fits(worker, *size, empty=True) for worker in found):
                counted = [_counted(worker, gpu.resource) for worker in usable]
                yield self.offer(
                    needs,
                    image,
                    gpu.resource,
                    fits=sum(fits(worker, *size) for worker in found),
                    free=sum(total - used for total, used in counted),
                    total=sum(total for total, _used in counted),
                    gpu_name=gpu.name,
                    gpu_memory_mib=gpu.memory_mib,
                    workers=len(usable),
                )

    def submit(self, order: InstanceOrder) -> CloudInstance:
        """The scheduler places it and remembers it in one step, so that doubled orders are one task."""
        answer: Row | Refused = self.scheduler.ask(
            "launch",
            LAUNCHED,
            key=f"dstackweb-{order.instance}",
            instance=order.instance,
            deployment=order.deployment,
            cpus=order.cpus,
            memory_mib=order.memory_mib,
            gpu=gpu_of(order),
            gpu_count=order.gpu_count,
            script=order.user_data,
            grace_s=GRACE_S,
            limit_s=order.duration_s,
        )
        if "refused" in answer:
            code = LaunchFailure.NO_ROOM if answer["full"] else LaunchFailure.NO_CAPACITY
            raise LaunchFailed(code, answer["refused"])
        return _instance(answer)

    def instances(self, region: str, deployment: str) -> list[CloudInstance]:
        return [_instance(row) for row in self.scheduler.ask("instances", list[Row], deployment=deployment)]

    def terminate(self, region: str, cloud_ids: Sequence[str]) -> None:
        """Release the tasks: their guards send SIGTERM, and SIGKILL after GRACE_S."""
        if cloud_ids:
            self.scheduler.ask("terminate", type(None), keys=list(cloud_ids))


def _instance(row: Row) -> CloudInstance:
    at = dt.datetime.fromtimestamp(row["at"], dt.UTC)
    return CloudInstance(
        row["instance"], row["key"], REGION, row["state"], row["host"], "", at, row["why"], row["text"]
    )


def _counted(worker: Worker, gpu: str) -> tuple[float, float]:
    """How many GPUs, or CPUs without a name of one, a worker has, and how many are used."""
    what = gpu or CPU
    if gpu or CPU in worker["resources"]:
        return worker["resources"].get(what, 0), worker["resources_used"].get(what, 0)
    return worker["threads"], min(worker["cpus_used"], worker["threads"])


class DaskKind(ClusterKind):
    name = "dask"
    label = "Dask"
    driver_class = DaskBackend
    schema = DaskSettings
    part, engine, answers = gettext_lazy("Cluster"), gettext_lazy("Scheduler"), gettext_lazy("The scheduler answers.")
    setup_hint = gettext_lazy("Runs become tasks of a Dask cluster, submitted when a worker has room for them.")

    def settle(self, config: Mapping[str, Any], stored: str = "") -> tuple[dict[str, Any], str]:
        if not is_installed():
            raise Invalid(self.source_failure({"code": NOT_INSTALLED}))
        plain, secret = super().settle(config, stored)
        tls(plain, self.secrets_of(secret))
        return plain, secret

    def source_failure(self, error: Mapping[str, Any]) -> str:
        if error.get("code") == NOT_INSTALLED:
            return _("Dask backends need the package msgpack: install dstackweb[dask-backend], and restart the server.")
        return super().source_failure(error)

    def location(self, config: Mapping[str, Any]) -> str:
        return str(config["scheduler"])
