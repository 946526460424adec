"""Lines and matches in logs of any length, found in bounded work."""

from __future__ import annotations

from unittest import mock
from uuid import UUID, uuid4

import pytest
from hypothesis import given, strategies as st

from dstackweb.runs import logs
from tests.support import examples

pytestmark = pytest.mark.django_db


def all_lines(job: UUID, first: int = 0) -> list[int]:
    found: list[int] = []
    while True:
        part = logs.lines(job, first + len(found))
        found += part.counts
        if not part.more:
            return found


def test_line_ends_are_counted_in_complete_blocks_a_bounded_number_at_once() -> None:
    job = uuid4()
    with mock.patch.multiple(logs, BLOCK=4, COUNTED_AT_ONCE=2):
        assert logs.lines(job, 0) == logs.Lines(0, [], False)
        logs.append_log(job, 0, b"a\n\n\nbcdefg\n\nh\n\nijk")
        assert logs.lines(job, 0) == logs.Lines(18, [3, 0], True)
        assert logs.lines(job, 2) == logs.Lines(18, [2, 2], False)
        assert logs.lines(job, 1) == logs.Lines(18, [0, 2, 2], False)
        assert logs.lines(job, 99).counts == []


def test_what_was_counted_is_not_read_again() -> None:
    job = uuid4()
    with mock.patch.object(logs, "BLOCK", 4):
        logs.append_log(job, 0, b"a\nb\nc\nd\n")
        assert all_lines(job) == [2]  # the last block may still grow
        with mock.patch.object(logs, "read_log", side_effect=AssertionError):
            assert all_lines(job) == [2]
        logs.append_log(job, 8, b"\n\n\n\n.")
        assert all_lines(job) == [2, 2, 4]
        logs.remove_log(job)
        assert logs.lines(job, 0) == logs.Lines(0, [], False)


@examples(60)
@given(text=st.binary(max_size=60).map(lambda data: data.translate(bytes(b"aAb\n"[n % 4] for n in range(256)))))
def test_a_search_finds_what_a_search_of_the_whole_log_does(text: bytes) -> None:
    job, found = uuid4(), list[int]()
    logs.append_log(job, 0, text)
    with mock.patch.multiple(logs, BLOCK=5, SEARCHED_AT_ONCE=2, MATCHES_AT_ONCE=2):
        start: int | None = 0
        while start is not None:
            part = logs.search(job, "Ab", start)
            found += part.offsets
            start = part.following
    expected, at = [], text.lower().find(b"ab")
    while at >= 0:
        expected.append(at)
        at = text.lower().find(b"ab", at + 2)
    assert found == expected


def test_no_text_is_searched_for_nothing() -> None:
    assert logs.search(uuid4(), "", 0) == logs.Matches([], None)


@pytest.mark.parametrize("log", [b"", b"one", b"one\n", b"one\ntwo", b"one\ntwo\n", b"\n\n"])
def test_a_tail_begins_at_a_line_and_never_behind_the_log(log: bytes) -> None:
    """Followers go on where it ends: one byte further and they would lose one."""
    job = uuid4()
    if log:
        logs.append_log(job, 0, log)
    assert logs.tail_offset(job, 0) == len(log)
    lines = log.splitlines(keepends=True)
    for number in range(1, 4):
        assert logs.tail_offset(job, number) == len(log) - len(b"".join(lines[-number:]))


@examples(50)
@given(
    st.lists(st.binary(max_size=6).map(lambda text: text.replace(b"\n", b"") + b"\n"), max_size=30), st.integers(1, 30)
)
def test_a_tail_has_as_many_lines_as_were_asked_for(lines: list[bytes], number: int) -> None:
    """However many bytes those are, within a bound for each."""
    job = uuid4()
    if lines:
        logs.append_log(job, 0, b"".join(lines))
    with mock.patch.multiple(logs, TAIL_SEARCHED=5, TAIL_LINE=7):
        assert logs.tail_offset(job, number) == len(b"".join(lines[:-number]))
