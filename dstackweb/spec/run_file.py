"""Parses run files and the settings of profiles: validated values, or all errors with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar

from pydantic import ValidationError

from dstackweb.lib.errors import FieldError, Invalid
from dstackweb.lib.language import gettext as _
from dstackweb.spec.env import EnvError, check_sizes, read_env
from dstackweb.spec.fields import Keys
from dstackweb.spec.run_fields import ProfileFields, RunFields
from dstackweb.spec.source import MAX_ERRORS, Config, Source, check_size, read, unusable
from dstackweb.spec.wording import at, field_errors, missing_values, of_other_types, secrets_elsewhere, without_image

M = TypeVar("M", bound=Keys)
MAX_RUNS = 20
"""All are stored in one transaction."""
_BETWEEN = re.compile(r"(---|\.\.\.)(?=[ \t\r]|$)")  # no value of YAML has such a line
_WITHOUT_VALUE = re.compile(r"[ \t\r]*(#.*)?$|%")  # blank, a comment, or a directive


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
        {**source.data, **over}, {path: line for path, line in source.lines.items() if path.split(".")[0] not in over}
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


# A file with several runs, a pipeline: documents of YAML between lines of `---`, or a list of objects.


@dataclass(frozen=True)
class PipelineFile:
    """The file of one run. `before` counts the lines of the whole text above it; None for an object."""

    config: str | dict[str, Any]
    before: int | None = None

    def at(self, *loc: str | int, msg: str, line: int | None = 1) -> Invalid:
        """An error at a line of this part (from 1)."""
        return self.placed(Invalid.at(*loc, msg=msg, line=line))

    def placed(self, error: Invalid) -> Invalid:
        """An error in this part, with the lines of the whole text."""
        return Invalid(error.detail, [{**one, "line": self._line(one["line"])} for one in error.errors])

    def _line(self, line: int | None) -> int | None:
        return None if line is None or self.before is None else line + self.before


def split(config: Config) -> list[PipelineFile]:
    """The files in a config, in its order; documents without a value are left out. Raises TooLarge, or Invalid.

    A single one is returned as it is.
    """
    if isinstance(config, str):
        check_size(len(config.encode("utf-8", "surrogatepass")))
        parts = _documents(config)
        return _limited(parts) if len(parts) > 1 else [PipelineFile(config)]
    parts = [PipelineFile(one) for one in (config if isinstance(config, list) else [config])]
    if not parts:
        raise Invalid.at("config", msg=_("the list has no run"))
    return _limited(parts)


def _limited(parts: list[PipelineFile]) -> list[PipelineFile]:
    if len(parts) > MAX_RUNS:
        raise parts[MAX_RUNS].at(msg=_("a file has %d runs at most") % MAX_RUNS)
    return parts


def _documents(text: str) -> list[PipelineFile]:
    parts: list[PipelineFile] = []
    lines: list[str] = []
    start = 0
    for number, line in enumerate([*text.split("\n"), "---"]):
        if (separator := _BETWEEN.match(line)) is None:
            lines.append(line)
            continue
        if not all(map(_WITHOUT_VALUE.match, lines)):
            parts.append(PipelineFile("\n".join(lines).rstrip() + "\n", start))
        rest = line[separator.end() :]
        lines, start = ([" " * separator.end() + rest], number) if rest.strip() else ([], number + 1)
    return parts


def in_order(waits: Mapping[str, Sequence[str]]) -> list[str]:
    """The names of runs so that each comes after those it waits for. Raises Cycle."""
    try:
        return list(TopologicalSorter(waits).static_order())
    except CycleError as error:
        raise Cycle(error.args[1]) from None


class Cycle(Exception):
    """Runs that wait for each other: `path` begins and ends with the same name; each waits for the one before it."""

    def __init__(self, path: Sequence[str]) -> None:
        super().__init__(" → ".join(path))
        self.path = list(path)
