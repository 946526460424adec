"""The effective settings of a run: its file, its profile and the defaults combined. Stored with the run."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from dstackweb.spec.array import Array
from dstackweb.spec.codes import Ide, On, Otherwise, RunType, UtilizationAction, UtilizationScope
from dstackweb.spec.fields import Keys
from dstackweb.spec.mappings import INTERVAL_S, TIMEOUT_S, UNHEALTHY_AFTER, ResourcesFields, RetryEvent
from dstackweb.spec.units import Range, format_duration, format_gpu, format_memory, format_range

MASK = "********"
DEFAULT_CPU_MIN = 1
DEFAULT_MEMORY_MIN_MIB = 256
"""Defaults, small so that such runs don't wait for long."""


class _StoredModel(BaseModel):
    """Validated values that survive a round trip through JSON."""

    model_config = ConfigDict(frozen=True)


class _Mapping(_StoredModel):
    """A mapping of the run file, where the names of durations do not end in `_s`."""

    @classmethod
    def of(cls, fields: Keys) -> Self:
        return cls.model_validate({name: getattr(fields, name.removesuffix("_s")) for name in cls.model_fields})

    def as_file(self) -> dict[str, Any]:
        """The same in the run file's notation, without what is None."""
        return {
            name.removesuffix("_s"): format_duration(value) if name.endswith("_s") else value
            for name, value in self.model_dump(mode="json", exclude_none=True).items()
        }


class Requirements(_StoredModel):
    """Per node. A `…_max` of None is unlimited. With `gpu_count_min` 0 no GPU is needed."""

    cpu_min: int = DEFAULT_CPU_MIN
    cpu_max: int | None = None
    memory_min_mib: int = DEFAULT_MEMORY_MIN_MIB
    memory_max_mib: int | None = None
    gpu_count_min: int = 0
    gpu_count_max: int | None = None
    gpu_names: tuple[str, ...] = ()
    gpu_memory_min_mib: int | None = None
    gpu_memory_max_mib: int | None = None

    @classmethod
    def of(cls, fields: ResourcesFields | None) -> Requirements:
        """From a run file's `resources`, with defaults for missing keys."""
        if fields is None:
            return cls()
        found: dict[str, int | tuple[str, ...] | None] = {}
        if fields.cpu:
            found |= {"cpu_min": fields.cpu.min or DEFAULT_CPU_MIN, "cpu_max": fields.cpu.max}
        if fields.memory:
            least, most = fields.memory.min, fields.memory.max
            if least is None:
                least = min(DEFAULT_MEMORY_MIN_MIB, most or DEFAULT_MEMORY_MIN_MIB)
            found |= {"memory_min_mib": least, "memory_max_mib": most}
        if fields.gpu:
            count, memory = fields.gpu.count, fields.gpu.memory or Range(None, None)
            found |= {
                # `..2` needs one GPU, `0..2` none.
                "gpu_count_min": min(1, count.max or 0) if count.min is None else count.min,
                "gpu_count_max": count.max,
                "gpu_names": fields.gpu.name or (),
                "gpu_memory_min_mib": memory.min,
                "gpu_memory_max_mib": memory.max,
            }
        return cls.model_validate(found)

    def as_resources(self) -> dict[str, str]:
        """The same in the notation of the run file's `resources`."""
        shown = {
            "cpu": format_range(Range(self.cpu_min, self.cpu_max)),
            "memory": format_range(Range(self.memory_min_mib, self.memory_max_mib), format_memory),
        }
        count = Range(self.gpu_count_min, self.gpu_count_max)
        memory = Range(self.gpu_memory_min_mib, self.gpu_memory_max_mib)
        if self.gpu_names or count != Range(0, None) or memory != Range(None, None):
            shown["gpu"] = format_gpu(self.gpu_names, memory, count)
        return shown


class Retry(_Mapping):
    """After which failures, for how long after the first one, and how often at most the run is retried."""

    on_events: tuple[RetryEvent, ...]
    duration_s: int
    max_attempts: int | None = None


