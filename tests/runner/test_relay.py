from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dstackweb.runner import relay
from tests.support import eventually


def through(spool: Path, limit: int, *pieces: bytes) -> bytes:
    sink = relay.start(str(spool), limit, None)
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(sink, rest) :]
    os.close(sink)
    eventually(lambda: relay.finished(str(spool)), every=0.002)
    return spool.read_bytes()


def test_any_bytes_arrive_in_order(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    assert through(tmp_path / "spool", 1 << 20, b"\xff\0\r\n", data, b"end") == b"\xff\0\r\n" + data + b"end"


@pytest.mark.parametrize("size", [0, 999, 1000])
def test_up_to_the_limit_nothing_is_cut(tmp_path: Path, size: int) -> None:
    assert through(tmp_path / "spool", 1000, b"x" * size) == b"x" * size


@pytest.mark.parametrize("pieces", [(1001,), (1000, 1), (999, 2), (600, 600, 600), (200_000,)])
def test_behind_the_limit_comes_one_line_and_nothing_more(tmp_path: Path, pieces: tuple[int, ...]) -> None:
    log = through(tmp_path / "spool", 1000, *(b"x" * size for size in pieces))
    assert log == b"x" * 1000 + b"\n[dstackweb: the log reached its limit of 1000 bytes; what followed is lost]\n"


def test_the_spool_is_not_finished_while_somebody_can_write(tmp_path: Path) -> None:
    spool = str(tmp_path / "spool")
    assert relay.finished(spool)
    sink = relay.start(spool, 1000, None)
    assert not relay.finished(spool)
    os.close(sink)
    eventually(lambda: relay.finished(spool), every=0.002)


def test_commands_may_open_their_output_anew_and_empty_nothing(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    sink = relay.start(str(spool), 1000, None)
    script = "echo 1; echo 2 > /dev/stderr; echo 3 | tee /dev/stdout; echo 4"
    subprocess.run(["/bin/sh", "-c", script], stdout=sink, stderr=sink, check=True)
    os.close(sink)
    eventually(lambda: relay.finished(str(spool)), every=0.002)
    assert sorted(spool.read_bytes().split()) == [b"1", b"2", b"3", b"3", b"4"]


def test_the_relay_is_nobodys_child(tmp_path: Path) -> None:
    sink = relay.start(str(tmp_path / "spool"), 1000, None)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text() if children.exists() else ""
    os.close(sink)
    eventually(lambda: relay.finished(str(tmp_path / "spool")), every=0.002)
    assert (children.read_text() if children.exists() else "") == before
