"""Parses run files and the settings of profiles: validated values, or all errors with their lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from dstackweb.lib.errors import FieldError, Invalid
from dstackweb.lib.language import gettext as _
from dstackweb.spec.env import EnvError, check_sizes, read_env
from dstackweb.spec.fields import Keys
from dstackweb.spec.run_fields import ProfileFields, RunFields
from dstackweb.spec.source import MAX_ERRORS, Config, Source, read, unusable
from dstackweb.spec.wording import at, field_errors, missing_values, of_other_types, secrets_elsewhere, without_image

M = TypeVar("M", bound=Keys)


@dataclass(frozen=True)
class RunFile:
    """A valid run file. A missing key is None in `fields`, and not in `fields.model_fields_set`."""

    fields: RunFields
    env: dict[str, str]
    """The values from the file and the command line, with references to secrets."""
    masked_env: frozenset[str]
    """The names whose values the client sent; the values are not in the spec, and never shown."""
    lines: dict[str, int]
    """The line (from 1) of each key by its dotted path; empty for an object."""
    overridden: frozenset[str]
    """The keys set on the command line."""

    def line(self, key: str) -> int | None:
        """The line of a key such as `priority`; None if it is not in the file."""
        return None if key.split(".")[0] in self.overridden else self.lines.get(key)


def parse_run_file(
    config: Config | Mapping[str, Any],
    client_env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RunFile:
    """Parse a run file from YAML text or an object.

    `client_env` has the values for bare names in `env`; `overrides` are keys set on the command line, which replace
    the file's, except `env`, which is merged. Raises TooLarge, or Invalid with all errors.
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
    plain = {name: value for name, value in env.items() if value is not None}
    try:
        check_sizes(plain | {name: (client_env or {})[name] for name in masked})
    except EnvError as error:
        raise _invalid([at(source, ("env", error.key) if error.key else ("env",), str(error))]) from None
    overridden = frozenset(over) | ({"env"} if over_env and not fields.env else frozenset())
    return RunFile(fields, plain, masked, source.lines, overridden)


def parse_profile_settings(settings: str | Mapping[str, Any]) -> ProfileFields:
    """Parse the settings of a profile. Raises TooLarge, or Invalid with all errors."""
    return _validated(ProfileFields, read(settings))


def _validated(model: type[M], source: Source) -> M:
    errors = [*missing_values(source, source.data), *secrets_elsewhere(source, source.data)]
    if model is RunFields:
        errors += [*of_other_types(source), *without_image(source)]
    known = [error["loc"] for error in errors]
    try:
        fields = model.model_validate(source.data)
    except ValidationError as error:
        errors += [item for item in field_errors(error, model, source) if item["loc"] not in known]
        raise _invalid(errors) from None
    if errors:
        raise _invalid(errors)
    return fields


def _invalid(errors: Iterable[FieldError]) -> Invalid:
    """The errors in the order of the file; those without a line, such as missing keys, come last."""
    ordered = sorted(errors, key=lambda error: (error["line"] is None, error["line"] or 0))
    more = f" (and {len(ordered) - 1} more)" if len(ordered) > 1 else ""
    return Invalid(ordered[0]["msg"] + more, ordered[:MAX_ERRORS])


def _override_env(value: Any) -> dict[str, str | None]:
    try:
        found = read_env(value)
    except EnvError as error:
        raise Invalid.at(
            "env", error.key, msg=_("`env.%(key)s`: %(error)s") % {"key": error.key, "error": error}
        ) from None
    if not isinstance(found, dict):
        raise Invalid.at("env", msg=_("`env` should be a mapping of names to values"))
    return found


def _check_client_env(names: Iterable[str], given: Mapping[str, str], source: Source) -> None:
    """Raises Invalid for a bare name without a value that a process can have."""
    for name in sorted(names):
        if name not in given:
            msg = _(
                "`env` copies %(name)s from your shell, where it is not set; export it before "
                "`dstackweb apply`, or write %(name)s=value"
            ) % {"name": name}
        elif (problem := unusable(given[name])) is not None:
            msg = _("`env` copies %(name)s from your shell: %(problem)s") % {"name": name, "problem": problem}
        else:
            continue
        raise _invalid([at(source, _entry(source, name), msg)])


def _entry(source: Source, name: str) -> tuple[str | int, ...]:
    """The path of a bare name in the list."""
    entries = source.data.get("env")
    listed = [str(entry).strip() for entry in entries] if isinstance(entries, list) else []
    return ("env", listed.index(name)) if name in listed else ("env",)
