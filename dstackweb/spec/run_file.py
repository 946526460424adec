"""Reading run files and profiles' settings: text or object in, checked values out, or every error with its line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from dstackweb.lib.errors import FieldError, Invalid
from dstackweb.spec.env import EnvError, read_env
from dstackweb.spec.fields import Keys
from dstackweb.spec.profile_fields import ProfileFields
from dstackweb.spec.run_fields import RunFields
from dstackweb.spec.source import MAX_ERRORS, Source, read, unusable
from dstackweb.spec.wording import at, field_errors, missing_values, secrets_elsewhere

M = TypeVar("M", bound=Keys)


@dataclass(frozen=True)
class RunFile:
    """A run file that validates. What is not in it is None in `fields`, and missing in `fields.model_fields_set`."""

    fields: RunFields
    env: dict[str, str]
    """The values that are written in the file or on the command line, references to secrets unfilled."""
    masked_env: frozenset[str]
    """The names whose values the client sent along; they are in no spec, and shown nowhere."""
    lines: dict[str, int]
    """The line (from 1) of each key by its dotted path; empty when it came as an object."""
    overridden: frozenset[str]
    """The keys that were set on the command line instead."""

    @property
    def profile(self) -> str | None:
        """The profile that the file names."""
        return self.fields.profile

    def line(self, key: str) -> int | None:
        """The line of a key such as `priority`; None when the file doesn't have it."""
        return None if key.split(".")[0] in self.overridden else self.lines.get(key)


def parse_run_file(
    config: str | Mapping[str, Any],
    client_env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RunFile:
    """Read a run file from YAML text or an object.

    `client_env` has values for the bare names in `env`; `overrides` are keys set on the command line, of which `env`
    is merged. Raises TooLarge, or Invalid with every error found, each with `loc`, `line` and what was expected.
    """
    source = read(config)
    over = read(overrides).data if overrides else {}
    over_env = over.pop("env", {})
    source = Source(
        {**source.data, **over},
        {path: line for path, line in source.lines.items() if path.split(".")[0] not in over},
    )
    fields = _validated(RunFields, source)
    env = {**(fields.env or {}), **_override_env(over_env)}
    masked = frozenset(name for name, value in env.items() if value is None)
    _check_client_env(masked, client_env or {}, source)
    overridden = frozenset(over) | ({"env"} if over_env and not fields.env else frozenset())
    return RunFile(
        fields, {name: value for name, value in env.items() if value is not None}, masked, source.lines, overridden
    )


def parse_profile_settings(settings: str | Mapping[str, Any]) -> ProfileFields:
    """Read a profile's settings, as an admin wrote them. Raises TooLarge, or Invalid with every error found."""
    return _validated(ProfileFields, read(settings))


def _validated(model: type[M], source: Source) -> M:
    errors = [*missing_values(source, source.data), *secrets_elsewhere(source, source.data)]
    told = [error["loc"] for error in errors]
    try:
        fields = model.model_validate(source.data)
    except ValidationError as error:
        errors += [item for item in field_errors(error, model, source) if item["loc"] not in told]
        raise _invalid(errors) from None
    if errors:
        raise _invalid(errors)
    return fields


def _invalid(errors: Iterable[FieldError]) -> Invalid:
    """The errors in the file's order; what is missing, and so has no line, comes last."""
    ordered = sorted(errors, key=lambda error: (error["line"] is None, error["line"] or 0))
    more = f" (and {len(ordered) - 1} more)" if len(ordered) > 1 else ""
    return Invalid(ordered[0]["msg"] + more, ordered[:MAX_ERRORS])


def _override_env(value: Any) -> dict[str, str | None]:
    try:
        found = read_env(value)
    except EnvError as error:
        raise Invalid.at("env", error.key, msg=f"`env.{error.key}`: {error}") from None
    if not isinstance(found, dict):
        raise Invalid.at("env", msg="`env` should be a mapping of names to values")
    return found


def _check_client_env(names: Iterable[str], given: Mapping[str, str], source: Source) -> None:
    """Each bare name needs a value that a process can be given."""
    for name in sorted(names):
        if name not in given:
            msg = (
                f"`env` takes {name} from where the run is submitted, and it is not set there; "
                f"export it before `dstackweb apply`, or write {name}=value"
            )
        elif (problem := unusable(given[name])) is not None:
            msg = f"`env` takes {name} from where the run is submitted: {problem}"
        else:
            continue
        raise _invalid([at(source, _entry(source, name), msg)])


def _entry(source: Source, name: str) -> tuple[str | int, ...]:
    """Where a bare name stands in the list."""
    entries = source.data.get("env")
    listed = [str(entry).strip() for entry in entries] if isinstance(entries, list) else []
    return ("env", listed.index(name)) if name in listed else ("env",)