class UtilizationPolicy(_Mapping):
    """The minimum GPU utilization (percent), the time window, and the action below the minimum."""

    min_gpu_utilization: int
    time_window_s: int
    scope: UtilizationScope = UtilizationScope.ANY
    warmup_s: int = 0
    action: UtilizationAction = UtilizationAction.TERMINATE


class RegistryAuth(_StoredModel):
    """How to sign in to an image's registry, with references to secrets."""

    username: str
    password: str


class Schedule(_StoredModel):
    """Cron expressions in UTC: the run enters its queue when any of them is due."""

    cron: tuple[str, ...]


class HealthCheck(_Mapping):
    """How a service is checked: by a GET of `path`, or by a connection to its port if that is None."""

    path: str | None = None
    interval_s: int = INTERVAL_S
    timeout_s: int = TIMEOUT_S
    unhealthy_after: int = UNHEALTHY_AFTER
    """How many checks in a row fail until it is unhealthy."""


class After(_StoredModel):
    """A run that must end before, by name or id; `on` how, `otherwise` what follows if it ends differently."""

    run: str
    on: On = On.DONE
    otherwise: Otherwise = Otherwise.CANCEL

    def as_file(self) -> str | dict[str, Any]:
        """The same as an item of the run file's `after`."""
        shown: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True)
        return shown if len(shown) > 1 else self.run


