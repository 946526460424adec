"""When output was written, and to which stream: recorded beside it, in the log's own offsets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dstackweb.runner.client import Client, Refused, Unreachable
from dstackweb.runner.masking import Masker
from dstackweb.runner.output import Shipper, written
from dstackweb.runner.spool import (
    BOTH,
    DOUBLED_AFTER,
    ERR,
    EXACT_MARKS,
    GAP_S,
    MARK,
    MOST_MARKS,
    OUT,
    MarkWriter,
    marks_path,
)
from tests.runner.conftest import Box
from tests.support import eventually, examples

MakeBox = Callable[..., Box]
Mark = tuple[int, int, int]


def parsed(data: bytes | bytearray) -> list[Mark]:
    """Offset, milliseconds and stream of each record."""
    return [(offset, value >> 2, value & 3) for offset, value in MARK.iter_unpack(data)]


def streams(log: bytes, marks: list[Mark]) -> list[tuple[int, bytes]]:
    """The log in parts of one stream each."""
    found: list[tuple[int, bytes]] = []
    for (start, _, stream), (end, *_) in zip(marks, [*marks[1:], (len(log), 0, 0)], strict=True):
        if found and found[-1][0] == stream:
            found[-1] = stream, found[-1][1] + log[start:end]
        else:
            found.append((stream, log[start:end]))
    return found


def test_stdout_and_stderr_are_kept_apart_and_stay_in_order(box: MakeBox) -> None:
    job = box("for i in $(seq 200); do echo out $i; echo err $i >&2; done", log_marks=True)
    job.launch()
    job.end()
    expected = [part for i in range(1, 201) for part in ((OUT, b"out %d\n" % i), (ERR, b"err %d\n" % i))]
    assert bytes(job.api.log) == b"".join(text for _, text in expected)
    assert streams(bytes(job.api.log), parsed(job.api.marks)) == expected


def test_the_api_of_an_older_server_gets_no_marks(box: MakeBox) -> None:
    job = box("echo out; echo err >&2")
    job.launch()
    job.end()
    assert (bytes(job.api.log), bytes(job.api.marks)) == (b"out\nerr\n", b"")


def test_marks_behind_a_gap_in_the_log_have_its_offsets(box: MakeBox) -> None:
    flood = "head -c 3000000 /dev/zero | tr '\\0' x"
    job = box("echo up >&2", flood, "echo; echo the end >&2", "echo done", log_limit=100_000, log_marks=True)
    job.launch()
    job.end()
    log, marks = bytes(job.api.log), parsed(job.api.marks)
    assert b"bytes of output are missing here" in log
    assert [text for stream, text in streams(log, marks) if stream == ERR] == [b"up\n", b"the end\n"]


def test_a_later_runner_sends_the_marks_that_an_earlier_one_left(box: MakeBox) -> None:
    job = box("echo one; echo two >&2; while :; do sleep 0.02; done", log_marks=True)
    job.launch()
    eventually(lambda: job.nudge() and bytes(job.api.log) == b"one\ntwo\n")
    job.kill()
    del job.api.marks[MARK.size :]
    job.launch()
    job.end()
    assert streams(bytes(job.api.log), parsed(job.api.marks)) == [(OUT, b"one\n"), (ERR, b"two\n")]


def test_a_mark_is_made_when_the_stream_changes_or_time_has_passed(tmp_path: Path) -> None:
    spool = str(tmp_path / "spool")
    writer = MarkWriter(spool)
    for offset, stream, now in ((0, OUT, 5.0), (4, OUT, 5.01), (8, ERR, 5.02), (9, ERR, 5.03), (10, ERR, 5.5)):
        writer.note(offset, stream, now)
    assert parsed(Path(marks_path(spool)).read_bytes()) == [(0, 5000, OUT), (8, 5020, ERR), (10, 5500, ERR)]


def test_marks_become_rare_and_their_number_is_bounded(tmp_path: Path) -> None:
    spool = str(tmp_path / "spool")
    writer = MarkWriter(spool)
    for offset in range(EXACT_MARKS + 1000):
        writer.note(offset, offset % 2, 0.0)  # no time passes: only changes of stream
    marks = parsed(Path(marks_path(spool)).read_bytes())
    assert len(marks) == EXACT_MARKS + 1
    assert marks[-1] == (EXACT_MARKS, 0, BOTH)
    now, offset = 0.0, EXACT_MARKS
    while len(marks) < EXACT_MARKS + DOUBLED_AFTER + 10:
        now += GAP_S * 2 ** (EXACT_MARKS // DOUBLED_AFTER)
        offset += 1
        writer.note(offset, OUT, now)
        marks.append((offset, int(now * 1000), BOTH))
    assert os.path.getsize(marks_path(spool)) // MARK.size < len(marks) - 5  # from there on twice the time
    os.truncate(marks_path(spool), MOST_MARKS * MARK.size)
    MarkWriter(spool).note(offset, OUT, now)
    assert os.path.getsize(marks_path(spool)) == MOST_MARKS * MARK.size


def test_what_two_pipes_get_is_read_in_its_order() -> None:
    ends = [os.pipe2(os.O_NONBLOCK) for _ in range(2)]
    source = written({ends[0][0]: OUT, ends[1][0]: ERR})
    os.write(ends[1][1], b"a")
    os.write(ends[0][1], b"b")
    os.close(ends[1][1])
    os.close(ends[0][1])
    try:
        # The first reading comes before anything is registered, so the order between these two is not certain.
        assert sorted(source) == [(OUT, b"b"), (ERR, b"a")]
    finally:
        for pipe, _ in ends:
            os.close(pipe)


class Log(Client):
    """The API's side of log and marks, with answers that get lost and data that is lost since."""

    def __init__(self, draw: Callable[[st.SearchStrategy[str]], str]) -> None:
        self.data, self.marks = b"", b""
        self.draw = draw

    def post_bytes(self, path: str, data: bytes) -> dict[str, int]:
        asked = dict(pair.split("=") for pair in path.partition("?")[2].split("&"))
        offset, start, size = (int(asked.get(name, 0)) for name in ("offset", "marks", "marks_size"))
        fault = self.draw(st.sampled_from(["", "", "no answer", "lost answer", "rolled back"]))
        if fault == "no answer":
            raise Unreachable(fault)
        if fault == "rolled back":
            self.data, self.marks = self.data[: len(self.data) // 2], self.marks[: len(self.marks) // 32 * 16]
        if size and start <= len(self.marks):
            self.marks += data[:size][len(self.marks) - start :]
        kept = {"marks": len(self.marks)} if size else {}
        if offset > len(self.data):
            raise Refused(409, {"detail": "a gap", "expected": len(self.data)} | kept)
        self.data += data[size:][len(self.data) - offset :]
        if fault == "lost answer":
            raise Unreachable(fault)
        return {"next": len(self.data)} | kept


@examples(60)
@given(data=st.data(), parts=st.lists(st.tuples(st.sampled_from([OUT, ERR]), st.binary(min_size=1)), max_size=8))
def test_through_any_fault_all_marks_arrive_once(
    data: st.DataObject, parts: list[tuple[int, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    spool = tmp_path_factory.mktemp("job") / "spool"
    spool.write_bytes(b"")
    api, writer, at = Log(data.draw), MarkWriter(str(spool)), 0
    sender = Shipper(api, str(spool), Masker([]), with_marks=True)

    def ship(final: bool) -> bool:
        try:
            return sender.ship(final)
        except Unreachable:
            return True

    for number, (stream, text) in enumerate(parts):
        with spool.open("ab") as file:
            file.write(text)
        writer.note(at, stream, float(number))
        at += len(text)
        for _ in range(data.draw(st.integers(0, 2))):
            ship(final=False)
        if data.draw(st.booleans()):
            sender = Shipper(api, str(spool), Masker([]), with_marks=True)
    api.draw = lambda _: ""
    sender = Shipper(api, str(spool), Masker([]), with_marks=True)
    while ship(final=True):
        pass
    assert api.data == b"".join(text for _, text in parts)
    assert api.marks == Path(marks_path(str(spool))).read_bytes()
