"""The log of a job on its host: its beginning, and its end where it is over its limit."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dstackweb.runner import output, spool
from dstackweb.runner.masking import Masker
from dstackweb.runner.spool import CUT, missing_line
from tests.support import eventually, examples

LIMIT = 80
HEAD, SEGMENT = 60, 10
NO_SECRETS = Masker([])


def log(path: Path, masker: Masker = NO_SECRETS) -> bytes:
    """The log as it would be sent now."""
    return spool.read_masked(str(path), 0, masker, 1 << 20, final=True)


def relayed(folder: Path, limit: int, *writes: bytes) -> Path:
    """A spool after its job's end, through a real relay."""
    path = folder / "spool"
    sinks = output.start_relay(str(path), limit, pwd.getpwuid(os.getuid()))
    os.close(sinks.err)
    with open(sinks.out, "wb", buffering=0) as sink:
        for data in writes:
            sink.write(data)
    eventually(lambda: output.is_done(str(path)), every=0.002)
    spool.close(str(path))
    return path


@pytest.mark.parametrize("size", [0, 1, HEAD, HEAD + 1, LIMIT - 1, LIMIT])
def test_up_to_the_limit_nothing_is_cut(tmp_path: Path, size: int) -> None:
    data = bytes(range(size))
    path = relayed(tmp_path, LIMIT, data)
    assert log(path) == data
    assert spool.pieces(str(path), NO_SECRETS)[1] == 0


def test_over_the_limit_the_first_and_the_last_lines_are_kept(tmp_path: Path) -> None:
    lines = [b"line %4d\n" % number for number in range(1000)]
    path = relayed(tmp_path, 8000, *lines, b"Traceback\n", b"ValueError: 3\n")
    text = log(path)
    before, after = text.split(CUT)
    missing, _, tail = after.partition(b"\n")
    assert before == b"".join(lines)[: len(before)]
    assert len(before) == 6000
    assert b"".join([*lines, b"Traceback\n", b"ValueError: 3\n"]).endswith(b"\n" + tail)
    assert tail.startswith(b"line ")
    assert tail.endswith(b"Traceback\nValueError: 3\n")
    count = 10_000 + len(b"Traceback\nValueError: 3\n") - len(before) - len(tail)
    assert missing + b"\n" == missing_line(count)
    assert spool.pieces(str(path), NO_SECRETS)[1] == count


def test_a_flood_never_takes_more_of_the_disk_than_the_limit(tmp_path: Path) -> None:
    path = relayed(tmp_path, 80_000, *(b"x" * 60_000 for _ in range(20)))
    kept = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "spool.marks"]
    assert sum(file.stat().st_size for file in kept) <= 80_000
    assert path.stat().st_size == 60_000


def test_a_secret_split_by_the_cut_is_masked_on_both_sides(tmp_path: Path) -> None:
    """At the head's end, and at the tail's beginning."""
    secret = b"SECRET-VALUE"
    path = relayed(tmp_path, LIMIT, b"a" * (HEAD - 6) + secret + b"b" * 30 + secret + b"c" * 6)
    text = log(path, Masker([secret]))
    assert b"SECRET" not in text
    assert b"VALUE" not in text
    assert text.startswith(b"a" * (HEAD - 6) + b"*" * 6 + CUT)


def test_output_after_the_close_is_discarded(tmp_path: Path) -> None:
    """Of a process that escaped: the log has been sent by then."""
    path = tmp_path / "spool"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = spool.Writer(file, str(path), LIMIT)
    writer.write(b"x" * 200)
    spool.close(str(path))
    sent = log(path)
    writer.write(b"y" * 500)
    assert log(path) == sent
    spool.close(str(path))
    os.close(file)


WRITES = st.lists(
    st.sampled_from([b"a", b"bc\n", b"secret", b"sec", b"ret", b"x" * 7, b"line\n" * 3, b"y" * 30]), max_size=25
)


@examples(80)
@given(writes=WRITES, masked=st.booleans())
def test_nothing_that_was_shown_ever_changes(
    tmp_path_factory: pytest.TempPathFactory, writes: list[bytes], masked: bool
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    masker = Masker([b"secret"]) if masked else NO_SECRETS
    path = folder / "spool"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = spool.Writer(file, str(path), LIMIT)
    shown = b""
    for data in writes:
        writer.write(data)
        now = spool.read_masked(str(path), 0, masker, 1 << 20, final=False)
        assert now.startswith(shown)
        shown = now
    spool.close(str(path))
    whole, everything = log(path, masker), b"".join(writes)
    assert whole.startswith(shown)
    assert spool.read_masked(str(path), 10, masker, 20, final=True) == whole[10:30]
    if len(everything) <= LIMIT:
        assert whole == masker.mask(everything)
    else:
        missing = spool.pieces(str(path), masker)[1]
        tail = whole.split(missing_line(missing))[1]
        assert len(everything) == HEAD + missing + len(tail)
        assert masked or everything.endswith(tail)
    os.close(file)
    shutil.rmtree(folder)