class EffectiveSpec(_StoredModel):
    """The settings of a run. Durations are seconds, None is "off"; prices are USD per hour.

    `backends`, `regions` and `instance_types` set no limit if None. `labels` has the accepted values for each name.
    `env` keeps references to secrets, and lacks the values of `masked_env`.
    """

    type: RunType = RunType.TASK
    name: str | None = None
    commands: tuple[str, ...] = ()
    init: tuple[str, ...] | None = None
    ide: Ide | None = None
    inactivity_duration_s: int | None = None
    port: int | None = None
    health_check: HealthCheck | None = None
    auth: bool = True
    shell: str = "/bin/sh"
    working_dir: str | None = None
    env: dict[str, str] = {}
    masked_env: tuple[str, ...] = ()
    image: str | None = None
    entrypoint: str | None = None
    pull_policy: Literal["always", "missing", "never"] = "missing"
    registry_auth: RegistryAuth | None = None
    volumes: tuple[str, ...] | None = None
    nodes: int = 1
    requirements: Requirements = Requirements()
    priority: int = 50
    queue: str = "default"
    after: tuple[After, ...] = ()
    array: Array | None = None
    """The runs of a sweep. A run of one has its own parameters in its `env`, and no `array`."""
    preemptible: bool = False
    profile: str | None = None
    backends: tuple[str, ...] | None = None
    regions: tuple[str, ...] | None = None
    instance_types: tuple[str, ...] | None = None
    labels: dict[str, tuple[str, ...]] | None = None
    spot_policy: Literal["spot", "on-demand", "auto"] = "on-demand"
    max_price: float | None = None
    max_duration_s: int | None = None
    stop_duration_s: int = 20
    retry: Retry | None = None
    utilization_policy: UtilizationPolicy | None = None
    schedule: Schedule | None = None
    idle_duration_s: int | None = 300
    hold: bool = False
    """It reserves its resources for interactive work for `max_duration`. Not a key of the run file."""
    least_isolation: str = ""
    """What its project requires of hosts now (`runner.isolation`). Not a key of the run file, and not stored."""
    project: str = ""
    """Its project's name, for backends that only some projects may use; as `least_isolation`."""

    @property
    def is_dev_environment(self) -> bool:
        return self.type == RunType.DEV_ENVIRONMENT

    @property
    def is_service(self) -> bool:
        return self.type == RunType.SERVICE

    @property
    def needs_tunnel(self) -> bool:
        """Whether people or programs connect to its job, through the gateway."""
        return self.is_dev_environment or self.hold or self.is_service

    def of_project(self, name: str, least_isolation: str) -> EffectiveSpec:
        """The same for a decision on a run of this project."""
        return self.model_copy(update={"project": name, "least_isolation": least_isolation})

    def with_secrets(self) -> dict[str, str]:
        """The texts that may refer to secrets of the project, by key: those of `env` and of `registry_auth`."""
        auth = self.registry_auth
        return self.env | (
            {"registry_auth.username": auth.username, "registry_auth.password": auth.password} if auth else {}
        )

    def shape_key(self, user_id: int) -> str:
        """SHA-256 (hex) of all that decides where a run fits: runs with the same key fit in the same places."""
        decides = {
            "user": user_id,
            "nodes": self.nodes,
            "requirements": self.requirements.model_dump(mode="json"),
            "backends": _listed(self.backends),  # of equal ones the first is taken
            "regions": _unordered(self.regions),
            "instance_types": _unordered(self.instance_types),
            "labels": {name: sorted(values) for name, values in (self.labels or {}).items()},
            "spot_policy": self.spot_policy,
            "max_price": self.max_price,
            "max_duration_s": self.max_duration_s,
            "stop_duration_s": self.stop_duration_s,
            "preemptible": self.preemptible,
            "image": self.image,
            "volumes": _unordered(self.volumes),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def as_file(self) -> dict[str, Any]:
        """The same settings in the run file's notation and order; masked values are asterisks.

        Its keys, with `resources` split into `resources.cpu` and so on, are the keys of a run's provenance.
        """
        shown: dict[str, Any] = {
            "type": self.type.value,
            "name": self.name,
            "commands": list(self.commands) or None,
            "init": _listed(self.init),
            "ide": self.ide.value if self.ide else None,
            "inactivity_duration": None if self.type == RunType.TASK else _or_off(self.inactivity_duration_s),
            "port": self.port,
            "health_check": (self.health_check or HealthCheck()).as_file() if self.is_service else None,
            "auth": self.auth if self.is_service else None,
            "shell": self.shell,
            "working_dir": self.working_dir,
            "env": self.env | dict.fromkeys(self.masked_env, MASK) or None,
            "image": self.image,
            "entrypoint": self.entrypoint,
            "pull_policy": self.pull_policy if self.image else None,
            "registry_auth": self.registry_auth.model_dump() if self.registry_auth else None,
            "volumes": _listed(self.volumes),
            "nodes": self.nodes,
            "resources": self.requirements.as_resources(),
            "priority": self.priority,
            "queue": self.queue,
            "after": [one.as_file() for one in self.after] or None,
            "array": self.array.as_file() if self.array else None,
            "preemptible": self.preemptible,
            "profile": self.profile,
            "backends": _listed(self.backends),
            "regions": _listed(self.regions),
            "instance_types": _listed(self.instance_types),
            "labels": _labels(self.labels),
            "spot_policy": self.spot_policy,
            "max_price": self.max_price,
            "max_duration": _or_off(self.max_duration_s),
            "stop_duration": format_duration(self.stop_duration_s),
            "retry": self.retry.as_file() if self.retry else False,
            "utilization_policy": self.utilization_policy.as_file() if self.utilization_policy else None,
            "schedule": {"cron": list(self.schedule.cron)} if self.schedule else None,
            "idle_duration": _or_off(self.idle_duration_s),
        }
        return {key: value for key, value in shown.items() if value is not None}


def _or_off(seconds: int | None) -> str:
    return "off" if seconds is None else format_duration(seconds)


def _listed(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else list(names)


def _labels(required: dict[str, tuple[str, ...]] | None) -> dict[str, str | list[str]] | None:
    if required is None:
        return None
    return {name: values[0] if len(values) == 1 else list(values) for name, values in required.items()}


def _unordered(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else sorted(names)


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """`resources` as `resources.cpu` and so on, as provenance names them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= {f"resources.{part}": inner for part, inner in value.items()} if key == "resources" else {key: value}
    return found


def value_text(value: Any) -> str:
    """A value of a run file, one line per key of a mapping and per command."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {value_text(inner).replace(chr(10), ' ')}" for key, inner in value.items())
    if isinstance(value, list):
        parts = [_short(part) for part in value]
        return ("\n" if any(" " in part for part in parts) else ", ").join(parts)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _short(value: Any) -> str:
    """An item of a list on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in value.items()) + "}"
    return str(value)
