"""A run file as plain data with the line of each key; invalid or hostile text is refused with line and reason. Plain
scalars are read as in JSON (`true`, `null`, numbers): `yes`, `12:30` and `2026-01-01` stay text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from dstackweb.lib.errors import FieldError, Invalid, TooLarge
from dstackweb.lib.language import gettext as _

MAX_BYTES = 256 * 1024
MAX_DEPTH = 20
MAX_VALUES = 20_000
"""More than any real run file has: hostile text, and aliases that expand endlessly, stop here."""
MAX_PATH = 500
"""Characters of a value's dotted path: hostile keys, which each of many items would repeat, stop here."""
MAX_ERRORS = 20

Path = tuple[str | int, ...]
Config = str | dict[str, Any] | list[dict[str, Any]]
"""A run file as YAML text or as an object, or those of several runs (`spec.run_file.split`)."""


@dataclass
class Source:
    """The values of a run file. `lines` has the line (from 1) of each key and item, by its dotted path: `env.LR`."""

    data: Any
    lines: dict[str, int] = field(default_factory=dict)

    def line(self, path: Path) -> int | None:
        """The line of a value, or of the nearest value around it; None for an object."""
        for end in range(len(path), 0, -1):
            if (line := self.lines.get(dotted(path[:end]))) is not None:
                return line
        return None

    def at(self, path: Path) -> Any:
        """The value at a path; None if there is none."""
        value = self.data
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value


def dotted(path: Path) -> str:
    """A path as it is written: `resources.gpu`."""
    return ".".join(str(part) for part in path)


def read(config: Config | Mapping[str, Any]) -> Source:
    """The plain data of YAML text, or of an object; a mapping. Raises TooLarge, or Invalid."""
    source = _read_text(config) if isinstance(config, str) else _read_object(config)
    if not isinstance(source.data, dict):
        msg = _("expected a mapping of keys to values, such as `max_duration: 24h`")
        raise Invalid.at(msg=msg, line=1 if isinstance(config, str) else None)
    return source


def _read_text(text: str) -> Source:
    check_size(len(text.encode("utf-8", "surrogatepass")))
    try:
        _check_events(text)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text) from None
    except yaml.reader.ReaderError as error:
        raise _invalid_character(text, error.position, error.character) from None
    except UnicodeEncodeError as error:
        raise _invalid_character(text, error.start, ord(text[error.start])) from None
    if node is None:
        raise Invalid.at(msg=_("the file is empty; it needs at least `type: task` and `commands`"), line=1)
    reader = _Reader()
    data = reader.value(node, ())
    if reader.errors:
        raise Invalid(reader.errors[0]["msg"], reader.errors)
    return Source(data, reader.lines)


def _line_of(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _invalid_character(text: str, position: int, code: int) -> Invalid:
    line = text.count("\n", 0, position) + 1
    return Invalid.at(
        msg=_("line %(line)s has an invalid character (code %(code)s)") % {"line": line, "code": code}, line=line
    )


def _check_events(text: str) -> None:
    """Stop at too many or too deep values while the text is parsed, before anything is built of it."""
    depth, values = 0, 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent):
            values += 1
            if values > MAX_VALUES:
                raise Invalid.at(msg=_too_many(), line=_line_of(event))
            if isinstance(event, yaml.CollectionStartEvent):
                if depth > MAX_DEPTH:
                    raise _too_deep(_line_of(event))
                depth += 1


def _read_object(config: Any) -> Source:
    try:
        text = json.dumps(config, allow_nan=False)
    except RecursionError:
        raise _too_deep(None) from None
    except (TypeError, ValueError) as error:
        raise Invalid.at(msg=_("a value can't be converted to JSON: %(error)s") % {"error": error}) from None
    check_size(len(text))
    data = json.loads(text)
    errors: list[FieldError] = []
    if _check(data, (), errors) > MAX_VALUES:
        raise Invalid.at(msg=_too_many())
    if errors:
        raise Invalid(errors[0]["msg"], errors[:MAX_ERRORS])
    return Source(data)


