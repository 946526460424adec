"""A file with several runs, a pipeline: documents of YAML between lines of `---`, or a list of objects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from dstackweb.lib.errors import Invalid
from dstackweb.lib.language import gettext as _
from dstackweb.spec.source import Config, check_size

MAX_RUNS = 20
"""All are stored in one transaction."""
_BETWEEN = re.compile(r"(---|\.\.\.)(?=[ \t\r]|$)")  # no value of YAML has such a line
_WITHOUT_VALUE = re.compile(r"[ \t\r]*(#.*)?$|%")  # blank, a comment, or a directive


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
