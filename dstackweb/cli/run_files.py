"""A run file on this machine: read, with values from the environment, and its errors as a compiler shows them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstackweb.cli.language import _
from dstackweb.cli.output import RED, ApiError, CliError, Painted, UsageError, clean, paint
from dstackweb.cli.tables import cells_of
from dstackweb.cli.values import size_text


@dataclass(frozen=True)
class LocalRunFile:
    """A run file's name on the command line, and its text. Only the server validates the text."""

    name: str
    text: str

    def env_from_here(self) -> dict[str, str]:
        """The values that this process's environment has for the bare names in `env` of each run."""
        import yaml

        try:
            runs = list(yaml.load_all(self.text, Loader=yaml.BaseLoader))  # builds text, lists and mappings only
        except (yaml.YAMLError, RecursionError):
            return {}  # the server reports the error with its line
        listed = [run["env"] for run in runs if isinstance(run, dict) and isinstance(run.get("env"), list)]
        names = [name.strip() for env in listed for name in env if isinstance(name, str)]
        return {name: os.environ[name] for name in names if name in os.environ}


def read(path: Path, limit: int) -> LocalRunFile:
    """The run file at `path`; `-` is standard input. Raises CliError if it can't be read, exceeds `limit` bytes or is
    not UTF-8."""
    try:
        if path == Path("-"):
            path, data = Path("stdin"), sys.stdin.buffer.read(limit + 1)
        else:
            with path.open("rb") as file:
                data = file.read(limit + 1)
    except OSError as error:
        raise CliError(_("can't read {file}: {reason}.", file=path, reason=error.strerror)) from None
    if len(data) > limit:
        raise CliError(
            _("{file} exceeds {limit}, the limit for a run file. Nothing was sent.", file=path, limit=size_text(limit))
        )
    try:
        return LocalRunFile(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise CliError(_("{file} is not valid UTF-8 (line {line}). Nothing was sent.", file=path, line=line)) from None


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """The values of `-e K=V` options; a bare `K` is copied from this process's environment. Raises UsageError."""
    env = {}
    for pair in pairs:
        name, given, value = pair.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                _("-e {pair}: invalid variable name {name!r}.", pair=pair, name=name), _("Write -e NAME=value.")
            )
        if not given and name not in os.environ:
            raise UsageError(
                _("-e {name}: {name} is not set in your shell.", name=name),
                _("Write -e {name}=value, or export it.", name=name),
            )
        env[name] = value if given else os.environ[name]
    return env


def explain(refused: ApiError, file: LocalRunFile) -> CliError:
    """A 422 in the form of compiler errors: each with its line of the file, and a caret below the key."""
    errors = refused.body.get("errors")
    places = [_place(error, file) for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
    if not places:
        return refused
    lines = (line for place in places for line in place)
    return CliError(_("the run is invalid. Nothing was submitted."), *lines)


def _place(error: dict[str, Any], file: LocalRunFile) -> list[str]:
    loc = [part for part in error.get("loc") or [] if isinstance(part, str)]
    message, line = clean(error.get("msg")), error.get("line")
    lines = file.text.splitlines()
    if not isinstance(line, int) or not 0 < line <= len(lines):
        return [f"{'.'.join(loc)}: {message}" if loc else message]
    source = lines[line - 1]
    column, width = _span(source, error.get("col"), loc)
    gutter = " " * len(str(line))
    pointer = _blank(source[:column]) + paint("^" * width, RED, sys.stderr)
    return [
        f"{gutter}--> {file.name}:{line}:{column + 1}",
        f"{gutter} |",
        f"{line} | {_printable(source)}",
        Painted(f"{gutter} | {pointer} {message}"),
    ]


def _span(source: str, col: object, loc: list[str]) -> tuple[int, int]:
    """Start (from 0) and width of the caret: the word at `col`, else the innermost key on the line."""
    if not isinstance(col, int) or not 0 < col <= len(source):
        found = (re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", source) for key in reversed(loc))
        first = next((match for match in found if match), re.search(r"[^\s-]\S*", source))
        return (first.start(), first.end() - first.start()) if first else (0, 1)
    word = re.match(r"[\w.-]+", source[col - 1 :])
    return col - 1, len(word[0]) if word else 1


def _printable(text: str) -> str:
    return "".join(char if char == "\t" or char.isprintable() else "\ufffd" for char in text)


def _blank(text: str) -> str:
    """Blanks as wide as `text` on a terminal."""
    return "".join("\t" if char == "\t" else " " * cells_of(char) for char in text)