def check_size(size: int) -> None:
    """Raises TooLarge for a run file of so many bytes."""
    if size > MAX_BYTES:
        raise TooLarge(
            _("the run file has %(size)s KB; the limit is %(max_bytes)s KB")
            % {"size": f"{size / 1024:.0f}", "max_bytes": MAX_BYTES // 1024}
        )


def _check(value: Any, path: Path, errors: list[FieldError]) -> int:
    """Add the errors that the text form would have too: depth, and text that can't be stored. The number of values."""
    values = 1
    if len(path) > MAX_DEPTH:
        raise _too_deep(None)
    if isinstance(value, str) and (problem := unusable(value)) is not None:
        errors.append({"loc": list(path), "line": None, "msg": problem})
    _check_path(path, None)
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        if isinstance(key, str) and unusable(key):
            errors.append({"loc": list(path), "line": None, "msg": _("a key must be plain text")})
        else:
            values += _check(child, (*path, key), errors)
    return values


def _check_path(path: Path, line: int | None) -> None:
    if sum(len(str(part)) for part in path) > MAX_PATH:
        raise Invalid.at(
            msg=_("a key, with those around it, has more than %(max_path)s characters") % {"max_path": MAX_PATH},
            line=line,
        )


def _too_many() -> str:
    return _("the file expands to more than %(most)s values") % {"most": f"{MAX_VALUES:,}"}


def _too_deep(line: int | None) -> Invalid:
    return Invalid.at(msg=_("nesting is deeper than %(max_depth)s levels") % {"max_depth": MAX_DEPTH}, line=line)


def _syntax_error(error: yaml.MarkedYAMLError, text: str) -> Invalid:
    """The parser's error, with line and column from 1; an end that comes too early is at the end of the last line."""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    lines = text.splitlines() or [""]
    if line > len(lines):
        line, column = len(lines), len(lines[-1]) + 1
    what = error.problem or error.context or _("it can't be parsed")
    msg = _("invalid YAML in line %(line)s, column %(column)s: %(what)s") % {
        "line": line,
        "column": column,
        "what": what,
    }
    if "tab" in what or ("cannot start any token" in what and "\t" in lines[line - 1]):
        msg += _("; indent with spaces, not tabs")
    elif "mapping values are not allowed" in what:
        msg += _("; quote text that contains `: `")
    return Invalid(msg, [{"loc": [], "line": line, "col": column, "msg": msg}])


class _Loader(yaml.CSafeLoader):
    """Resolves plain scalars as JSON does; YAML 1.1 has more booleans, dates and base-60 numbers."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_TAG = "tag:yaml.org,2002:"
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]{1,18}", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z", re.ASCII), list(_first))


class _Dumper(yaml.CSafeDumper):
    """Quotes the texts that `_Loader` would read as something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text_node(dumper: _Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar(f"{_TAG}str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_node)


def as_yaml(config: Any) -> str:
    """An object as the text of a run file; `read` gives it back."""
    text: str = yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


@dataclass
class _Reader:
    """Converts YAML nodes to plain data, with their lines and all errors."""

    lines: dict[str, int] = field(default_factory=dict)
    errors: list[FieldError] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    seen: int = 0
    size: int = 0
    """Characters of all texts, those that aliases repeat included."""

    def value(self, node: yaml.Node, path: Path) -> Any:
        """The data of a node. Raises Invalid for too many, too deep or recursive values."""
        line = node.start_mark.line + 1
        self.seen += 1
        if self.seen > MAX_VALUES:
            raise Invalid.at(*path, msg=_too_many(), line=line)
        if id(node) in self.open:
            raise Invalid.at(*path, msg=_("this value contains itself"), line=line)
        if len(path) > MAX_DEPTH:
            raise _too_deep(line)
        _check_path(path, line)
        self.open.add(id(node))
        try:
            match node:
                case yaml.MappingNode():
                    return self._mapping(node, path)
                case yaml.SequenceNode():
                    return self._sequence(node, path)
                case _:
                    return self._scalar(node, path)
        finally:
            self.open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._wrong(path, line, _("a key must be plain text"))
                continue
            key = self._counted(key_node, path)
            _check_path((*path, key), line)
            if unusable(key):
                self._wrong(path, line, _("a key must be plain text"))
                continue
            here = (*path, key)
            if key in found:
                self._wrong(
                    here,
                    line,
                    _("`%(here)s` is given twice; first in line %(lines)s")
                    % {"here": dotted(here), "lines": self.lines[dotted(here)]},
                )
                continue
            self.lines[dotted(here)] = line
            found[key] = self.value(value_node, here)
        return found

    def _sequence(self, node: yaml.SequenceNode, path: Path) -> list[Any]:
        found = []
        for index, item in enumerate(node.value):
            self.lines[dotted((*path, index))] = item.start_mark.line + 1
            found.append(self.value(item, (*path, index)))
        return found

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        """The value of a scalar. In `commands` and `env` it stays text: `1.10` is `1.10`, `true` is a command."""
        text = self._counted(node, path)
        kind = node.tag.removeprefix(_TAG)
        if kind == "null":
            return None
        if kind == "str" or (path and path[0] in ("commands", "env") and kind in ("bool", "int", "float")):
            if (problem := unusable(text)) is not None:
                self._wrong(path, node.start_mark.line + 1, problem)
            return text
        try:
            match kind:
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text)
                case "float":
                    return float(text)
        except (KeyError, ValueError):
            pass
        self._wrong(path, node.start_mark.line + 1, _("the tag %(tag)s is not supported") % {"tag": node.tag})
        return None

    def _counted(self, node: yaml.Node, path: Path) -> str:
        text: str = node.value
        self.size += len(text)
        if self.size > MAX_BYTES:
            msg = _("the file expands to more than %(most)s KB of text") % {"most": MAX_BYTES // 1024}
            raise Invalid.at(*path, msg=msg, line=node.start_mark.line + 1)
        return text

    def _wrong(self, path: Path, line: int, msg: str) -> None:
        self.errors.append({"loc": list(path), "line": line, "msg": msg})
        if len(self.errors) >= MAX_ERRORS:
            raise Invalid(self.errors[0]["msg"], self.errors)


def unusable(text: str) -> str | None:
    """Why a text can't be stored or passed to a process; None if it can."""
    if "\0" in text:
        return _("text can't contain NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        return _("text can't contain unpaired surrogates")
    return None
