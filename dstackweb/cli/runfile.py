"""The run file as it lies on this machine: reading it, the values it takes from here, and pointing at its faults."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstackweb.cli.errors import CliError, Refused, UsageError
from dstackweb.cli.output import RED, clean, paint, size_text


@dataclass(frozen=True)
class RunFile:
    """A run file's name as it was given, and its text. What the text means is the server's to say."""

    name: str
    text: str

    def env_from_here(self) -> dict[str, str]:
        """Values of this process's environment for the names that `env` lists without one."""
        import yaml

        try:
            data = yaml.load(self.text, Loader=yaml.BaseLoader)  # builds text, lists and mappings only
        except (yaml.YAMLError, RecursionError):
            return {}  # the server says where, in the same words for everybody
        listed = data.get("env") if isinstance(data, dict) else None
        names = [name.strip() for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        return {name: os.environ[name] for name in names if name in os.environ}


def read(path: Path, limit: int) -> RunFile:
    """The run file at `path`, of at most `limit` bytes. Raises CliError when it can't be one."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CliError(f"can't read {path}: {error.strerror}.") from None
    if len(data) > limit:
        raise CliError(f"{path} is over {size_text(limit)}, the limit for a run file; nothing was sent.")
    try:
        return RunFile(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise CliError(f"{path} is no UTF-8 text (line {line}); nothing was sent.") from None


def parse_env(pairs: Sequence[str]) -> dict[str, str]:
    """The values of `-e K=V` options; a bare `K` is taken from this process's environment. Raises UsageError."""
    env = {}
    for pair in pairs:
        name, given, value = pair.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"-e {pair}: {name!r} is no name of a variable.", "Write -e NAME=value.")
        if not given and name not in os.environ:
            raise UsageError(f"-e {name}: {name} is not set here.", f"Write -e {name}=value, or export it before.")
        env[name] = value if given else os.environ[name]
    return env


def explain(refused: Refused, file: RunFile) -> CliError:
    """A 422 as a compiler would tell it: each error with its line of the file, and a caret under the key."""
    errors = refused.body.get("errors")
    places = [_place(error, file) for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
    if not places:
        return refused
    lines = (line for place in places for line in place)
    return CliError("the run can't be submitted as it is; nothing was stored.", *lines)


def _place(error: dict[str, Any], file: RunFile) -> list[str]:
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
        f"{gutter} | {pointer} {message}",
    ]


def _span(source: str, col: object, loc: list[str]) -> tuple[int, int]:
    """Where the caret begins (from 0) and how wide it is: the word at `col`, else the innermost key on the line."""
    if not isinstance(col, int) or not 0 < col <= len(source):
        found = (re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", source) for key in reversed(loc))
        first = next((match for match in found if match), re.search(r"[^\s-]\S*", source))
        return (first.start(), first.end() - first.start()) if first else (0, 1)
    word = re.match(r"[\w.-]+", source[col - 1 :])
    return col - 1, len(word[0]) if word else 1


def _printable(text: str) -> str:
    return "".join(char if char == "\t" or char.isprintable() else "\ufffd" for char in text)


def _blank(text: str) -> str:
    """Space as wide as `text` is on a terminal."""
    return "".join("\t" if c == "\t" else "  " if unicodedata.east_asian_width(c) in "WF" else " " for c in text)
