"""What a job leaves in its artifacts directory: sent file by file once its processes are gone.

Jobs put there what they like. Only plain files are taken, found by open folders and with the rights of the job's user,
so that no link leads elsewhere. Each is sent from where the API has it up to, so that a later runner goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlencode

from dstackweb.runner import disk
from dstackweb.runner.child import ARTIFACTS as PARENT, acting_as, among_files_of
from dstackweb.runner.client import Client, Refused, Unreachable, backoff
from dstackweb.runner.limits import ARTIFACT_DEPTH_MAX, ARTIFACT_PATH_MAX, LISTED, ArtifactLeft, is_safe, shown
from dstackweb.runner.link import Link, Rejected
from dstackweb.runner.state import say

CHUNK = 1 << 20
SEEN_MAX = 100_000
"""So many files and folders are looked at."""
STOPPED_S = 30.0
"""Files of a job that is to stop are sent for so long at least, or its grace."""
CALL_S = 120.0
"""How long a call may take: the API reads a large file back to check it."""
LATE_S = 10.0
"""So long after the end of its time a call is waited for."""

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def folder_of(run_dir: str, attempt: int) -> str:
    return os.path.join(run_dir, PARENT, str(attempt))


def make_folder(run_dir: str, attempt: int, account: pwd.struct_passwd) -> None:
    """Make it, empty, with the rights of the job's user, whatever is there. Raises CannotStart, OSError."""
    parent, folder = os.path.join(run_dir, PARENT), folder_of(run_dir, attempt)
    with among_files_of(account):
        for path in (parent, folder):
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            if is_folder and path == folder:
                disk.remove(path, say)
            elif not is_folder and os.path.lexists(path):
                os.unlink(path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o755)


@dataclass
class LeftOut:
    """The files that are not sent: some with their names, and how many in all."""

    files: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0

    def add(self, path: str, why: str, size: int | None = None) -> None:
        self.number += 1
        if len(self.files) < LISTED:
            text = os.fsencode(path)[: 2 * ARTIFACT_PATH_MAX].decode("utf-8", "replace")
            self.files.append({"path": shown(text), "why": why, "size": size})

    def report(self) -> dict[str, Any]:
        return {"left_out": self.files, "number": self.number}


def find(run_dir: str, attempt: int, most: int, left: LeftOut) -> list[str]:
    """The paths of the plain files in an attempt's folder, `most` at most, sorted. Call with the job's rights.

    Raises OSError where there is no such folder.
    """
    found: list[str] = []
    with _opened(run_dir, (PARENT, str(attempt))) as top:
        device = os.fstat(top).st_dev
        seen = disk.walk(top, ARTIFACT_DEPTH_MAX - 1, lambda path: left.add(path, ArtifactLeft.UNREADABLE.value))
        for number, (path, info) in enumerate(seen):
            if number == SEEN_MAX:
                left.add("…", ArtifactLeft.TOO_MANY.value)
                break
            if stat.S_ISDIR(info.st_mode):
                if info.st_dev != device:
                    left.add(f"{path}/", ArtifactLeft.KIND.value)
                elif path.count("/") + 1 >= ARTIFACT_DEPTH_MAX:
                    left.add(f"{path}/", ArtifactLeft.NAME.value)
            elif not stat.S_ISREG(info.st_mode):
                left.add(path, ArtifactLeft.KIND.value)
            elif not _is_safe(path):
                left.add(path, ArtifactLeft.NAME.value, info.st_size)
            else:
                found.append(path)
    found.sort()
    for path in found[most:]:
        left.add(path, ArtifactLeft.TOO_MANY.value)
    return found[:most]


def _is_safe(path: str) -> bool:
    try:
        return is_safe(os.fsencode(path).decode())
    except UnicodeDecodeError:
        return False


