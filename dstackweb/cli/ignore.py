"""Which files of a directory git would call the project's own: `.gitignore` files, read as git reads them.

pathspec translates the patterns. Levels, directories and their order are walked here, because git matches each
pattern against one path at a time, and never looks into a directory that is ignored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec.patterns.gitignore import GitIgnorePatternError
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern


@dataclass(frozen=True)
class Rule:
    """One line of a `.gitignore`."""

    pattern: GitIgnoreSpecPattern
    directories_only: bool

    def applies(self, path: str, is_directory: bool) -> bool:
        """Whether the line names this very path (relative to its file), not merely a directory above it."""
        if self.directories_only and not is_directory:
            return False
        found = self.pattern.match_file(path)
        return found is not None and found.match.groupdict().get("ps_d") is None


@dataclass(frozen=True)
class Level:
    """The rules of one `.gitignore`, for paths seen from its own directory. `prefix` ends in "/" or is empty."""

    prefix: str
    rules: tuple[Rule, ...]

    def verdict(self, path: str, is_directory: bool) -> bool | None:
        """True: ignored, False: wanted after all, None: not mentioned. The last line that applies decides."""
        relative = path[len(self.prefix) :]
        for rule in reversed(self.rules):
            if rule.applies(relative, is_directory):
                return bool(rule.pattern.include)
        return None


@dataclass(frozen=True)
class Entry:
    """A file or a link to ship; `path` is relative to the root, with "/"."""

    path: str
    info: os.stat_result

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.info.st_mode)


def parse(text: str) -> tuple[Rule, ...]:
    """The rules of a `.gitignore`'s text; lines that git would not understand are passed over, as git does."""
    rules = []
    for line in text.removeprefix(_bytewise("\ufeff")).split("\n"):
        line = line.removesuffix("\r")
        while line.endswith(" ") and not line.endswith("\\ "):
            line = line[:-1]
        directories_only = line.endswith("/")
        try:
            pattern = GitIgnoreSpecPattern(line.removesuffix("/"))
        except GitIgnorePatternError:
            continue
        if pattern.include is not None:
            rules.append(Rule(pattern, directories_only))
    return tuple(rules)


def walk(root: Path) -> Iterator[Entry]:
    """Files and links below `root` that git would not ignore, sorted, `.git` left out.

    `.gitignore` files above `root` count too, up to the top of the work tree it lies in. Raises OSError for a
    directory that can't be read.
    """
    top = next((place for place in (root, *root.parents) if (place / ".git").exists()), root)
    inside = root.relative_to(top).parts
    # Paths are seen from the top of the work tree, as the patterns there are.
    levels = [
        _level(top.joinpath(*inside[:depth]), _bytewise("/".join(inside[:depth]))) for depth in range(len(inside))
    ]
    base = _bytewise("".join(f"{part}/" for part in inside))
    for path, info in _walk(root, base, tuple(level for level in levels if level)):
        yield Entry(os.fsdecode(path[len(base) :].encode("ascii", "surrogateescape")), info)


def _bytewise(path: str) -> str:
    """A character for each byte, which is what `?` and `[…]` match in git."""
    return os.fsencode(path).decode("ascii", "surrogateescape")


def _walk(directory: Path, prefix: str, above: tuple[Level, ...]) -> Iterator[tuple[str, os.stat_result]]:
    own = _level(directory, prefix.rstrip("/"))
    levels = (*above, own) if own else above
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        path = prefix + _bytewise(entry.name)
        is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name == ".git" or _ignored(path, is_directory, levels):
            continue
        if is_directory:
            yield from _walk(directory / entry.name, f"{path}/", levels)
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield path, entry.stat(follow_symlinks=False)


def _ignored(path: str, is_directory: bool, levels: tuple[Level, ...]) -> bool:
    for level in reversed(levels):
        verdict = level.verdict(path, is_directory)
        if verdict is not None:
            return verdict
    return False


def _level(directory: Path, prefix: str) -> Level | None:
    """The level of a directory's own `.gitignore`; git doesn't follow one that is a link."""
    file = directory / ".gitignore"
    if file.is_symlink() or not file.is_file():
        return None
    return Level(f"{prefix}/" if prefix else "", parse(file.read_bytes().decode("ascii", "surrogateescape")))
