"""How much of the disk a job's files take: a limit of its own, and space that jobs must leave free on the machine.

A thread looks, since a job may have very many files. What it finds is for the runner's loop.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from dstackweb.runner.folders import FOLDER, walk

LOOK_S, PAUSE_FACTOR = 0.2, 20.0
"""How often free space is looked at, and how much longer than a look at all files the next one waits."""
FILES_S = 5.0
SHARE = 16
"""Of the space to leave free a job may write so much less once it is reached."""
DEPTH = 100
"""Deeper folders are not looked into: jobs could hide files there. They count as too much."""
LINKS = 100_000
"""So many files with several names are counted once."""

BLOCK = 512


class TooDeep(Exception):
    """Folders are nested too deep to be looked at."""


class DiskWatch:
    """Watches a job's `folders`, the first of which says what disk it is. Sizes are in bytes, None for no limit.

    `over` becomes what is wrong: `used` and `limit`, or `free` and `reserve`; `used` is None where it can't be counted.
    """

    def __init__(
        self, folders: Callable[[], Sequence[str]], processes: Callable[[], Collection[int]], *,
        limit: int | None, reserve: int | None,
    ) -> None:  # fmt: skip
        self._folders, self._processes, self._limit, self._reserve = folders, processes, limit, reserve
        self._before: int | None = None
        self._again = 0.0
        self._ended = threading.Event()
        self.over: dict[str, Any] | None = None

    def start(self) -> None:
        if self._limit or self._reserve:
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
        free = _free(folders[0]) if self._reserve else 0
        is_low = self._reserve is not None and free < self._reserve
        if not is_low:
            self._before = None
        if not (is_low or self._limit) or (now < self._again and not (is_low and self._before is None)):
            return None
        began = time.monotonic()
        try:
            size = used(folders, self._processes())
        except TooDeep:
            return {"used": None, "limit": self._limit}
        took = time.monotonic() - began
        self._again = now + took + max(PAUSE_FACTOR * took, 0.0 if is_low else FILES_S)
        if self._limit and size > self._limit:
            return {"used": size, "limit": self._limit}
        if is_low and self._reserve:
            self._before = size if self._before is None else min(size, self._before)
            if size - self._before > self._reserve // SHARE:
                return {"free": free, "reserve": self._reserve}
        return None


def used(folders: Sequence[str], processes: Collection[int] = ()) -> int:
    """Bytes on the disk of all files in these folders, and of files without a name that these processes have open.

    Links are not followed, and other file systems are left out. Raises TooDeep.
    """
    seen: set[tuple[int, int]] = set()
    total = 0
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            total += sum(_counted(info, seen) for info in _below(folder))
    return total + sum(_counted(info, seen) for info in _nameless(processes))


def _counted(info: os.stat_result, seen: set[tuple[int, int]]) -> int:
    if info.st_nlink != 1 and not stat.S_ISDIR(info.st_mode):
        key = info.st_dev, info.st_ino
        if key in seen:
            return 0
        if len(seen) < LINKS:
            seen.add(key)
    return info.st_blocks * BLOCK


def _below(top: str) -> Iterator[os.stat_result]:
    """Of everything in a folder, whatever jobs do meanwhile. Raises TooDeep, FileNotFoundError."""
    folder = os.open(top, FOLDER)
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


def _free(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
