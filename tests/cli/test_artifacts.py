"""`dstackweb artifacts`: what a run left, as a list and as files of one's own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dstackweb.accounts.models import Project, User
from dstackweb.cli import artifacts as command
from dstackweb.cli.output import CliError
from dstackweb.runs import artifacts
from dstackweb.runs.artifacts import Offered
from dstackweb.runs.models import Job
from tests.cli.conftest import Cli
from tests.factories import make_host, make_run, place_all, placed_job, start


@pytest.fixture
def job(project: Project, ada: User) -> Job:
    make_host()
    run = make_run(project, ada, "train")
    place_all()
    return start(placed_job(run))


def keep(job: Job, path: str, data: bytes) -> None:
    assert artifacts.take(job.pk, Offered(path, len(data), hashlib.sha256(data).hexdigest()), 0, data).done


def test_they_are_listed(cli: Cli, job: Job) -> None:
    assert "No artifacts." in cli("artifacts", "train").output
    keep(job, "plots/loss.png", b"x" * 2048)
    keep(job, "a", b"")
    artifacts.note_left_out(job.pk, [{"path": "big", "why": "file_limit", "size": 1 << 30}], 2)
    result = cli("artifacts", "train")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["ATTEMPT", "NODE", "PATH", "SIZE", "STORED"]
    assert lines[2].split()[:5] == ["1", "0", "plots/loss.png", "2", "KB"]
    assert "2 files were not kept" in result.output
    assert "over the limit of 512 MB for a file" in result.output
    assert cli.ok("artifacts", "train", "-q").splitlines() == ["a", "plots/loss.png"]
    assert [one["size"] for one in json.loads(cli.ok("artifacts", "train", "--json"))["items"]] == [0, 2048]
    assert cli.ok("artifacts", "train", "-q", "--node", "1") == ""


def test_they_are_saved_once(cli: Cli, job: Job, tmp_path: Path) -> None:
    keep(job, "plots/loss.png", b"\x00\xff" * 5000)
    keep(job, "empty", b"")
    assert "2 files saved" in cli("artifacts", "train", "--download", str(tmp_path)).output
    assert (tmp_path / "1-0/plots/loss.png").read_bytes() == b"\x00\xff" * 5000
    assert (tmp_path / "1-0/empty").read_bytes() == b""
    (tmp_path / "1-0/empty").write_bytes(b"mine")
    assert "1 file saved" in (again := cli("artifacts", "train", "--download", str(tmp_path)).output)
    assert "1 was there already" in again
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["empty", "loss.png"]


def test_the_longest_names_are_saved(cli: Cli, job: Job, tmp_path: Path) -> None:
    """255 bytes, which are fewer characters."""
    name = "é" * 127 + "x"
    keep(job, name, b"1")
    assert "1 file saved" in cli("artifacts", "train", "--download", str(tmp_path)).output
    assert (tmp_path / "1-0" / name).read_bytes() == b"1"


def test_a_server_can_not_write_elsewhere(tmp_path: Path) -> None:
    item = {"path": "../../.bashrc", "node": 0, "attempt": 1, "size": 1, "sha256": "0" * 64}
    api: Any = None
    with pytest.raises(CliError, match="leads elsewhere"):
        command._save_all(api, "", [item], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_not_those_listed_are_not_saved(cli: Cli, job: Job, tmp_path: Path) -> None:
    keep(job, "a", b"abc")
    job.artifacts.update(sha256="0" * 64)
    result = cli("artifacts", "train", "--download", str(tmp_path))
    assert result.exit_code == 1
    assert "arrived with other bytes" in result.output
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
