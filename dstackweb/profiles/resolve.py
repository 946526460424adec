"""Run file, profile and defaults combined to effective settings, with the source of each value. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dstackweb.spec.array import Array, ArrayFields
from dstackweb.spec.codes import UtilizationAction
from dstackweb.spec.effective import EffectiveSpec, HealthCheck, Requirements, Retry, UtilizationPolicy
from dstackweb.spec.mappings import (
    AfterFields,
    HealthCheckFields,
    RegistryAuthFields,
    ResourcesFields,
    RetryFields,
    ScheduleFields,
    UtilizationFields,
)
from dstackweb.spec.run_fields import ProfileFields
from dstackweb.spec.run_file import RunFile


@dataclass(frozen=True)
class ProfileData:
    name: str
    fields: ProfileFields


@dataclass(frozen=True)
class Effective:
    """`provenance` has the source of each key of the run file, those of `resources` as `resources.cpu` and so on:

    {"source": "run_file", "line": 7} (None for an object), {"source": "command_line"},
    {"source": "profile", "profile": "nightly"} or {"source": "default"}.
    """

    spec: EffectiveSpec
    provenance: dict[str, dict[str, Any]]


def resolve(run_file: RunFile, profile: ProfileData | None) -> Effective:
    """The values of the file, else those of the profile, else the defaults of EffectiveSpec.

    A value that is off (`retry: false`, `max_duration: off`) counts as set.
    """
    own = run_file.fields
    values: dict[str, Any] = {}
    for source in (profile.fields if profile else None, own):
        if source is not None:
            values |= {key: getattr(source, key) for key in source.model_fields_set}
    values = {_FIELD_OF.get(key, key): _converted(value) for key, value in values.items()}
    values |= {"env": run_file.env, "masked_env": tuple(sorted(run_file.masked_env))}
    if profile is not None:
        values["profile"] = profile.name
    spec = EffectiveSpec.model_validate(values)
    return Effective(spec, {key: _provenance(key, run_file, profile) for key in _keys()})


def as_hold(effective: Effective) -> Effective:
    """The same settings for a hold: no schedule, no retry, no container, and a utilization policy that only warns.

    Values of the request have {"source": "hold"}; a policy that was changed to warn also has {…, "notifies": true}.
    """
    spec, own = effective.spec, {"source": "hold"}
    policy = spec.utilization_policy
    provenance = {
        key: own if source["source"] in ("run_file", "command_line") else source
        for key, source in effective.provenance.items()
    }
    provenance |= {key: own for key in ("retry", "schedule", "image") if getattr(spec, key) is not None}
    if policy is not None:
        provenance["utilization_policy"] = {**provenance["utilization_policy"], "notifies": True}
        policy = policy.model_copy(update={"action": UtilizationAction.NOTIFY})
    changed = {"hold": True, "retry": None, "schedule": None, "image": None, "utilization_policy": policy}
    return Effective(spec.model_copy(update=changed), provenance)


_FIELD_OF = {
    "resources": "requirements",
    "max_duration": "max_duration_s",
    "stop_duration": "stop_duration_s",
    "idle_duration": "idle_duration_s",
    "inactivity_duration": "inactivity_duration_s",
}
"""Keys of the run file that have another name in the spec, with the unit in it."""


def _converted(value: Any) -> Any:
    """A value of the file in the type of the spec, or as a mapping where the keys are the same."""
    match value:
        case ResourcesFields():
            return Requirements.of(value)
        case RetryFields():
            return Retry(on_events=value.on_events, duration_s=value.duration, max_attempts=value.max_attempts)
        case UtilizationFields():
            return UtilizationPolicy.of(value)
        case RegistryAuthFields() | ScheduleFields():
            return value.model_dump()
        case HealthCheckFields():
            return HealthCheck.of(value)
        case ArrayFields():
            return Array.of(value)
        case (AfterFields(), *_):
            return tuple(one.model_dump() for one in value)
    return value


def _keys() -> Iterator[str]:
    """The run file's keys in the order of `EffectiveSpec.as_file`."""
    key_of = {field: key for key, field in _FIELD_OF.items()}
    for field in EffectiveSpec.model_fields:
        if field == "requirements":
            yield from (f"resources.{key}" for key in ResourcesFields.model_fields)
        elif field not in ("masked_env", "hold"):
            yield key_of.get(field, field)


def _provenance(key: str, run_file: RunFile, profile: ProfileData | None) -> dict[str, Any]:
    top, _, inner = key.partition(".")
    given = run_file.fields
    if top in run_file.overridden:
        return {"source": "command_line"}
    here = given.resources if inner else given
    if here is not None and (inner or top) in here.model_fields_set:
        return {"source": "run_file", "line": run_file.line(key)}
    if profile is not None and top in profile.fields.model_fields_set:
        return {"source": "profile", "profile": profile.name}
    return {"source": "default"}
