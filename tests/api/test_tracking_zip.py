"""What user code reports with, fetched from the server."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from django.test import Client

from tests.tracking.ear import Ear

PROGRAM = """
import sys
sys.path.insert(0, "tracking.zip")
from dstackweb.tracking import task, track
for number in track(range(3)):
    with task(f"step-{number}"):
        pass
"""


def test_the_file_alone_is_enough_to_report(db: None, tmp_path: Path) -> None:
    answer = Client().get("/api/v1/tracking.zip")
    assert answer["ETag"] == f'"{hashlib.sha256(answer.content).hexdigest()}"'
    (tmp_path / "tracking.zip").write_bytes(answer.content)
    with Ear() as ear:
        program = [sys.executable, "-I", "-S", "-c", PROGRAM]
        subprocess.run(program, cwd=tmp_path, env=ear.env, check=True, timeout=30)
    assert ear.states() == {f"step-{number}": "memory" for number in range(3)}
    assert ear.counts("items") == {"memory": 3}


def test_a_cached_copy_is_answered_with_304(db: None) -> None:
    etag = Client().get("/api/v1/tracking.zip")["ETag"]
    again = Client().get("/api/v1/tracking.zip", headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
