"""What jobs have on the disk: how much it is, against a limit of theirs and room to leave free; and its removal.

Room is of two kinds, bytes and inodes: a file takes an inode even if it is empty.

All by open folders, so that no link leads elsewhere. Jobs can nest folders deeper than recursion and long paths reach.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LOOK_S, PAUSE_FACTOR = 0.2, 20.0
"""How often free space is looked at, and how much longer than a look at all files the next one waits."""
FILES_S = 5.0
SHARE = 16
"""A job may take a SHARE-th of the room to leave free once that is reached."""
MANY = 4
"""A job with a MANY-th of all inodes ends where none is left: it may have taken them between two looks."""
DEPTH = 100
"""Deeper folders are not looked into: jobs could hide files there. They count as too much."""
LINKS = 100_000
"""So many files with several names are counted once."""

BLOCK = 512
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Report = Callable[[str], None]


class TooDeep(Exception):
    """Folders are nested too deep to be looked at."""


@dataclass(frozen=True)
class Usage:
    """Room that files take; `size` is in bytes."""

    size: int
    inodes: int


@dataclass(frozen=True)
class Room:
    """Room of a disk: `free` bytes, and inodes, of which there are 0 where the file system makes them at need."""

    free: int
    free_inodes: int
    inodes: int


class DiskWatch:
    """Watches a job's `folders`, the first of which says what disk it is. Sizes are in bytes, None for no limit.

    `inode_reserve` is in percent. A thread looks, since there may be very many files. `over` becomes what is wrong:
    `used` and `limit`, `free` and `reserve`, or `free_inodes` and `inode_reserve`; `used` is None where it can't be
    counted.
    """

    def __init__(
        self, folders: Callable[[], Sequence[str]], processes: Callable[[], Collection[int]], *,
        limit: int | None, reserve: int | None, inode_reserve: int | None = None,
    ) -> None:  # fmt: skip
        self._folders, self._processes, self._limit, self._reserve = folders, processes, limit, reserve
        self._inode_reserve = inode_reserve
        self._before: Usage | None = None
        """The least that the job had since there is too little room; None while there is enough."""
        self._again = 0.0
        self._ended = threading.Event()
        self.over: dict[str, Any] | None = None

    def start(self) -> None:
        if self._limit or self._reserve or self._inode_reserve:
            threading.Thread(target=self._run, name="disk", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while self.over is None and not self._ended.wait(LOOK_S):
            with contextlib.suppress(OSError):  # the run's directory is gone, or its disk can't be read
                self.over = self.look(time.monotonic())

    def look(self, now: float) -> dict[str, Any] | None:
        """What is wrong, if anything is. Raises OSError."""
        folders = self._folders()
        room = _room(folders[0])
        reserve, inode_reserve = self._reserve or 0, room.inodes * (self._inode_reserve or 0) // 100
        has_few_bytes, has_few_inodes = room.free < reserve, room.free_inodes < inode_reserve
        is_low = has_few_bytes or has_few_inodes
        if not is_low:
            self._before = None
        if not (is_low or self._limit) or (now < self._again and not (is_low and self._before is None)):
            return None
        began = time.monotonic()
        try:
            has = used(folders, self._processes())
        except TooDeep:
            return {"used": None, "limit": self._limit}
        took = time.monotonic() - began
        self._again = now + took + max(PAUSE_FACTOR * took, 0.0 if is_low else FILES_S)
        if self._limit and has.size > self._limit:
            return {"used": has.size, "limit": self._limit}
        if is_low:
            before = self._before or has
            self._before = before = Usage(min(has.size, before.size), min(has.inodes, before.inodes))
            if has_few_bytes and has.size - before.size > reserve // SHARE:
                return {"free": room.free, "reserve": reserve}
            takes_inodes = has.inodes - before.inodes > inode_reserve // SHARE
            if has_few_inodes and (takes_inodes or (not room.free_inodes and MANY * has.inodes >= room.inodes)):
                return {"free_inodes": room.free_inodes, "inode_reserve": inode_reserve}
        return None


def used(folders: Sequence[str], processes: Collection[int] = ()) -> Usage:
    """Sum up what all files in these folders take, and files without a name that these processes have open.

    Links are not followed, and other file systems are left out. Raises TooDeep.
    """
    seen: set[tuple[int, int]] = set()
    size = inodes = 0
    for info in itertools.chain(*map(_below, folders), _nameless(processes)):
        if info.st_nlink != 1 and not stat.S_ISDIR(info.st_mode):
            key = info.st_dev, info.st_ino
            if key in seen:
                continue
            if len(seen) < LINKS:
                seen.add(key)
        size += info.st_blocks * BLOCK
        inodes += 1
    return Usage(size, inodes)


def _below(top: str) -> Iterator[os.stat_result]:
    """Of everything in a folder, whatever jobs do meanwhile; nothing if there is no such folder. Raises TooDeep."""
    try:
        folder = os.open(top, FOLDER)
    except FileNotFoundError:
        return
    try:
        for path, info in walk(folder, DEPTH, lambda _path: None):
            if path.count("/") >= DEPTH and stat.S_ISDIR(info.st_mode):
                raise TooDeep
            yield info
    finally:
        os.close(folder)


def _nameless(processes: Collection[int]) -> Iterator[os.stat_result]:
    """Of open files that were deleted: they take space until they are closed."""
    for pid in processes:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    info = os.stat(f"/proc/{pid}/fd/{number}")
                    if stat.S_ISREG(info.st_mode) and not info.st_nlink:
                        yield info


def loose(above: str, below: str, ids: Collection[int]) -> str | None:
    """The first folder from `above` to the one that holds `below` in which a user of jobs can change names.

    `ids` are the uids and gids that jobs may have. Raises FileNotFoundError.
    """
    name = below
    while name != above:
        folder = os.path.dirname(name)
        info = os.stat(folder)
        is_sticky = info.st_mode & stat.S_ISVTX and os.lstat(name).st_uid not in ids
        is_open = info.st_mode & stat.S_IWOTH or (info.st_gid in ids and info.st_mode & stat.S_IWGRP)
        if info.st_uid in ids or (is_open and not is_sticky):
            return folder
        name = folder
    return None


def _room(folder: str) -> Room:
    found = os.statvfs(folder)
    return Room(found.f_bavail * found.f_frsize, found.f_favail, found.f_files)


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