@contextlib.contextmanager
def _opened(run_dir: str, names: tuple[str, ...]) -> Iterator[int]:
    """A folder below the run's, by names none of which may be a link. Raises OSError."""
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            below = os.open(name, disk.FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


class Artifacts:
    """Sends the artifacts of one attempt of a job, with heartbeats meanwhile.

    `limits` are those of the spec: `file` bytes of a file, `files` how many, `seconds` for all.
    """

    def __init__(self, link: Link, run_dir: str, account: pwd.struct_passwd, limits: dict[str, Any]) -> None:
        self._link, self._run_dir, self._account, self._limits = link, run_dir, account, limits
        self._attempt = int(link.spec["attempt"])
        self._left = LeftOut()
        self._client: Client = link.new_client(CALL_S)
        self._until = time.monotonic() + float(limits["seconds"])
        self._next_heartbeat = 0.0
        self._grace_s = float("inf")
        """Of the stop that leaves the least time, once the job is to stop."""
        self._size: int | None = None
        """Of the file that is sent now, in bytes."""

    def send(self) -> dict[str, Any]:
        """Send all that may be sent; what was left out, and why. Raises Rejected."""
        try:
            with acting_as(self._account):
                found = find(self._run_dir, self._attempt, int(self._limits["files"]), self._left)
        except OSError:
            return self._left.report()
        try:
            for number, path in enumerate(found):
                if time.monotonic() >= self._until:
                    for late in found[number:]:
                        self._left.add(late, ArtifactLeft.TIME.value)
                    break
                if (why := self._send_one(path)) is not None:
                    self._left.add(path, why, self._size)
        finally:
            self._client.close()
        if self._left.number:
            say(f"{self._left.number} artifacts were left out: {self._left.files[0]}")
        return self._left.report()

    def _send_one(self, path: str) -> str | None:
        """Send a file; why it was left out, or None. Raises Rejected."""
        self._size = None
        names = path.split("/")
        try:
            with acting_as(self._account), _opened(
                self._run_dir, (PARENT, str(self._attempt), *names[:-1])
            ) as folder:  # fmt: skip
                number = os.open(names[-1], _FILE, dir_fd=folder)
        except OSError:
            return ArtifactLeft.UNREADABLE.value
        try:
            info = os.fstat(number)
            if not stat.S_ISREG(info.st_mode):
                return ArtifactLeft.KIND.value
            self._size = info.st_size
            if info.st_size > int(self._limits["file"]):
                return ArtifactLeft.FILE_LIMIT.value
            digest = self._digest(number, info.st_size)
            if digest is None:
                return ArtifactLeft.TIME.value
            return self._send_bytes(number, {"path": path, "size": info.st_size, "sha256": digest})
        except OSError:
            return ArtifactLeft.UNREADABLE.value
        finally:
            os.close(number)

    def _digest(self, number: int, size: int) -> str | None:
        """The SHA-256 of an open file; None if there is no time. Raises OSError."""
        digest = hashlib.sha256()
        for start in range(0, size, CHUNK):
            digest.update(os.pread(number, min(CHUNK, size - start), start))
            self._beat()
            if time.monotonic() >= self._until:
                return None
        return digest.hexdigest()

    def _send_bytes(self, number: int, file: dict[str, Any]) -> str | None:
        size, offset, failures = int(file["size"]), 0, 0
        is_asking = size > CHUNK
        while time.monotonic() < self._until:
            data = b"" if is_asking else os.pread(number, min(CHUNK, size - offset), offset)
            if not is_asking and len(data) < min(CHUNK, size - offset):
                return ArtifactLeft.CHANGED.value
            query = urlencode({**file, "offset": offset})
            try:
                answer = self._answer(partial(self._client.post_bytes, f"artifacts?{query}", data))
            except Unreachable as error:
                failures += 1
                if failures in (1, 10):
                    say(f"the API can't be reached, artifacts wait: {error}")
                self._wait(error.retry_after_s or backoff(failures))
                continue
            except Refused as refused:
                if refused.status != 409 or "expected" not in refused.body:
                    raise Rejected(str(refused)) from None
                answer = {"next": refused.body["expected"]}
            if answer.get("refused"):
                return str(answer["refused"])
            if answer.get("done"):
                return None
            if int(answer["next"]) == offset and not is_asking:
                failures += 1
                self._wait(backoff(failures))
            offset, is_asking = int(answer["next"]), False
        return ArtifactLeft.TIME.value

    def _answer(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Make a call in a thread, with heartbeats meanwhile. Raises what it raises; Unreachable when time is over."""
        outcome: list[Any] = []

        def make() -> None:
            try:
                outcome.append(call())
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        while thread.is_alive():
            self._beat()
            thread.join(0.2)
            if time.monotonic() >= self._until + LATE_S:
                raise Unreachable("no answer in time")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        answer: dict[str, Any] = outcome[0]
        return answer

    def _wait(self, seconds: float) -> None:
        until = min(self._until, time.monotonic() + seconds)
        while (left := until - time.monotonic()) > 0:
            self._beat()
            self._link.pause(min(left, 0.2))

    def _beat(self) -> None:
        """Send a heartbeat if one is due. Raises Rejected."""
        if time.monotonic() < self._next_heartbeat and not self._link.nudged():
            return
        try:
            answer = self._link.heartbeat("exited")
        except Unreachable:
            self._next_heartbeat = time.monotonic() + self._link.heartbeat_s
            return
        except Refused as refused:
            raise Rejected(str(refused)) from None
        self._next_heartbeat = self._link.next_heartbeat()
        if answer["action"] == "stop" and float(answer["grace_s"]) < self._grace_s:
            self._grace_s = float(answer["grace_s"])
            self._until = min(self._until, time.monotonic() + max(STOPPED_S, self._grace_s))
