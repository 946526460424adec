"""Folders that jobs may have written: all in them, found or removed by open folders, so that no link leads elsewhere.

Jobs can nest folders deeper than recursion, open files and long paths reach.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
from collections.abc import Callable, Iterator

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Report = Callable[[str], None]


def walk(top: int, deepest: int, unreadable: Report) -> Iterator[tuple[str, os.stat_result]]:
    """All that is in an open folder, with its path there; `unreadable` gets the paths of what can't be read.

    Folders of other file systems, and below so many, are not looked into.
    """
    device = os.fstat(top).st_dev
    levels: list[tuple[int, str, list[str]]] = []
    """The open folders, one in the other: each with its path, and those in it that are left."""
    names, above = ["."], top
    try:
        while True:
            if names and len(levels) <= deepest:
                name = names.pop()
                path = "" if name == "." else f"{levels[-1][1]}{name}/"
                try:
                    levels.append((os.open(name, FOLDER, dir_fd=above), path, []))
                except OSError:
                    unreadable(path)
                    continue
                yield from _entries(*levels[-1], device, unreadable)
            elif levels:
                os.close(levels.pop()[0])
            if not levels:
                return
            above, _path, names = levels[-1]
    finally:
        for folder, _path, _names in levels:
            os.close(folder)


def _entries(
    folder: int, above: str, below: list[str], device: int, unreadable: Report
) -> Iterator[tuple[str, os.stat_result]]:
    """All that is right in a folder, whose own folders are added to `below`."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    unreadable(above + entry.name)
                    continue
                if stat.S_ISDIR(info.st_mode) and info.st_dev == device:
                    below.append(entry.name)
                yield above + entry.name, info
    except OSError:
        unreadable(above)


def remove(path: str | os.PathLike[str], report: Report = lambda _problem: None) -> bool:
    """Remove a folder and all in it; whether it is gone. File systems that are mounted in it are left alone.

    What can't be removed stops nothing else; `report` gets the first such problem.
    """
    problems: list[OSError] = []
    try:
        top = _opened(os.fspath(path), None)
        try:
            problems = _emptied(top)
        finally:
            os.close(top)
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        problems.append(error)
    if problems:
        report(f"can't remove {os.fspath(path)}: {problems[0]}")
    return not os.path.lexists(path)


def _emptied(top: int) -> list[OSError]:
    """Empty a folder; what stood in the way. Folders below are moved up into it first, so that none is ever deep."""
    device, problems = os.fstat(top).st_dev, list[OSError]()
    prefix = f".{secrets.token_hex(8)}-"  # no name that a job can have taken
    names = (f"{prefix}{number}" for number in itertools.count())
    waiting = _cleared(top, problems)
    while waiting:
        name = waiting.pop()
        try:
            folder = _opened(name, top)
            try:
                if os.fstat(folder).st_dev == device:
                    waiting += _raised(folder, top, names, problems)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
        except OSError as error:
            problems.append(error)
        del problems[1:]
    return problems


def _raised(folder: int, top: int, names: Iterator[str], problems: list[OSError]) -> list[str]:
    """Remove a folder's files, and move its folders to the top under these names."""
    moved = []
    for below in _cleared(folder, problems):
        try:
            os.close(_opened(below, folder))  # a folder that is moved must be writable
            os.rename(below, name := next(names), src_dir_fd=folder, dst_dir_fd=top)
            moved.append(name)
        except OSError as error:
            problems.append(error)
    return moved


def _cleared(folder: int, problems: list[OSError]) -> list[str]:
    """Remove all but its folders, whose names are returned."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
                continue
            try:
                os.unlink(entry.name, dir_fd=folder)
            except OSError as error:
                problems.append(error)
    return folders


def _opened(name: str, above: int | None) -> int:
    """Open a folder, writable for its owner. Raises OSError."""
    is_root = os.geteuid() == 0
    try:
        folder = os.open(name, FOLDER, dir_fd=above)
    except PermissionError:
        if is_root:  # it may not touch what a link could lead to
            raise
        os.chmod(name, 0o700, dir_fd=above)
        folder = os.open(name, FOLDER, dir_fd=above)
    if not is_root:
        with contextlib.suppress(OSError):
            os.fchmod(folder, 0o700)
    return folder
