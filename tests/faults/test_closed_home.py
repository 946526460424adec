"""Jobs can't read, and so not lock, what a server keeps in its home."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.server import Server

pytestmark = [pytest.mark.nightly, pytest.mark.needs("root")]
JOB = 1_900_000_042


def readable(home: Path) -> set[str]:
    """The files below `home` that a job's user can open, by their first folder."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        with open(read) as file:
            found = json.load(file)
        os.waitpid(pid, 0)
        return set(found)
    try:
        os.setgroups([])
        os.setgid(JOB)
        os.setuid(JOB)
        opened = set()
        for folder, _folders, files in os.walk(home):
            for name in files:
                path = Path(folder, name)
                with suppress(OSError), path.open("rb"):
                    opened.add(path.relative_to(home).parts[0])
        os.write(write, json.dumps(sorted(opened)).encode())
    finally:
        os._exit(0)


def test_of_a_servers_home_a_job_can_read_static_files_only(server: Server) -> None:
    server.wait(server.submit("echo hello"))
    (server.home / "up.log").chmod(0o600)  # these tests' own
    assert readable(server.home) <= {"static"}
    assert (server.home / "up.lock").stat().st_mode & 0o777 == 0o600


def test_a_lock_file_of_an_older_version_is_closed(server: Server) -> None:
    (server.home / "up.lock").chmod(0o644)
    server.stop()
    server.start()
    assert (server.home / "up.lock").stat().st_mode & 0o777 == 0o600
